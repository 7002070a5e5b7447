#include "arena.h"

#include <algorithm>
#include <utility>

namespace torchmig {

using cuda::kInvalidValue;
using cuda::kOutOfMemory;
using cuda::kSuccess;

namespace {

AccessDescription read_write(int device) {
    return {{cuda::kLocationDevice, device}, cuda::kAccessReadWrite};
}

AllocationProperties device_memory(int device) {
    AllocationProperties properties{};
    properties.type = cuda::kAllocationPinned;
    properties.location = {cuda::kLocationDevice, device};
    return properties;
}

}  // namespace

Arena::Arena(ArenaLayout layout, std::unique_ptr<Backing> backing)
    : layout_(layout), backing_(std::move(backing)) {}

std::unique_lock<std::mutex> Arena::lock_attached() {
    std::unique_lock<std::mutex> lock(mutex_);
    attached_.wait(lock, [this] { return !detached_; });
    return lock;
}

AddressPlanner* Arena::planner(int device) {
    const auto found = planners_.find(device);
    if (found != planners_.end()) {
        return found->second.get();
    }
    if (device < 0 || device >= layout_.max_devices || !why_unusable_.empty()) {
        return nullptr;
    }
    const uintptr_t base = layout_.base + layout_.size_per_device * static_cast<size_t>(device);
    const Result result = backing_->reserve(base, layout_.size_per_device);
    if (result != kSuccess) {
        why_unusable_ = "the address range of device " + std::to_string(device) +
                        " cannot be reserved: " + cuda::describe(result);
        return nullptr;
    }
    auto made =
        std::make_unique<AddressPlanner>(base, layout_.size_per_device, layout_.granularity);
    return planners_.emplace(device, std::move(made)).first->second.get();
}

Result Arena::reserve_locked(int device, size_t size, uintptr_t* address) {
    AddressPlanner* const addresses = planner(device);
    if (addresses == nullptr) {
        return cuda::kNotSupported;
    }
    const auto taken = addresses->take(size);
    if (!taken) {
        return kOutOfMemory;
    }
    *address = *taken;
    return kSuccess;
}

Result Arena::create_locked(size_t size, const AllocationProperties& properties, Handle* handle) {
    Chunk chunk{size, properties};
    const Result result = backing_->create(size, properties, &chunk.real);
    if (result != kSuccess) {
        return result;
    }
    *handle = kHandleMark | next_handle_++;
    chunks_.emplace(*handle, chunk);
    return kSuccess;
}

Result Arena::drop_if_unused(Handle handle) {
    const auto found = chunks_.find(handle);
    if (!found->second.released || found->second.mapped != 0) {
        return kSuccess;
    }
    const Handle real = found->second.real;
    chunks_.erase(found);
    return backing_->release(real);
}

Result Arena::release_locked(Handle handle) {
    const auto found = chunks_.find(handle);
    if (found == chunks_.end() || found->second.released) {
        return kInvalidValue;
    }
    // As with the driver, what is still mapped lives until it is unmapped.
    found->second.released = true;
    return drop_if_unused(handle);
}

Result Arena::map_locked(uintptr_t address, size_t size, size_t offset, Handle handle) {
    const auto chunk = chunks_.find(handle);
    if (chunk == chunks_.end()) {
        return kInvalidValue;
    }
    const Result result = backing_->map(address, size, offset, chunk->second.real);
    if (result != kSuccess) {
        return result;
    }
    chunk->second.mapped++;
    mapped_.emplace(address,
                    Mapped{size, offset, handle, chunk->second.properties.location.id, {}});
    return kSuccess;
}

Result Arena::unmap_locked(uintptr_t address, size_t size) {
    // Whole mappings only, as the driver wants it.
    const auto first = mapped_.find(address);
    auto last = first;
    size_t covered = 0;
    while (last != mapped_.end() && covered < size && last->first == address + covered) {
        covered += last->second.size;
        ++last;
    }
    if (first == mapped_.end() || covered != size) {
        return kInvalidValue;
    }
    for (auto it = first; it != last; it = mapped_.erase(it)) {
        const Result result = backing_->unmap(it->first, it->second.size);
        if (result != kSuccess) {
            return result;
        }
        chunks_.at(it->second.chunk).mapped--;
        const Result dropped = drop_if_unused(it->second.chunk);
        if (dropped != kSuccess) {
            mapped_.erase(it);
            return dropped;
        }
    }
    return kSuccess;
}

Result Arena::give_access(uintptr_t address, Mapped& mapped, const AccessDescription& access) {
    const Result result = backing_->set_access(address, mapped.size, access);
    if (result == kSuccess) {
        mapped.access[access.location.id] = access;
    }
    return result;
}

Result Arena::allocate(int device, size_t size, uintptr_t* address) {
    auto lock = lock_attached();
    uintptr_t at = 0;
    Result result = reserve_locked(device, size, &at);
    if (result != kSuccess) {
        return result;
    }
    AddressPlanner& addresses = *planners_.at(device);
    const size_t whole = addresses.round_up(size);
    Handle handle = 0;
    result = create_locked(whole, device_memory(device), &handle);
    if (result != kSuccess) {
        addresses.give(at);
        return result;
    }
    result = map_locked(at, whole, 0, handle);
    // Released at once: the mapping alone keeps it, and free() has one thing to undo.
    const Result released = release_locked(handle);
    if (result == kSuccess) {
        result = released;
        Mapped& mapped = mapped_.at(at);
        if (result == kSuccess) {
            result = give_access(at, mapped, read_write(device));
        }
        for (const int peer : peers_[device]) {
            if (result == kSuccess) {
                result = give_access(at, mapped, read_write(peer));
            }
        }
        if (result != kSuccess) {
            unmap_locked(at, whole);
        }
    }
    if (result != kSuccess) {
        addresses.give(at);
        return result;
    }
    allocations_.emplace(at, handle);
    *address = at;
    return kSuccess;
}

Result Arena::free(uintptr_t address) {
    auto lock = lock_attached();
    const auto found = allocations_.find(address);
    if (found == allocations_.end()) {
        return kInvalidValue;
    }
    const auto mapped = mapped_.find(address);
    const Result result = unmap_locked(address, mapped->second.size);
    if (result != kSuccess) {
        return result;
    }
    allocations_.erase(found);
    for (auto& entry : planners_) {
        if (entry.second->contains(address)) {
            entry.second->give(address);
        }
    }
    return kSuccess;
}

Result Arena::reserve(int device, size_t size, uintptr_t* address) {
    auto lock = lock_attached();
    return reserve_locked(device, size, address);
}

Result Arena::unreserve(uintptr_t address) {
    auto lock = lock_attached();
    if (allocations_.count(address) != 0) {
        return kInvalidValue;
    }
    for (auto& entry : planners_) {
        if (entry.second->contains(address)) {
            return entry.second->give(address) ? kSuccess : kInvalidValue;
        }
    }
    return kInvalidValue;
}

Result Arena::create(size_t size, const AllocationProperties& properties, Handle* handle) {
    auto lock = lock_attached();
    return create_locked(size, properties, handle);
}

Result Arena::release(Handle handle) {
    auto lock = lock_attached();
    return release_locked(handle);
}

Result Arena::map(uintptr_t address, size_t size, size_t offset, Handle handle) {
    auto lock = lock_attached();
    return map_locked(address, size, offset, handle);
}

Result Arena::unmap(uintptr_t address, size_t size) {
    auto lock = lock_attached();
    return unmap_locked(address, size);
}

Result Arena::set_access(uintptr_t address,
                         size_t size,
                         const AccessDescription* access,
                         size_t count) {
    auto lock = lock_attached();
    auto it = mapped_.lower_bound(address);
    if (it == mapped_.end() || it->first != address) {
        return kInvalidValue;
    }
    for (; it != mapped_.end() && it->first < address + size; ++it) {
        for (size_t i = 0; i < count; i++) {
            const Result result = give_access(it->first, it->second, access[i]);
            if (result != kSuccess) {
                return result;
            }
        }
    }
    return kSuccess;
}

Result Arena::add_peer(int owner, int peer) {
    auto lock = lock_attached();
    auto& peers = peers_[owner];
    if (std::find(peers.begin(), peers.end(), peer) != peers.end()) {
        return kSuccess;
    }
    for (const auto& allocation : allocations_) {
        Mapped& mapped = mapped_.at(allocation.first);
        if (mapped.device != owner) {
            continue;
        }
        const Result result = give_access(allocation.first, mapped, read_write(peer));
        if (result != kSuccess) {
            return result;
        }
    }
    peers.push_back(peer);
    return kSuccess;
}

// Makes the mapping real again; its chunk has memory.
Result Arena::put_back(uintptr_t address, const Mapped& mapped) {
    const Handle real = chunks_.at(mapped.chunk).real;
    Result result = backing_->map(address, mapped.size, mapped.offset, real);
    if (result != kSuccess) {
        return result;
    }
    for (const auto& access : mapped.access) {
        result = backing_->set_access(address, mapped.size, access.second);
        if (result != kSuccess) {
            backing_->unmap(address, mapped.size);
            return result;
        }
    }
    return kSuccess;
}

Result Arena::detach_locked() {
    Result result = kSuccess;
    std::vector<uintptr_t> gone;
    for (const auto& entry : mapped_) {
        result = backing_->unmap(entry.first, entry.second.size);
        if (result != kSuccess) {
            break;
        }
        gone.push_back(entry.first);
    }
    if (result != kSuccess) {
        // The rest has to go as well, so that attach_locked() finds nothing in its way.
        for (const auto& entry : mapped_) {
            if (std::find(gone.begin(), gone.end(), entry.first) == gone.end()) {
                backing_->unmap(entry.first, entry.second.size);
            }
        }
    }
    for (auto& entry : chunks_) {
        const Result released = backing_->release(entry.second.real);
        result = result == kSuccess ? released : result;
        entry.second.real = 0;
    }
    return result;
}

Result Arena::attach_locked() {
    Result result = kSuccess;
    auto chunk = chunks_.begin();
    for (; chunk != chunks_.end() && result == kSuccess; ++chunk) {
        Chunk& wanted = chunk->second;
        result = backing_->create(wanted.size, wanted.properties, &wanted.real);
    }
    std::vector<uintptr_t> done;
    for (auto it = mapped_.begin(); it != mapped_.end() && result == kSuccess; ++it) {
        result = put_back(it->first, it->second);
        if (result == kSuccess) {
            done.push_back(it->first);
        }
    }
    if (result == kSuccess) {
        return result;
    }
    for (const uintptr_t address : done) {
        backing_->unmap(address, mapped_.at(address).size);
    }
    for (auto& entry : chunks_) {
        if (entry.second.real != 0) {
            backing_->release(entry.second.real);
            entry.second.real = 0;
        }
    }
    return result;
}

Result Arena::detach() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (detached_) {
        return kSuccess;
    }
    const Result result = detach_locked();
    detached_ = true;
    if (result != kSuccess) {
        detached_ = attach_locked() != kSuccess;
    }
    return result;
}

Result Arena::attach() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!detached_) {
        return kSuccess;
    }
    const Result result = attach_locked();
    if (result == kSuccess) {
        detached_ = false;
        attached_.notify_all();
    }
    return result;
}

bool Arena::detached() const {
    std::unique_lock<std::mutex> lock(mutex_);
    return detached_;
}

bool Arena::contains(uintptr_t address) const {
    return address - layout_.base <
           layout_.size_per_device * static_cast<size_t>(layout_.max_devices);
}

std::vector<Mapping> Arena::mappings() const {
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<Mapping> all;
    all.reserve(mapped_.size());
    for (const auto& entry : mapped_) {
        all.push_back({entry.second.device, entry.first, entry.second.size});
    }
    return all;
}

size_t Arena::physical_bytes() const {
    std::unique_lock<std::mutex> lock(mutex_);
    size_t total = 0;
    for (const auto& entry : chunks_) {
        total += entry.second.real != 0 ? entry.second.size : 0;
    }
    return total;
}

bool Arena::usable() const {
    std::unique_lock<std::mutex> lock(mutex_);
    return why_unusable_.empty();
}

std::string Arena::why_unusable() const {
    std::unique_lock<std::mutex> lock(mutex_);
    return why_unusable_;
}

void Arena::refuse(const std::string& why) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (why_unusable_.empty()) {
        why_unusable_ = why;
    }
}

}  // namespace torchmig
