#include "driver_entries.h"

#include <cstring>

#include "../lazy_cuda.h"
#include "live_arena.h"

namespace torchmig::preload {

namespace {

using cuda::AccessDescription;
using cuda::AllocationProperties;
using cuda::Device;
using cuda::DevicePtr;
using cuda::Driver;
using cuda::Handle;
using cuda::kSuccess;
using cuda::Result;

using MulticastCreate = Result (*)(Handle*, const void*);
MulticastCreate real_multicast_create = nullptr;

Result address_reserve(
    DevicePtr* out, size_t size, size_t align, DevicePtr at, unsigned long long flags) {
    const Driver& cuda = *cuda::driver();
    Device device = 0;
    uintptr_t address = 0;
    const bool plain = at == 0 && flags == 0 && align <= (size_t{2} << 20);
    if (plain && cuda.cuCtxGetDevice(&device) == kSuccess &&
        live_arena()->reserve(device, size, &address) == kSuccess) {
        *out = address;
        return kSuccess;
    }
    return cuda.cuMemAddressReserve(out, size, align, at, flags);
}

Result address_free(DevicePtr address, size_t size) {
    if (live_arena()->contains(address)) {
        return live_arena()->unreserve(address);
    }
    return cuda::driver()->cuMemAddressFree(address, size);
}

Result create(Handle* handle,
              size_t size,
              const AllocationProperties* properties,
              unsigned long long flags) {
    const bool shareable = properties->requested_handle_types != 0;
    if (shareable) {
        note(Seen::kShareableMemory);
    }
    if (!shareable && flags == 0 && properties->type == cuda::kAllocationPinned &&
        properties->location.type == cuda::kLocationDevice && live_arena()->usable()) {
        return live_arena()->create(size, *properties, handle);
    }
    return cuda::driver()->cuMemCreate(handle, size, properties, flags);
}

Result release(Handle handle) {
    return live_arena()->is_ours(handle) ? live_arena()->release(handle)
                                         : cuda::driver()->cuMemRelease(handle);
}

Result map(DevicePtr address, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    return live_arena()->is_ours(handle)
               ? live_arena()->map(address, size, offset, handle)
               : cuda::driver()->cuMemMap(address, size, offset, handle, flags);
}

// The driver's own answer stands for ranges of which the arena knows no mapping: memory that it
// did not create may be mapped at addresses that it reserved.
Result unmap(DevicePtr address, size_t size) {
    if (live_arena()->contains(address) && live_arena()->unmap(address, size) == kSuccess) {
        return kSuccess;
    }
    return cuda::driver()->cuMemUnmap(address, size);
}

Result set_access(DevicePtr address, size_t size, const AccessDescription* access, size_t count) {
    if (live_arena()->contains(address) &&
        live_arena()->set_access(address, size, access, count) == kSuccess) {
        return kSuccess;
    }
    return cuda::driver()->cuMemSetAccess(address, size, access, count);
}

Result multicast_create(Handle* handle, const void* properties) {
    note(Seen::kMulticast);
    return real_multicast_create(handle, properties);
}

struct Entry {
    const char* name;
    void* ours;
};

const Entry kEntries[] = {
    {"cuMemAddressReserve", reinterpret_cast<void*>(address_reserve)},
    {"cuMemAddressFree", reinterpret_cast<void*>(address_free)},
    {"cuMemCreate", reinterpret_cast<void*>(create)},
    {"cuMemRelease", reinterpret_cast<void*>(release)},
    {"cuMemMap", reinterpret_cast<void*>(map)},
    {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
    {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
};

}  // namespace

void* driver_entry(const char* name, void* real) {
    if (real == nullptr || live_arena() == nullptr) {
        return real;
    }
    if (std::strcmp(name, "cuMulticastCreate") == 0) {
        real_multicast_create = reinterpret_cast<MulticastCreate>(real);
        return reinterpret_cast<void*>(multicast_create);
    }
    for (const Entry& entry : kEntries) {
        if (std::strcmp(entry.name, name) == 0) {
            return entry.ours;
        }
    }
    return real;
}

}  // namespace torchmig::preload
