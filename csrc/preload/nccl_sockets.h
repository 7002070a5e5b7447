// Which sockets of this process are NCCL's.
#pragma once

#include <cstdint>

namespace torchmig::preload {

// A forked child that keeps one of them cannot be dumped. By inode number, since descriptors are
// used again. May be called between fork and exec.
bool is_nccl_socket(uint64_t inode);

}  // namespace torchmig::preload
