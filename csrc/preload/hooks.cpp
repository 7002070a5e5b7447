// The functions of the CUDA runtime and of CUPTI that this library stands in front of, each listed
// here and nowhere else. A hook never throws: it answers with the library's own error codes.
#include <cstddef>
#include <cstdio>

#include "../lazy_cuda.h"
#include "callers.h"
#include "driver_entries.h"
#include "live_arena.h"

#define TORCHMIG_HOOK extern "C" __attribute__((visibility("default")))

namespace {

using RuntimeError = int;  // cudaError_t; the codes used here are the driver's
constexpr RuntimeError kNoRuntime = torchmig::cuda::kUnknown;

using torchmig::Arena;
using torchmig::Seen;
using torchmig::cuda::kSuccess;
using torchmig::preload::is_allocator;
using torchmig::preload::live_arena;
using torchmig::preload::note;
using torchmig::preload::note_back;
using torchmig::preload::switched_on;

// The runtime's own function, looked up once a call site.
template <typename Function>
Function runtime(const char* name) {
    return reinterpret_cast<Function>(torchmig::preload::function_behind("libcudart.so", name));
}

#define TORCHMIG_REAL(name, ...)                           \
    using Function = RuntimeError (*)(__VA_ARGS__);        \
    static const Function real = runtime<Function>(#name); \
    if (real == nullptr) {                                 \
        return kNoRuntime;                                 \
    }

RuntimeError free_by_runtime(void* address) {
    TORCHMIG_REAL(cudaFree, void*)
    return real(address);
}

// The device whose context this thread uses, made by the runtime if there is none yet.
bool current_device(int* device) {
    const torchmig::cuda::Driver* cuda = torchmig::cuda::driver();
    return cuda->cuCtxGetDevice(device) == kSuccess ||
           (free_by_runtime(nullptr) == 0 && cuda->cuCtxGetDevice(device) == kSuccess);
}

}  // namespace

TORCHMIG_HOOK RuntimeError cudaMalloc(void** out, size_t size) {
    TORCHMIG_REAL(cudaMalloc, void**, size_t)
    int device = 0;
    if (size == 0 || !is_allocator(__builtin_return_address(0)) || live_arena() == nullptr ||
        !live_arena()->usable() || !current_device(&device)) {
        return real(out, size);
    }
    uintptr_t address = 0;
    const RuntimeError result = live_arena()->allocate(device, size, &address);
    if (result == kSuccess) {
        *out = reinterpret_cast<void*>(address);
        return result;
    }
    if (!live_arena()->usable()) {
        std::fprintf(stderr,
                     "torchmig: GPU memory is not in the arena: %s\n",
                     live_arena()->why_unusable().c_str());
        return real(out, size);
    }
    // Out of memory stays out of memory: the allocator frees what it caches and asks again.
    return result;
}

TORCHMIG_HOOK RuntimeError cudaFree(void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    Arena* const arena = live_arena();
    if (address != nullptr && arena != nullptr && arena->contains(at)) {
        // As the real one does, wait until nothing on the device can use the memory.
        const RuntimeError idle = torchmig::cuda::driver()->cuCtxSynchronize();
        return idle != kSuccess ? idle : arena->free(at);
    }
    return free_by_runtime(address);
}

TORCHMIG_HOOK RuntimeError cudaGetDriverEntryPoint(const char* name,
                                                   void** function,
                                                   unsigned long long flags,
                                                   int* found) {
    TORCHMIG_REAL(cudaGetDriverEntryPoint, const char*, void**, unsigned long long, int*)
    const RuntimeError result = real(name, function, flags, found);
    if (result == kSuccess && is_allocator(__builtin_return_address(0))) {
        *function = torchmig::preload::driver_entry(name, *function);
    }
    return result;
}

TORCHMIG_HOOK RuntimeError cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned version, unsigned long long flags, int* found) {
    TORCHMIG_REAL(
        cudaGetDriverEntryPointByVersion, const char*, void**, unsigned, unsigned long long, int*)
    const RuntimeError result = real(name, function, version, flags, found);
    if (result == kSuccess && is_allocator(__builtin_return_address(0))) {
        *function = torchmig::preload::driver_entry(name, *function);
    }
    return result;
}

TORCHMIG_HOOK RuntimeError cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    TORCHMIG_REAL(cudaDeviceEnablePeerAccess, int, unsigned)
    const RuntimeError result = real(peer, flags);
    int device = 0;
    // The current device may now use the peer's memory; for mapped memory that has to be said.
    if (result == kSuccess && live_arena() != nullptr && current_device(&device)) {
        return live_arena()->add_peer(peer, device);
    }
    return result;
}

TORCHMIG_HOOK RuntimeError cudaMallocManaged(void** out, size_t size, unsigned flags) {
    TORCHMIG_REAL(cudaMallocManaged, void**, size_t, unsigned)
    note(Seen::kManagedMemory);
    return real(out, size, flags);
}

TORCHMIG_HOOK RuntimeError cudaMallocAsync(void** out, size_t size, void* stream) {
    TORCHMIG_REAL(cudaMallocAsync, void**, size_t, void*)
    note(Seen::kAsyncAllocator);
    return real(out, size, stream);
}

TORCHMIG_HOOK RuntimeError cudaIpcGetMemHandle(void* handle, void* address) {
    TORCHMIG_REAL(cudaIpcGetMemHandle, void*, void*)
    if (live_arena() != nullptr && live_arena()->contains(reinterpret_cast<uintptr_t>(address))) {
        std::fprintf(stderr,
                     "torchmig: CUDA tensors cannot be shared with other processes from "
                     "the arena; run torchmig-run with --no-arena\n");
        return torchmig::cuda::kNotSupported;
    }
    note(Seen::kIpcExport);
    return real(handle, address);
}

// The handle is passed by value, 64 bytes.
struct IpcMemHandle {
    char bytes[64];
};

TORCHMIG_HOOK RuntimeError cudaIpcOpenMemHandle(void** out, IpcMemHandle handle, unsigned flags) {
    TORCHMIG_REAL(cudaIpcOpenMemHandle, void**, IpcMemHandle, unsigned)
    const RuntimeError result = real(out, handle, flags);
    if (result == kSuccess) {
        note(Seen::kIpcImport);
    }
    return result;
}

TORCHMIG_HOOK RuntimeError cudaIpcCloseMemHandle(void* address) {
    TORCHMIG_REAL(cudaIpcCloseMemHandle, void*)
    const RuntimeError result = real(address);
    if (result == kSuccess) {
        note_back(Seen::kIpcImport);
    }
    return result;
}

// Once a process has a subscriber the driver does not lock it any more, not even when CUPTI has
// been finalized. torch's profiler, refused here, goes on with what happens on the CPU.
TORCHMIG_HOOK int cuptiSubscribe(void** subscriber, void* callback, void* data) {
    constexpr int kNotSupported = 27;  // CUPTI_ERROR_NOT_SUPPORTED
    using Function = int (*)(void**, void*, void*);
    static const auto real = reinterpret_cast<Function>(
        torchmig::preload::function_behind("libcupti.so", "cuptiSubscribe"));
    if (real == nullptr || switched_on("TORCHMIG_NO_CUPTI")) {
        return kNotSupported;
    }
    note(Seen::kCupti);
    return real(subscriber, callback, data);
}
