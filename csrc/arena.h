// The arena: device memory at addresses that stay, whatever becomes of the bytes behind them.
//
// The CUDA caching allocator's segments are mapped into ranges that are reserved once per device,
// at the same place in every process. detach() gives all physical memory back and keeps the
// addresses; attach() puts fresh memory behind them. What is behind a range is the business of a
// Backing, so that the same code runs over CUDA and, in tests, over host memory.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena_planner.h"
#include "lazy_cuda.h"

namespace torchmig {

using cuda::AccessDescription;
using cuda::AllocationProperties;
using cuda::Handle;
using cuda::Result;

// What the arena needs of memory. Results are the driver's codes. Called under the arena's lock.
class Backing {
  public:
    virtual ~Backing() = default;
    // Reserves exactly this range, once a device. Nothing is behind it yet.
    virtual Result reserve(uintptr_t base, size_t size) = 0;
    virtual Result create(size_t size, const AllocationProperties& properties, Handle* handle) = 0;
    virtual Result release(Handle handle) = 0;
    virtual Result map(uintptr_t address, size_t size, size_t offset, Handle handle) = 0;
    virtual Result set_access(uintptr_t address, size_t size, const AccessDescription& access) = 0;
    virtual Result unmap(uintptr_t address, size_t size) = 0;
};

// Where the ranges lie: device N's begins at base + N * size.
struct ArenaLayout {
    uintptr_t base;
    size_t size_per_device;
    size_t granularity;
    int max_devices;
};

// A stretch of mapped memory, as others see it.
struct Mapping {
    int device;
    uintptr_t address;
    size_t size;
};

class Arena {
  public:
    // The high bits of the handles given out, so that they are never taken for the driver's own.
    static constexpr Handle kHandleMark = 0x746d000000000000ull;

    Arena(ArenaLayout layout, std::unique_ptr<Backing> backing);

    // Memory of at least `size`, readable and writable by its device and its peers. Out of memory,
    // or a range that is full, is an answer (kOutOfMemory) and changes nothing.
    Result allocate(int device, size_t size, uintptr_t* address);
    // Gives back what allocate() returned. kInvalidValue for any other address.
    Result free(uintptr_t address);

    // The steps of allocate() one by one, with the meaning of the driver's functions: this is how
    // expandable segments come in. Handles are the arena's own and outlive detach().
    Result reserve(int device, size_t size, uintptr_t* address);
    Result unreserve(uintptr_t address);
    Result create(size_t size, const AllocationProperties& properties, Handle* handle);
    Result release(Handle handle);
    Result map(uintptr_t address, size_t size, size_t offset, Handle handle);
    Result unmap(uintptr_t address, size_t size);
    Result set_access(uintptr_t address,
                      size_t size,
                      const AccessDescription* access,
                      size_t count);

    // From now on memory of `owner` that allocate() returns, or has returned, is `peer`'s to use.
    Result add_peer(int owner, int peer);

    // Gives back all physical memory and keeps every address. While detached, calls that change
    // the arena wait. Twice is once. After a failure memory is behind every
    // address again, but not what it held: copy the bytes out before, back after.
    Result detach();
    // Puts memory behind every address again. After a failure the arena is still detached.
    Result attach();
    bool detached() const;

    bool contains(uintptr_t address) const;
    bool is_ours(Handle handle) const { return (handle & kHandleMask) == kHandleMark; }
    std::vector<Mapping> mappings() const;
    size_t physical_bytes() const;

    // The arena of this process's own devices may turn out impossible (a range is in use):
    // false from then on, with the reason.
    bool usable() const;
    std::string why_unusable() const;
    void refuse(const std::string& why);

  private:
    static constexpr Handle kHandleMask = 0xffff000000000000ull;

    struct Chunk {
        size_t size;
        AllocationProperties properties;
        Handle real = 0;
        size_t mapped = 0;  // mappings that use it
        bool released = false;
    };
    struct Mapped {
        size_t size;
        size_t offset;
        Handle chunk;
        int device;
        std::map<int, AccessDescription> access;  // by location id
    };

    std::unique_lock<std::mutex> lock_attached();
    AddressPlanner* planner(int device);
    Result reserve_locked(int device, size_t size, uintptr_t* address);
    Result create_locked(size_t size, const AllocationProperties& properties, Handle* handle);
    Result map_locked(uintptr_t address, size_t size, size_t offset, Handle handle);
    Result unmap_locked(uintptr_t address, size_t size);
    Result release_locked(Handle handle);
    Result give_access(uintptr_t address, Mapped& mapped, const AccessDescription& access);
    Result drop_if_unused(Handle handle);
    Result put_back(uintptr_t address, const Mapped& mapped);
    Result attach_locked();
    Result detach_locked();

    const ArenaLayout layout_;
    const std::unique_ptr<Backing> backing_;
    mutable std::mutex mutex_;
    std::condition_variable attached_;
    bool detached_ = false;
    std::string why_unusable_;
    Handle next_handle_ = 1;
    std::map<int, std::unique_ptr<AddressPlanner>> planners_;
    std::map<int, std::vector<int>> peers_;
    std::map<Handle, Chunk> chunks_;
    std::map<uintptr_t, Mapped> mapped_;
    std::map<uintptr_t, Handle> allocations_;
};

}  // namespace torchmig
