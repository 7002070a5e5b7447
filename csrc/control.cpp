#include "control.h"

#include <Python.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "gate.h"

namespace torchmig {

namespace {

constexpr int kBusyPollMilliseconds = 5;    // while an order is active: how often counters are read
constexpr int kInterruptMilliseconds = 20;  // at level "any": how often the main thread is poked
constexpr int kReconnectMicroseconds = 5000;

std::string quote(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        const auto u = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (u < 0x20) {
            char buffer[8];
            std::snprintf(buffer, sizeof buffer, "\\u%04x", u);
            out += buffer;
        } else {
            out += c;
        }
    }
    return out + "\"";
}

// No streams here: some tool chains link a C++ runtime of their own into this library, and streams
// look their helpers up in whichever runtime the process finds first.
std::string number(double value) {
    char buffer[32];
    const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
    return std::string(buffer, end);
}

template <typename Items, typename Write>
std::string joined(const Items& items, Write write) {
    std::string out;
    for (const auto& item : items) {
        out += out.empty() ? "" : ",";
        out += write(item);
    }
    return out;
}

std::string to_json(const Report& report) {
    const auto counter = [](const auto& item) {
        return quote(item.first) + ":" + std::to_string(item.second);
    };
    const auto group = [](const auto& item) {
        return quote(item.first) + ":[" +
               joined(item.second, [](int64_t rank) { return std::to_string(rank); }) + "]";
    };
    return "{\"type\":\"report\",\"request\":" + std::to_string(report.request) +
           ",\"serial\":" + std::to_string(report.serial) + ",\"state\":" + quote(report.state) +
           ",\"place\":" + quote(report.place) + ",\"steps\":" + std::to_string(report.steps) +
           ",\"seconds_per_step\":" + number(report.seconds_per_step) + ",\"counters\":{" +
           joined(report.counters, counter) + "},\"waiting\":[" + joined(report.waiting, quote) +
           "],\"groups\":{" + joined(report.groups, group) + "}}";
}

// The words of a line, one after the other.
class Words {
  public:
    explicit Words(const std::string& line) : rest_(line) {}

    std::string word() {
        const size_t begin = std::min(rest_.find_first_not_of(' '), rest_.size());
        const size_t end = std::min(rest_.find(' ', begin), rest_.size());
        std::string found = rest_.substr(begin, end - begin);
        rest_.erase(0, end);
        return found;
    }
    uint64_t number() { return std::strtoull(word().c_str(), nullptr, 10); }
    std::string rest() {
        return rest_.substr(std::min(rest_.find_first_not_of(' '), rest_.size()));
    }

  private:
    std::string rest_;
};

class Control {
  public:
    Control(std::string path, int rank, int world_size, int signal_number)
        : path_(std::move(path)),
          rank_(rank),
          world_size_(world_size),
          signal_(signal_number),
          wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
          main_thread_(pthread_self()) {
        if (wake_fd_ < 0) {
            throw std::runtime_error("cannot make an eventfd for the control thread");
        }
    }

    void start() {
        if (!connect_once()) {
            throw std::runtime_error("cannot reach the agent at '" + path_ +
                                     "': " + std::strerror(errno));
        }
        Gate::instance().set_rank(rank_, world_size_);
        Gate::instance().on_change([this] { wake(); });
        std::thread([this] { run(); }).detach();
    }

    void ended() {
        ended_.store(true);
        wake();
        // The agent must know before the process goes; the thread itself may die at any time.
        send_line("{\"type\":\"ended\"}");
    }

    void wake() const {
        const uint64_t one = 1;
        if (write(wake_fd_, &one, sizeof one) < 0) {
            // Full means that a wake-up is pending already, which is all that is wanted.
        }
    }

  private:
    bool connect_once() {
        const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) {
            return false;
        }
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        if (path_.size() >= sizeof address.sun_path) {
            close(fd);
            errno = ENAMETOOLONG;
            return false;
        }
        std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
        if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
            const int saved = errno;
            close(fd);
            errno = saved;
            return false;
        }
        {
            const std::lock_guard<std::mutex> lock(send_mutex_);
            fd_ = fd;
        }
        buffer_.clear();
        send_line("{\"type\":\"hello\",\"rank\":" + std::to_string(rank_) +
                  ",\"pid\":" + std::to_string(getpid()) + "}");
        return true;
    }

    void disconnect() {
        const std::lock_guard<std::mutex> lock(send_mutex_);
        if (fd_ >= 0) {
            close(fd_);
            fd_ = -1;
        }
    }

    void reconnect() {
        disconnect();
        while (!connect_once()) {
            usleep(kReconnectMicroseconds);
        }
    }

    void send_line(std::string line) {
        line += '\n';
        const std::lock_guard<std::mutex> lock(send_mutex_);
        size_t sent = 0;
        while (fd_ >= 0 && sent < line.size()) {
            const ssize_t n = send(fd_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0) {
                return;  // the reader notices the broken connection and connects again
            }
            sent += static_cast<size_t>(n);
        }
    }

    // Reads one line; false when the connection is gone. Calls idle() whenever nothing is there.
    template <typename Idle>
    bool read_line(std::string* line, Idle idle) {
        while (true) {
            const size_t end = buffer_.find('\n');
            if (end != std::string::npos) {
                *line = buffer_.substr(0, end);
                buffer_.erase(0, end + 1);
                return true;
            }
            pollfd fds[2] = {{fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
            const int ready = poll(fds, 2, active_ ? kBusyPollMilliseconds : -1);
            if (ready < 0 && errno != EINTR) {
                return false;
            }
            if ((fds[1].revents & POLLIN) != 0) {
                uint64_t count = 0;
                if (read(wake_fd_, &count, sizeof count) < 0) {
                    // Somebody else's wake-up was drained already.
                }
            }
            if ((fds[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
                char chunk[65536];
                const ssize_t n = read(fd_, chunk, sizeof chunk);
                if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) {
                    return false;
                }
                if (n > 0) {
                    buffer_.append(chunk, static_cast<size_t>(n));
                    continue;
                }
            }
            idle();
        }
    }

    void idle() {
        if (!active_) {
            return;
        }
        const uint64_t version = Gate::instance().version();
        if (version != reported_) {
            reported_ = version;
            send_line(to_json(Gate::instance().report()));
        }
        const auto now = std::chrono::steady_clock::now();
        if (level_ == Level::kAny && !ended_.load() && !Gate::instance().parked() &&
            now - interrupted_ > std::chrono::milliseconds(kInterruptMilliseconds)) {
            interrupted_ = now;
            pthread_kill(main_thread_, signal_);
        }
    }

    void run() {
        prctl(PR_SET_NAME, "torchmig");
        Gate::never_park_this_thread();
        sigset_t all;
        sigfillset(&all);
        // A fault here must end the process with its usual report.
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
            sigdelset(&all, fault);
        }
        pthread_sigmask(SIG_SETMASK, &all, nullptr);
        std::string line;
        while (true) {
            if (!read_line(&line, [this] { idle(); })) {
                // The agent went away without a word: it is either gone, and this process with
                // it, or it comes back after a failed restore.
                Gate::instance().release();
                active_ = false;
                reconnect();
                continue;
            }
            handle(line);
        }
    }

    void handle(const std::string& line) {
        Words in(line);
        const std::string verb = in.word();
        if (verb == "order") {
            take_order(in);
        } else if (verb == "release") {
            active_ = false;
            level_ = Level::kFree;
            Gate::instance().release();
            send_line("{\"type\":\"released\"}");
        } else if (verb == "call") {
            const std::string number = in.word();
            const std::string name = in.word();
            // On a thread of its own: where Python cannot go on because the parked thread holds a
            // lock, this thread can still be told to let that one go.
            std::thread([this, number, name, argument = std::string(in.rest())] {
                Gate::never_park_this_thread();
                send_line(call_python(number, name, argument));
            }).detach();
        } else if (verb == "detach") {
            active_ = false;
            reconnect();
        } else {
            send_line("{\"number\":0,\"type\":\"error\",\"message\":" +
                      quote("unknown verb '" + verb + "'") + "}");
        }
    }

    void take_order(Words& in) {
        Order order;
        order.request = in.number();
        order.serial = in.number();
        order.level = static_cast<Level>(in.number());
        order.final = in.number() != 0;
        const uint64_t targets = in.number();
        for (uint64_t i = 0; i < targets; ++i) {
            std::string line;
            if (!read_line(&line, [] {})) {
                return;
            }
            const size_t space = line.rfind(' ');
            order.targets[line.substr(0, space)] = std::stoull(line.substr(space + 1));
        }
        level_ = order.level;
        active_ = order.level != Level::kFree;
        Gate::instance().set_order(order);
        reported_ = Gate::instance().version();
        send_line(to_json(Gate::instance().report()));
    }

    std::string call_python(const std::string& number,
                            const std::string& name,
                            const std::string& argument) {
        const std::string head = "{\"number\":" + number + ",\"type\":";
        if (ended_.load()) {
            return head + "\"error\",\"message\":\"the script has ended\"}";
        }
        const PyGILState_STATE gil = PyGILState_Ensure();
        std::string answer;
        // Not an import: the parked thread may be in the middle of one and hold its lock. The
        // module has been loaded at the start.
        PyObject* module_name = PyUnicode_FromString("torchmig.worker.phases");
        PyObject* module = module_name == nullptr ? nullptr : PyImport_GetModule(module_name);
        Py_XDECREF(module_name);
        PyObject* result = module == nullptr
                               ? nullptr
                               : PyObject_CallMethod(module, name.c_str(), "s", argument.c_str());
        const char* text = result == nullptr ? nullptr : PyUnicode_AsUTF8(result);
        if (text != nullptr) {
            answer = head + "\"result\",\"value\":" + std::string(text) + "}";
        } else {
            answer = head + "\"error\",\"message\":" + quote(python_error()) + "}";
        }
        Py_XDECREF(result);
        Py_XDECREF(module);
        PyGILState_Release(gil);
        return answer;
    }

    static std::string python_error() {
        PyObject* type = nullptr;
        PyObject* value = nullptr;
        PyObject* trace = nullptr;
        PyErr_Fetch(&type, &value, &trace);
        std::string text = "unknown Python error";
        PyObject* string = value == nullptr ? nullptr : PyObject_Str(value);
        if (string != nullptr) {
            const char* utf8 = PyUnicode_AsUTF8(string);
            const char* kind =
                type == nullptr ? "error" : reinterpret_cast<PyTypeObject*>(type)->tp_name;
            text = std::string(kind) + ": " + (utf8 == nullptr ? "" : utf8);
        }
        Py_XDECREF(string);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        PyErr_Clear();
        return text;
    }

    const std::string path_;
    const int rank_;
    const int world_size_;
    const int signal_;
    const int wake_fd_;
    const pthread_t main_thread_;
    std::mutex send_mutex_;
    int fd_ = -1;
    std::string buffer_;
    bool active_ = false;
    Level level_ = Level::kFree;
    uint64_t reported_ = 0;
    std::atomic<bool> ended_{false};
    std::chrono::steady_clock::time_point interrupted_;

    friend void torchmig::control_after_fork_in_child();
};

// Leaked on purpose: its thread lives as long as the process.
Control* control = nullptr;

}  // namespace

void start_control(const std::string& socket_path, int rank, int world_size, int signal_number) {
    if (control != nullptr) {
        throw std::runtime_error("the control thread runs already");
    }
    auto* made = new Control(socket_path, rank, world_size, signal_number);
    made->start();
    control = made;
}

void control_ended() {
    if (control != nullptr) {
        control->ended();
    }
}

void control_after_fork_in_child() {
    if (control != nullptr) {
        close(control->fd_);
        close(control->wake_fd_);
        control = nullptr;
    }
    Gate::instance().after_fork_in_child();
}

}  // namespace torchmig
