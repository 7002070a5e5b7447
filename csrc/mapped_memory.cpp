#include "mapped_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace torchmig {

MappedMemory::MappedMemory(size_t size, int fd, off_t offset) : whole_(size + kHugePageBytes) {
    start_ = mmap(nullptr, whole_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start_ == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "cannot reserve addresses");
    }
    const auto raw = reinterpret_cast<uintptr_t>(start_);
    const uintptr_t aligned = (raw + kHugePageBytes - 1) & ~(kHugePageBytes - 1);
    const int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* const got = mmap(reinterpret_cast<void*>(aligned),
                           size,
                           PROT_READ | PROT_WRITE,
                           kind | MAP_FIXED,
                           fd,
                           offset);
    if (got == MAP_FAILED) {
        const int error = errno;
        munmap(start_, whole_);
        throw std::system_error(error, std::generic_category(), "cannot map memory");
    }
    data_ = static_cast<char*>(got);
    // Wishes only: an old kernel that knows neither does the job as well.
    madvise(data_, size, MADV_DONTFORK);
    if (fd < 0) {
        madvise(data_, size, MADV_HUGEPAGE);
    }
}

MappedMemory::~MappedMemory() {
    munmap(start_, whole_);
}

size_t touch_file(int fd, off_t offset, size_t size) {
    const MappedMemory memory(size, fd, offset);
    size_t huge = 0;
    for (size_t at = 0; at < size; at += kHugePageBytes) {
        char* const page = memory.data() + at;
        const size_t length = std::min(kHugePageBytes, size - at);
        if (madvise(page, length, MADV_POPULATE_WRITE) != 0) {
            if (errno != EINVAL) {
                throw std::system_error(errno, std::generic_category(), "cannot touch staging");
            }
            // Before Linux 5.14: by hand. Reading would only map the kernel's zero page.
            for (size_t i = 0; i < length; i += 4096) {
                auto* byte = reinterpret_cast<volatile char*>(page + i);
                *byte = *byte;
            }
        }
        // Asked for by address, this does not depend on the system's setting for shared memory.
        if (length == kHugePageBytes && madvise(page, length, MADV_COLLAPSE) == 0) {
            huge += length;
        }
    }
    return huge;
}

}  // namespace torchmig
