#include "streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchmig {

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;
constexpr size_t kAhead = 16 * kLine;  // far enough for memory to answer in time

__attribute__((target("avx2"))) void stream_lines(char* to, const char* from, size_t size) {
    for (size_t i = 0; i < size; i += kLine) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), high);
    }
    _mm_sfence();
}

__attribute__((target("avx2"))) void cache_lines(char* to, const char* from, size_t size) {
    for (size_t i = 0; i < size; i += kLine) {
        _mm_prefetch(from + i + kAhead, _MM_HINT_NTA);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 32), high);
    }
}

bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}

}  // namespace

void streaming_copy(char* to, const char* from, size_t size) {
    if (!has_avx2() || reinterpret_cast<uintptr_t>(to) % kLine != 0) {
        std::memcpy(to, from, size);
        return;
    }
    const size_t lines = size & ~(kLine - 1);
    stream_lines(to, from, lines);
    std::memcpy(to + lines, from + lines, size - lines);
}

void cached_copy(char* to, const char* from, size_t size) {
    if (!has_avx2()) {
        std::memcpy(to, from, size);
        return;
    }
    const size_t lines = size & ~(kLine - 1);
    cache_lines(to, from, lines);
    std::memcpy(to + lines, from + lines, size - lines);
}

#else

void streaming_copy(char* to, const char* from, size_t size) {
    std::memcpy(to, from, size);
}

void cached_copy(char* to, const char* from, size_t size) {
    std::memcpy(to, from, size);
}

#endif

}  // namespace torchmig
