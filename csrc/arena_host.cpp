#include "arena_host.h"

#include <sys/mman.h>
#include <unistd.h>

namespace torchmig {

using cuda::kInvalidValue;
using cuda::kOutOfMemory;
using cuda::kSuccess;

namespace {

// Puts nothing back behind a range; the addresses stay ours.
Result map_nothing(uintptr_t address, size_t size, int placement) {
    void* const got = mmap(reinterpret_cast<void*>(address),
                           size,
                           PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | placement,
                           -1,
                           0);
    return got == reinterpret_cast<void*>(address) ? kSuccess : kInvalidValue;
}

}  // namespace

HostBacking::~HostBacking() {
    for (const auto& chunk : chunks_) {
        close(static_cast<int>(chunk.first));
    }
    for (const auto& range : reserved_) {
        munmap(reinterpret_cast<void*>(range.first), range.second);
    }
}

Result HostBacking::reserve(uintptr_t base, size_t size) {
    const Result result = map_nothing(base, size, MAP_FIXED_NOREPLACE);
    if (result == kSuccess) {
        reserved_.emplace(base, size);
    }
    return result;
}

Result HostBacking::create(size_t size, const AllocationProperties&, Handle* handle) {
    if (used_ + size > capacity_) {
        return kOutOfMemory;
    }
    const int fd = memfd_create("torchmig arena", MFD_CLOEXEC);
    if (fd < 0) {
        return kOutOfMemory;
    }
    if (ftruncate(fd, static_cast<off_t>(size)) != 0) {
        close(fd);
        return kOutOfMemory;
    }
    used_ += size;
    chunks_.emplace(static_cast<Handle>(fd), size);
    *handle = static_cast<Handle>(fd);
    return kSuccess;
}

Result HostBacking::release(Handle handle) {
    const auto chunk = chunks_.find(handle);
    if (chunk == chunks_.end()) {
        return kInvalidValue;
    }
    used_ -= chunk->second;
    chunks_.erase(chunk);
    return close(static_cast<int>(handle)) == 0 ? kSuccess : kInvalidValue;
}

Result HostBacking::map(uintptr_t address, size_t size, size_t offset, Handle handle) {
    const auto chunk = chunks_.find(handle);
    if (chunk == chunks_.end() || offset + size > chunk->second) {
        return kInvalidValue;
    }
    void* const got = mmap(reinterpret_cast<void*>(address),
                           size,
                           PROT_NONE,
                           MAP_SHARED | MAP_FIXED,
                           static_cast<int>(handle),
                           static_cast<off_t>(offset));
    return got == reinterpret_cast<void*>(address) ? kSuccess : kInvalidValue;
}

Result HostBacking::set_access(uintptr_t address, size_t size, const AccessDescription& access) {
    const int protection =
        access.flags == cuda::kAccessReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect(reinterpret_cast<void*>(address), size, protection) == 0 ? kSuccess
                                                                             : kInvalidValue;
}

Result HostBacking::unmap(uintptr_t address, size_t size) {
    return map_nothing(address, size, MAP_FIXED);
}

}  // namespace torchmig
