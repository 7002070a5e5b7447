// Forked children of a CUDA process give up what the driver left open in them.
//
// A child inherits descriptors and mappings of /dev/nvidia* that it can do nothing with, and CRIU
// cannot dump a process that has them; the same holds for NCCL's sockets.
#pragma once

namespace torchmig {

// From now on, children unmap and close them. Once a process; a process that has not loaded the
// driver pays one look at a flag a fork.
void install_fork_cuda();

}  // namespace torchmig
