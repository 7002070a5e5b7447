// The arena's backing on a GPU: the driver's virtual memory functions, and nothing else.
#pragma once

#include "arena.h"

namespace torchmig {

// Device N's range begins at 32 TiB + N * 4 TiB: below everything that the kernel places by itself
// (programs from 85 TiB on), and wide enough for one expandable segment a stream, each of which
// reserves more than the whole device.
constexpr ArenaLayout kCudaLayout{uintptr_t{1} << 45, size_t{1} << 42, size_t{2} << 20, 12};

class CudaBacking : public Backing {
  public:
    explicit CudaBacking(const cuda::Driver& driver) : cuda_(driver) {}
    Result reserve(uintptr_t base, size_t size) override;
    Result create(size_t size, const AllocationProperties& properties, Handle* handle) override;
    Result release(Handle handle) override;
    Result map(uintptr_t address, size_t size, size_t offset, Handle handle) override;
    Result set_access(uintptr_t address, size_t size, const AccessDescription& access) override;
    Result unmap(uintptr_t address, size_t size) override;

  private:
    const cuda::Driver& cuda_;
};

}  // namespace torchmig
