#include "fork_cuda.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "arena_abi.h"
#include "lazy_cuda.h"

namespace torchmig {

namespace {

constexpr char kDevices[] = "/dev/nvidia";

// Set in the parent, where asking the loader is allowed; a child may find its lock held.
bool cuda_in_parent = false;

const ArenaAbi* abi = nullptr;

void before_fork() {
    cuda_in_parent = cuda::driver_is_loaded();
}

struct Range {
    uintptr_t begin;
    uintptr_t end;
};

// Reads one line of /proc/self/maps: "begin-end perms offset dev inode path".
bool device_range(char* line, Range* range) {
    const char* path = std::strchr(line, '/');
    if (path == nullptr || std::strncmp(path, kDevices, sizeof kDevices - 1) != 0) {
        return false;
    }
    char* rest = nullptr;
    range->begin = std::strtoull(line, &rest, 16);
    range->end = std::strtoull(rest + 1, nullptr, 16);
    return true;
}

// No memory is allocated between fork and here: the heap of a child of a threaded process may be
// in any state. One pass unmaps what fits the buffer; passes are made until one finds nothing.
bool unmap_once() {
    static Range found[512];
    size_t count = 0;
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    static char buffer[16384];
    size_t held = 0;
    for (;;) {
        const ssize_t got = read(fd, buffer + held, sizeof buffer - 1 - held);
        if (got <= 0) {
            break;
        }
        held += static_cast<size_t>(got);
        buffer[held] = '\0';
        char* line = buffer;
        while (char* end = std::strchr(line, '\n')) {
            *end = '\0';
            if (count < sizeof found / sizeof *found && device_range(line, &found[count])) {
                count++;
            }
            line = end + 1;
        }
        held = static_cast<size_t>(buffer + held - line);
        std::memmove(buffer, line, held);
    }
    close(fd);
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        any |= munmap(reinterpret_cast<void*>(found[i].begin), found[i].end - found[i].begin) == 0;
    }
    return any;
}

struct DirectoryEntry {  // as getdents64 writes it
    uint64_t inode;
    int64_t next;
    unsigned short length;
    unsigned char type;
    char name[];
};

bool must_go(const char* target) {
    constexpr char kSocket[] = "socket:[";
    if (std::strncmp(target, kSocket, sizeof kSocket - 1) == 0) {
        return abi != nullptr &&
               abi->is_nccl_socket(std::strtoull(target + sizeof kSocket - 1, nullptr, 10)) != 0;
    }
    return std::strncmp(target, kDevices, sizeof kDevices - 1) == 0;
}

void close_descriptors() {
    const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) {
        return;
    }
    alignas(DirectoryEntry) static char buffer[16384];
    for (;;) {
        const long got = syscall(SYS_getdents64, folder, buffer, sizeof buffer);
        if (got <= 0) {
            break;
        }
        for (long at = 0; at < got;) {
            auto* entry = reinterpret_cast<DirectoryEntry*>(buffer + at);
            at += entry->length;
            char target[64] = "";
            if (readlinkat(folder, entry->name, target, sizeof target - 1) > 0 && must_go(target)) {
                close(std::atoi(entry->name));
            }
        }
    }
    close(folder);
}

void in_child() {
    if (!cuda_in_parent) {
        return;
    }
    while (unmap_once()) {
    }
    close_descriptors();
}

}  // namespace

void install_fork_cuda() {
    using Door = const ArenaAbi* (*)();
    const auto door = reinterpret_cast<Door>(dlsym(RTLD_DEFAULT, kArenaAbiSymbol));
    abi = door != nullptr ? door() : nullptr;
    if (abi != nullptr && abi->version != kArenaAbiVersion) {
        abi = nullptr;
    }
    static const int once = pthread_atfork(before_fork, nullptr, in_child);
    (void)once;
}

}  // namespace torchmig
