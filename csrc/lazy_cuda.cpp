#include "lazy_cuda.h"

#include <dlfcn.h>

#if __has_include(<cuda.h>)
#include <cuda.h>
#define TORCHMIG_HAVE_CUDA_H 1
#endif

namespace torchmig::cuda {

#ifdef TORCHMIG_HAVE_CUDA_H
static_assert(sizeof(Location) == sizeof(CUmemLocation));
static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, requested_handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProperties, gpu_direct_rdma_capable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(offsetof(AllocationProperties, usage) ==
              offsetof(CUmemAllocationProp, allocFlags.usage));
static_assert(sizeof(AccessDescription) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(Result) == sizeof(CUresult) && sizeof(Device) == sizeof(CUdevice));
static_assert(sizeof(DevicePtr) == sizeof(CUdeviceptr));
static_assert(sizeof(Handle) == sizeof(CUmemGenericAllocationHandle));
static_assert(kInvalidValue == CUDA_ERROR_INVALID_VALUE &&
              kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(kNotSupported == CUDA_ERROR_NOT_SUPPORTED && kUnknown == CUDA_ERROR_UNKNOWN);
static_assert(kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kAttributeRdmaWithVmm == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventNoTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
#endif

namespace {

constexpr const char* kLibrary = "libcuda.so.1";

struct Loaded {
    Driver functions;
    bool usable = false;
    std::string why;
};

Loaded load() {
    Loaded loaded;
    void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) {
        const char* text = dlerror();
        loaded.why = text != nullptr ? text : "libcuda.so.1 cannot be loaded";
        return loaded;
    }
#define TORCHMIG_CUDA_LOOK_UP(name, ...)                                          \
    loaded.functions.name =                                                       \
        reinterpret_cast<decltype(loaded.functions.name)>(dlsym(library, #name)); \
    if (loaded.functions.name == nullptr) {                                       \
        loaded.why = "libcuda.so.1 has no '" #name "': the driver is too old";    \
        return loaded;                                                            \
    }
    TORCHMIG_CUDA_FUNCTIONS(TORCHMIG_CUDA_LOOK_UP)
#undef TORCHMIG_CUDA_LOOK_UP
    loaded.usable = true;
    return loaded;
}

}  // namespace

const Driver* driver(std::string* why) {
    static const Loaded loaded = load();
    if (!loaded.usable && why != nullptr) {
        *why = loaded.why;
    }
    return loaded.usable ? &loaded.functions : nullptr;
}

bool driver_is_loaded() {
    void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
        return false;
    }
    dlclose(library);
    return true;
}

std::string describe(Result code) {
    const char* name = nullptr;
    const char* text = nullptr;
    if (const Driver* cuda = driver()) {
        cuda->cuGetErrorName(code, &name);
        cuda->cuGetErrorString(code, &text);
    }
    if (name == nullptr || text == nullptr) {
        return "CUDA error " + std::to_string(code);
    }
    return std::string(name) + " (" + text + ")";
}

CudaError::CudaError(Result code, const char* expression, const char* file, int line)
    : std::runtime_error(std::string(expression) + " failed: " + describe(code) + " at " + file +
                         ":" + std::to_string(line)),
      code(code) {}

}  // namespace torchmig::cuda
