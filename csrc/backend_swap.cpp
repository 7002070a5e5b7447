#include "backend_swap.h"

namespace torchmig {

namespace {

// The maps from device and backend type to backend are protected members; a derived class may name
// them and hand out pointers to member.
struct Access : c10d::ProcessGroup {
    static auto by_device() { return &Access::deviceTypeToBackend_; }
    static auto by_type() { return &Access::backendTypeToBackend_; }
};

}  // namespace

void swap_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const c10::intrusive_ptr<c10d::Backend>& old,
                  const c10::intrusive_ptr<c10d::Backend>& replacement) {
    int swapped = 0;
    for (auto& entry : (*group).*(Access::by_device())) {
        if (entry.second == old) {
            entry.second = replacement;
            ++swapped;
        }
    }
    for (auto& entry : (*group).*(Access::by_type())) {
        if (entry.second == old) {
            entry.second = replacement;
            ++swapped;
        }
    }
    TORCH_CHECK(swapped > 0, "cannot swap a backend that the process group does not use");
}

}  // namespace torchmig
