#include "arena_planner.h"

#include <iterator>
#include <limits>

namespace torchmig {

AddressPlanner::AddressPlanner(uintptr_t base, size_t size_bytes, size_t granularity_bytes)
    : base_(base), size_(size_bytes), granularity_(granularity_bytes) {
    add_free(base, size_bytes);
}

void AddressPlanner::add_free(uintptr_t address, size_t size) {
    free_.emplace(address, size);
    free_by_size_.emplace(size, address);
}

void AddressPlanner::remove_free(std::map<uintptr_t, size_t>::iterator part) {
    free_by_size_.erase({part->second, part->first});
    free_.erase(part);
}

std::optional<uintptr_t> AddressPlanner::take(size_t size_bytes) {
    if (size_bytes == 0 || size_bytes > size_) {
        return std::nullopt;
    }
    const size_t size = round_up(size_bytes);
    const auto fit = free_by_size_.lower_bound({size, 0});
    if (fit == free_by_size_.end()) {
        return std::nullopt;
    }
    const auto [free_size, address] = *fit;
    remove_free(free_.find(address));
    if (free_size > size) {
        add_free(address + size, free_size - size);
    }
    taken_.emplace(address, size);
    taken_bytes_ += size;
    return address;
}

std::optional<size_t> AddressPlanner::give(uintptr_t address) {
    const auto taken = taken_.find(address);
    if (taken == taken_.end()) {
        return std::nullopt;
    }
    const size_t size = taken->second;
    taken_.erase(taken);
    taken_bytes_ -= size;
    uintptr_t start = address;
    size_t length = size;
    const auto after = free_.lower_bound(address);
    if (after != free_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == address) {
            start = before->first;
            length += before->second;
            remove_free(before);
        }
    }
    if (after != free_.end() && after->first == address + size) {
        length += after->second;
        remove_free(after);
    }
    add_free(start, length);
    return size;
}

}  // namespace torchmig
