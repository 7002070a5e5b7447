#include "torch_sockets.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

namespace torchmig {

namespace {

struct Remembered {
    std::mutex mutex;
    std::set<uint64_t> sockets;
    std::set<int> epolls;
    std::set<int> threads;
    std::map<uint64_t, uint64_t> moved;  // socket -> bytes sent and received when last looked at
    std::vector<int> kept;               // connections of muted sockets
};

Remembered& remembered() {
    static auto* made = new Remembered();
    return *made;
}

template <typename Visit>
void each_entry(const char* folder, Visit visit) {
    DIR* directory = opendir(folder);
    if (directory == nullptr) {
        return;
    }
    const int own = dirfd(directory);
    while (const dirent* entry = readdir(directory)) {
        char* end = nullptr;
        const long number = std::strtol(entry->d_name, &end, 10);
        if (end != entry->d_name && *end == '\0' && number != own) {
            visit(static_cast<int>(number));
        }
    }
    closedir(directory);
}

std::string target_of(int fd) {
    char path[64];
    char target[128];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(path, target, sizeof target - 1);
    return n > 0 ? std::string(target, static_cast<size_t>(n)) : std::string();
}

// The inode of a TCP socket (0 for anything else): unix sockets are dumped as they are.
uint64_t inet_inode(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) {
        return 0;
    }
    int domain = 0;
    socklen_t size = sizeof domain;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 ||
        (domain != AF_INET && domain != AF_INET6)) {
        return 0;
    }
    return status.st_ino;
}

std::vector<int> watched_by(int epoll) {
    std::vector<int> fds;
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/fdinfo/%d", epoll);
    FILE* file = std::fopen(path, "re");
    if (file == nullptr) {
        return fds;
    }
    char line[256];
    int fd = -1;
    while (std::fgets(line, sizeof line, file) != nullptr) {
        if (std::sscanf(line, "tfd: %d", &fd) == 1) {
            fds.push_back(fd);
        }
    }
    std::fclose(file);
    return fds;
}

// The letter in /proc for a thread's state; 0 if it is gone.
char state_of(int thread) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
    FILE* file = std::fopen(path, "re");
    if (file == nullptr) {
        return 0;
    }
    char line[256];
    char state = '?';
    while (std::fgets(line, sizeof line, file) != nullptr &&
           std::sscanf(line, "State: %c", &state) != 1) {
    }
    std::fclose(file);
    return state;
}

std::string name_of(int thread) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/task/%d/comm", thread);
    char name[32] = "";
    if (FILE* file = std::fopen(path, "re")) {
        if (std::fgets(name, sizeof name, file) != nullptr) {
            name[std::strcspn(name, "\n")] = '\0';
        }
        std::fclose(file);
    }
    return name;
}

bool is_listening(int fd) {
    int listening = 0;
    socklen_t size = sizeof listening;
    return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) == 0 && listening != 0;
}

bool queues_are_empty(int fd) {
    int out = 0;
    int in = 0;
    return ioctl(fd, SIOCOUTQ, &out) == 0 && ioctl(fd, SIOCINQ, &in) == 0 && out == 0 && in == 0;
}

// Puts an eventfd in the place of a socket: it can be watched and dumped, and never becomes ready.
void silence(int fd) {
    const int silent = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (silent < 0 || dup3(silent, fd, O_CLOEXEC) < 0) {
        throw std::runtime_error("cannot replace a socket of torch's: " +
                                 std::string(std::strerror(errno)));
    }
    close(silent);
}

// Bytes that have gone through a TCP connection in its life.
uint64_t bytes_moved(int fd) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
        return 0;
    }
    return info.tcpi_bytes_acked + info.tcpi_bytes_received;
}

}  // namespace

ProcessView ProcessView::now() {
    ProcessView view;
    each_entry("/proc/self/fd", [&](int fd) {
        if (const uint64_t inode = inet_inode(fd)) {
            view.sockets.push_back(inode);
        } else if (target_of(fd) == "anon_inode:[eventpoll]") {
            view.epolls.push_back(fd);
        }
    });
    each_entry("/proc/self/task", [&](int thread) { view.threads.push_back(thread); });
    return view;
}

void remember_torch(const ProcessView& before,
                    const ProcessView& after,
                    const std::vector<uint64_t>& others) {
    const auto added = [](const auto& old, const auto& now, auto insert) {
        for (const auto& item : now) {
            if (std::find(old.begin(), old.end(), item) == old.end()) {
                insert(item);
            }
        }
    };
    auto& all = remembered();
    const std::lock_guard<std::mutex> lock(all.mutex);
    added(before.sockets, after.sockets, [&](uint64_t inode) {
        if (std::find(others.begin(), others.end(), inode) == others.end()) {
            all.sockets.insert(inode);
        }
    });
    added(before.epolls, after.epolls, [&](int epoll) { all.epolls.insert(epoll); });
    added(before.threads, after.threads, [&](int thread) { all.threads.insert(thread); });
}

void remember_watched() {
    auto& all = remembered();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (auto it = all.epolls.begin(); it != all.epolls.end();) {
        if (target_of(*it) != "anon_inode:[eventpoll]") {
            it = all.epolls.erase(it);
            continue;
        }
        for (const int fd : watched_by(*it)) {
            if (const uint64_t inode = inet_inode(fd)) {
                all.sockets.insert(inode);
            }
        }
        ++it;
    }
}

std::vector<uint64_t> torch_socket_inodes() {
    remember_watched();
    auto& all = remembered();
    const std::lock_guard<std::mutex> lock(all.mutex);
    return {all.sockets.begin(), all.sockets.end()};
}

std::vector<int> open_torch_sockets() {
    auto& all = remembered();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::vector<int> fds;
    each_entry("/proc/self/fd", [&](int fd) {
        const uint64_t inode = inet_inode(fd);
        if (inode != 0 && all.sockets.count(inode) != 0) {
            fds.push_back(fd);
        }
    });
    return fds;
}

void mute_torch_sockets() {
    auto& all = remembered();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const int epoll : all.epolls) {
        for (const int fd : watched_by(epoll)) {
            if (inet_inode(fd) == 0) {
                continue;
            }
            const int kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
            if (kept < 0) {
                throw std::runtime_error("cannot keep a socket of torch's: " +
                                         std::string(std::strerror(errno)));
            }
            all.kept.push_back(kept);
            epoll_ctl(epoll, EPOLL_CTL_DEL, fd, nullptr);
            silence(fd);
            // When its owner goes, gloo takes the descriptor out of its epoll.
            epoll_event nothing{};
            epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &nothing);
        }
    }
}

int neutralise_torch_sockets() {
    const std::vector<int> fds = open_torch_sockets();
    auto& all = remembered();
    const std::lock_guard<std::mutex> lock(all.mutex);
    int count = 0;
    for (const int fd : fds) {
        if (std::find(all.kept.begin(), all.kept.end(), fd) == all.kept.end()) {
            silence(fd);
            ++count;
        }
    }
    for (const int fd : all.kept) {
        close(fd);
    }
    all.kept.clear();
    all.sockets.clear();
    all.moved.clear();
    return count;
}

std::string what_moves() {
    remember_watched();
    const std::vector<int> fds = open_torch_sockets();
    auto& all = remembered();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::string found;
    std::map<uint64_t, uint64_t> moved;
    for (const int fd : fds) {
        if (is_listening(fd)) {
            continue;
        }
        if (!queues_are_empty(fd)) {
            found = "a connection has bytes under way";
        }
        moved[inet_inode(fd)] = bytes_moved(fd);
    }
    if (moved != all.moved) {
        found = "a connection has moved bytes";
    }
    all.moved = std::move(moved);
    // gloo's threads wake up many times a second to look around, so that they have run says
    // nothing; that one is not asleep means it may be at work. The one that asks is none of them,
    // even if it began while a group did.
    for (auto it = all.threads.begin(); it != all.threads.end();) {
        const char state = state_of(*it);
        if (state == 0) {
            it = all.threads.erase(it);
            continue;
        }
        if (state != 'S' && *it != gettid()) {
            const std::string name = name_of(*it);
            // What NCCL is at is known of its streams; its threads began while a group was split.
            if (name.rfind("NCCL", 0) != 0 && name.rfind("pt_nccl", 0) != 0) {
                found = "thread '" + name + "' is not asleep (" + state + ")";
            }
        }
        ++it;
    }
    return found;
}

void torch_sockets_after_fork_in_child() {
    auto& all = remembered();
    new (&all.mutex) std::mutex();
    if (all.sockets.empty() && all.epolls.empty()) {
        return;
    }
    for (const int epoll : all.epolls) {
        if (target_of(epoll) != "anon_inode:[eventpoll]") {
            continue;
        }
        for (const int fd : watched_by(epoll)) {
            if (inet_inode(fd) != 0) {
                close(fd);
            }
        }
        close(epoll);
    }
    each_entry("/proc/self/fd", [&](int fd) {
        const uint64_t inode = inet_inode(fd);
        if (inode != 0 && all.sockets.count(inode) != 0) {
            close(fd);
        }
    });
    all.sockets.clear();
    all.epolls.clear();
    all.threads.clear();
}

}  // namespace torchmig
