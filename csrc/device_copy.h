// Copies GPU memory into and out of staging: a memfd that the agent made and touched in advance.
//
// The copy goes through small pinned buffers, several threads each with a stream and two buffers:
// while one buffer is filled, the other is emptied. Pinning the staging itself would be a third
// slower from first to last, since it has to be pinned and unpinned at every checkpoint.
#pragma once

#include <torch/extension.h>

#include <cstdint>
#include <vector>

namespace torchmig {

struct Piece {
    uint64_t address;  // on the device
    uint64_t size;
    uint64_t offset;  // in the staging; pieces are in the order of their offsets
};

struct CopyOptions {
    int threads = 0;          // 0: as many as there are processors, at most kMaxThreads
    size_t buffer_bytes = 0;  // 0: kBufferBytes
    static constexpr int kMaxThreads = 12;
    static constexpr size_t kBufferBytes = size_t{4} << 20;
};

enum class Direction { kOut, kIn };

// Copies all pieces of one device; returns when the bytes have arrived. Throws CudaError, or
// std::system_error where the staging cannot be mapped. May be called with no context current.
void copy_pieces(Direction direction,
                 int device,
                 int staging_fd,
                 const std::vector<Piece>& pieces,
                 const CopyOptions& options);

void register_device_copy(pybind11::module_& m);

}  // namespace torchmig
