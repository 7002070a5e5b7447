// The arena as Python sees it: the process's own, and one over host memory for tests.
#pragma once

#include <torch/extension.h>

namespace torchmig {

void register_arena(pybind11::module_& m);

}  // namespace torchmig
