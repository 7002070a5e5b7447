// Replaces a communication backend inside a live ProcessGroup.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace torchmig {

// Puts `replacement` wherever `group` uses `old`. Throws if it uses it nowhere. The group keeps
// its identity: everything that holds the ProcessGroup (DDP, meshes, compiled graphs) goes on.
void swap_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const c10::intrusive_ptr<c10d::Backend>& old,
                  const c10::intrusive_ptr<c10d::Backend>& replacement);

// Stands in while a rank is parked and its communication is taken down; every operation throws.
class ParkedBackend : public c10d::Backend {
  public:
    ParkedBackend(int rank, int size, std::string name)
        : c10d::Backend(rank, size), name_(std::move(name)) {}
    const std::string getBackendName() const override { return name_; }

  private:
    const std::string name_;
};

}  // namespace torchmig
