#include "arena_cuda.h"

namespace torchmig {

using cuda::kSuccess;

Result CudaBacking::reserve(uintptr_t base, size_t size) {
    cuda::DevicePtr got = 0;
    const Result result = cuda_.cuMemAddressReserve(&got, size, 0, base, 0);
    if (result != kSuccess) {
        return result;
    }
    if (got != base) {
        // The driver takes the wish as a hint: something else lies there.
        cuda_.cuMemAddressFree(got, size);
        return cuda::kNotSupported;
    }
    return kSuccess;
}

Result CudaBacking::create(size_t size, const AllocationProperties& properties, Handle* handle) {
    AllocationProperties wanted = properties;
    int rdma = 0;
    // As cudaMalloc's memory is, so that network cards can go on reading it directly.
    if (cuda_.cuDeviceGetAttribute(&rdma, cuda::kAttributeRdmaWithVmm, properties.location.id) ==
            kSuccess &&
        rdma != 0) {
        wanted.gpu_direct_rdma_capable = 1;
    }
    return cuda_.cuMemCreate(handle, size, &wanted, 0);
}

Result CudaBacking::release(Handle handle) {
    return cuda_.cuMemRelease(handle);
}

Result CudaBacking::map(uintptr_t address, size_t size, size_t offset, Handle handle) {
    return cuda_.cuMemMap(address, size, offset, handle, 0);
}

Result CudaBacking::set_access(uintptr_t address, size_t size, const AccessDescription& access) {
    return cuda_.cuMemSetAccess(address, size, &access, 1);
}

Result CudaBacking::unmap(uintptr_t address, size_t size) {
    return cuda_.cuMemUnmap(address, size);
}

}  // namespace torchmig
