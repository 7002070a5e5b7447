// Which addresses the arena hands out.
//
// One planner a device: a range of virtual addresses that is reserved once, of which parts are
// taken and given back. Addresses are reused, so that a long job does not run out of range. Plain
// arithmetic: nothing here touches memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace torchmig {

class AddressPlanner {
  public:
    // All three in bytes; base and size are multiples of the granularity, a power of two.
    AddressPlanner(uintptr_t base, size_t size_bytes, size_t granularity_bytes);

    // The smallest free part that fits, the lowest among equals; nothing when none fits.
    std::optional<uintptr_t> take(size_t size_bytes);
    // Gives back what take() returned; nothing when `address` is not the start of a taken part.
    std::optional<size_t> give(uintptr_t address);

    bool contains(uintptr_t address) const { return address - base_ < size_; }
    uintptr_t base() const { return base_; }
    size_t size_bytes() const { return size_; }
    size_t taken_bytes() const { return taken_bytes_; }
    size_t round_up(size_t size_bytes) const {
        return (size_bytes + granularity_ - 1) & ~(granularity_ - 1);
    }

  private:
    void add_free(uintptr_t address, size_t size);
    void remove_free(std::map<uintptr_t, size_t>::iterator part);

    const uintptr_t base_;
    const size_t size_;
    const size_t granularity_;
    size_t taken_bytes_ = 0;
    std::map<uintptr_t, size_t> free_;                     // start -> size, never adjacent
    std::set<std::pair<size_t, uintptr_t>> free_by_size_;  // the same parts
    std::map<uintptr_t, size_t> taken_;                    // start -> size
};

}  // namespace torchmig
