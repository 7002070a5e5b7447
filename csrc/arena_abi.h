// What the preloaded library shows to the extension module, in plain C: the two are separate
// libraries, each with its own C++ runtime, so nothing with a class or an exception passes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchmig {

constexpr uint32_t kArenaAbiVersion = 3;
constexpr const char* kArenaAbiSymbol = "torchmig_arena_abi";

// What a process did that a checkpoint cannot hold; each has a counter.
enum class Seen : int {
    kManagedMemory = 0,    // cudaMallocManaged
    kIpcExport = 1,        // cudaIpcGetMemHandle
    kIpcImport = 2,        // cudaIpcOpenMemHandle
    kShareableMemory = 3,  // memory made to be exported: symmetric memory, NVSHMEM, windows
    kMulticast = 4,        // cuMulticastCreate
    kAsyncAllocator = 5,   // cudaMallocAsync
    kCupti = 6,            // cuptiSubscribe
    kCount = 7,
};

struct AbiMapping {
    int32_t device;
    uint64_t address;
    uint64_t size;
};

struct ArenaAbi {
    uint32_t version;
    int (*detach)();  // driver result codes
    int (*attach)();
    size_t (*mappings)(AbiMapping* out, size_t capacity);  // returns how many there are
    uint64_t (*physical_bytes)();
    // Why there is no arena, as text; empty where there is one. Valid until the next call.
    const char* (*why_unusable)();
    uint64_t (*seen)(int what);
    // Whether a socket of this inode number is NCCL's; may be called in a forked child.
    int (*is_nccl_socket)(uint64_t inode);
};

}  // namespace torchmig
