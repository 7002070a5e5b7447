#include "live_arena.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "../arena_cuda.h"
#include "nccl_sockets.h"

namespace torchmig::preload {

namespace {

std::atomic<uint64_t> counters[static_cast<int>(Seen::kCount)];
std::string& why_none() {
    static std::string why;
    return why;
}

Arena* make_arena() {
    if (switched_on("TORCHMIG_NO_ARENA")) {
        why_none() = "switched off by TORCHMIG_NO_ARENA";
        return nullptr;
    }
    const cuda::Driver* driver = cuda::driver(&why_none());
    if (driver == nullptr) {
        return nullptr;
    }
    // Never destroyed: the allocator gives memory back until the very end of the process.
    return new Arena(kCudaLayout, std::make_unique<CudaBacking>(*driver));
}

int detach() {
    Arena* arena = live_arena();
    return arena != nullptr ? arena->detach() : cuda::kSuccess;
}

int attach() {
    Arena* arena = live_arena();
    return arena != nullptr ? arena->attach() : cuda::kSuccess;
}

size_t mappings(AbiMapping* out, size_t capacity) {
    Arena* arena = live_arena();
    if (arena == nullptr) {
        return 0;
    }
    const auto all = arena->mappings();
    for (size_t i = 0; i < all.size() && i < capacity; i++) {
        out[i] = {all[i].device, all[i].address, all[i].size};
    }
    return all.size();
}

uint64_t physical_bytes() {
    Arena* arena = live_arena();
    return arena != nullptr ? arena->physical_bytes() : 0;
}

const char* why_unusable() {
    static thread_local std::string text;
    Arena* arena = live_arena();
    text = arena != nullptr ? arena->why_unusable() : why_none();
    return text.c_str();
}

uint64_t seen(int what) {
    return what >= 0 && what < static_cast<int>(Seen::kCount) ? counters[what].load() : 0;
}

int nccl_socket(uint64_t inode) {
    return is_nccl_socket(inode) ? 1 : 0;
}

constexpr ArenaAbi kAbi{
    kArenaAbiVersion, detach, attach, mappings, physical_bytes, why_unusable, seen, nccl_socket};

}  // namespace

Arena* live_arena() {
    static Arena* const arena = make_arena();
    return arena;
}

bool switched_on(const char* variable) {
    const char* value = std::getenv(variable);
    return value != nullptr && std::strcmp(value, "1") == 0;
}

void note(Seen what) {
    counters[static_cast<int>(what)].fetch_add(1);
}

void note_back(Seen what) {
    counters[static_cast<int>(what)].fetch_sub(1);
}

}  // namespace torchmig::preload

extern "C" __attribute__((visibility("default"))) const torchmig::ArenaAbi* torchmig_arena_abi() {
    return &torchmig::preload::kAbi;
}
