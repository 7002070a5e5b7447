// The arena's backing in host memory: the same promises as a GPU's, kept by memfds and mmap.
//
// This is how the arena is tested where there is no GPU.
#pragma once

#include <map>
#include <utility>

#include "arena.h"

namespace torchmig {

class HostBacking : public Backing {
  public:
    // At most `capacity` bytes exist at a time; asking for more is out of memory.
    explicit HostBacking(size_t capacity) : capacity_(capacity) {}
    ~HostBacking() override;
    Result reserve(uintptr_t base, size_t size) override;
    Result create(size_t size, const AllocationProperties& properties, Handle* handle) override;
    Result release(Handle handle) override;
    Result map(uintptr_t address, size_t size, size_t offset, Handle handle) override;
    Result set_access(uintptr_t address, size_t size, const AccessDescription& access) override;
    Result unmap(uintptr_t address, size_t size) override;

    void set_capacity(size_t capacity) { capacity_ = capacity; }
    size_t used() const { return used_; }

  private:
    size_t capacity_;
    size_t used_ = 0;
    std::map<Handle, size_t> chunks_;  // the handle is the memfd
    std::map<uintptr_t, size_t> reserved_;
};

}  // namespace torchmig
