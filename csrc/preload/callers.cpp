#include "callers.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace torchmig::preload {

namespace {

struct Range {
    const char* library;
    uintptr_t begin = 0;
    uintptr_t end = 0;
};

const char* base_name(const char* path) {
    const char* slash = std::strrchr(path, '/');
    return slash != nullptr ? slash + 1 : path;
}

int find_range(dl_phdr_info* info, size_t, void* data) {
    Range& range = *static_cast<Range*>(data);
    if (std::strncmp(base_name(info->dlpi_name), range.library, std::strlen(range.library)) != 0) {
        return 0;
    }
    range.begin = UINTPTR_MAX;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& part = info->dlpi_phdr[i];
        if (part.p_type == PT_LOAD) {
            const uintptr_t start = info->dlpi_addr + part.p_vaddr;
            range.begin = start < range.begin ? start : range.begin;
            range.end = start + part.p_memsz > range.end ? start + part.p_memsz : range.end;
        }
    }
    return 1;
}

struct Path {
    const char* library;
    char text[4096] = "";
};

int find_path(dl_phdr_info* info, size_t, void* data) {
    Path& path = *static_cast<Path*>(data);
    if (std::strncmp(base_name(info->dlpi_name), path.library, std::strlen(path.library)) != 0) {
        return 0;
    }
    std::strncpy(path.text, info->dlpi_name, sizeof(Path::text) - 1);
    return 1;
}

}  // namespace

bool is_allocator(const void* return_address) {
    static std::atomic<uintptr_t> begin{0};
    static std::atomic<uintptr_t> end{0};
    const auto address = reinterpret_cast<uintptr_t>(return_address);
    if (end.load() == 0) {
        Range range{"libc10_cuda.so"};
        dl_iterate_phdr(find_range, &range);
        begin = range.begin;
        end = range.end;
    }
    return address >= begin.load() && address < end.load();
}

bool is_nccl(const void* return_address) {
    // Several copies may be loaded, at any time, and calls are few: asked anew each time.
    Dl_info info{};
    return dladdr(return_address, &info) != 0 && info.dli_fname != nullptr &&
           std::strncmp(base_name(info.dli_fname), "libnccl", 7) == 0;
}

void* function_behind(const char* library, const char* name) {
    if (void* next = dlsym(RTLD_NEXT, name)) {
        return next;
    }
    Path path{library};
    dl_iterate_phdr(find_path, &path);
    void* const found = path.text[0] != '\0' ? dlopen(path.text, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    return found != nullptr ? dlsym(found, name) : nullptr;
}

}  // namespace torchmig::preload
