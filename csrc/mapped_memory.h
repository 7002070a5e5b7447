// Memory mapped for as long as an object lives, at addresses that huge pages fit.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace torchmig {

constexpr size_t kHugePageBytes = size_t{2} << 20;

class MappedMemory {
  public:
    // A stretch of a file, shared; or, with fd -1, fresh memory. `offset` is a multiple of a huge
    // page. Not inherited by children. Throws std::system_error.
    MappedMemory(size_t size, int fd, off_t offset);
    ~MappedMemory();
    MappedMemory(const MappedMemory&) = delete;
    MappedMemory& operator=(const MappedMemory&) = delete;

    char* data() const { return data_; }

  private:
    const size_t whole_;
    void* start_;
    char* data_;
};

// Makes the kernel find memory for a stretch of a memfd, in huge pages where it can: copying into
// fresh memory is twenty times slower than into memory that is there, and small pages halve the
// rest. Returns how many bytes are in huge pages. Contents stay. Throws std::system_error, with
// ENOMEM where memory is short.
size_t touch_file(int fd, off_t offset, size_t size);

}  // namespace torchmig
