// The gate's kernels on torch's dispatcher.
#pragma once

#include <string>
#include <vector>

namespace torchmig {

// Registers a kernel before every c10d operation that has a process group. Once per process;
// further calls do nothing.
void install_gate();

// Names of the operations that went to a typed kernel, and of those that went to the boxed one.
std::vector<std::string> typed_operations();
std::vector<std::string> boxed_operations();

}  // namespace torchmig
