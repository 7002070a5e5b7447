// Host memory copies for staging: the C library's memcpy neither streams nor prefetches at the
// sizes used here, and half of the copy rate hangs on that.
#pragma once

#include <cstddef>

namespace torchmig {

// `to` is written past the caches: it is not read again soon. For copies into staging.
void streaming_copy(char* to, const char* from, size_t size);

// `to` stays in the caches, `from` passes through: for copies into a pinned buffer that the
// device reads at once.
void cached_copy(char* to, const char* from, size_t size);

}  // namespace torchmig
