#include "gate.h"

#include <Python.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <set>
#include <tuple>

namespace torchmig {

namespace {

// Above zero while this thread must not be parked: inside a coalesced block, in the making of a
// group, and always for the control thread.
thread_local int unparkable = 0;

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// The pseudo group of all ranks on which the making of groups is counted.
const char* const kCreation = "group creation";

// Keys travel in lines: a line break in a group's name must not end one.
std::string one_line(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
}

}  // namespace

GilRelease::GilRelease() : state_(nullptr) {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
        state_ = PyEval_SaveThread();
    }
}

GilRelease::~GilRelease() {
    if (state_ != nullptr) {
        PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
    }
}

Gate& Gate::instance() {
    // Leaked on purpose: threads may still pass the gate while the process exits.
    static Gate* gate = new Gate();
    return *gate;
}

Gate::Gate() : slots_(new Slot[kSlots]) {}

void Gate::register_group(const void* group, const std::string& name, std::vector<int64_t> ranks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The address may have belonged to a destroyed group: its slots must not be found any more.
    // A freed slot keeps a non-null owner, so that probe chains stay whole.
    static const char kFreed = 0;
    for (size_t i = 0; i < kSlots; ++i) {
        if (slots_[i].group.load(std::memory_order_relaxed) == group) {
            slots_[i].group.store(&kFreed, std::memory_order_release);
        }
    }
    for (auto it = overflow_.begin(); it != overflow_.end();) {
        it = std::get<0>(it->first) == group ? overflow_.erase(it) : std::next(it);
    }
    const std::string label = one_line(name);
    names_[label] = ranks;
    groups_[group] = Group{label, std::move(ranks)};
}

std::string Gate::key_of(const Group& group, Op op, int64_t peer, int64_t tag) const {
    const auto global = [&](int64_t member) {
        return member >= 0 && static_cast<size_t>(member) < group.ranks.size()
                   ? group.ranks[static_cast<size_t>(member)]
                   : member;
    };
    const auto channel = [&](const char* direction, int64_t source, int64_t destination) {
        return std::string(direction) + "/" + std::to_string(source) + "/" +
               std::to_string(destination) + "/" + std::to_string(tag) + "/" + group.name;
    };
    switch (op) {
        case Op::kSend:
            return channel("send", rank_, global(peer));
        case Op::kRecv:
            return channel("recv", global(peer), rank_);
        case Op::kBlock:
            return "block/" + std::to_string(rank_) + "/" + group.name;
        case Op::kCollective:
            break;
    }
    return "collective/" + group.name;
}

Counter* Gate::counter_for(const std::string& key) {
    auto& counter = counters_[key];
    if (!counter) {
        counter = std::make_unique<Counter>();
        counter->key = key;
    }
    return counter.get();
}

Counter* Gate::find_slow(const void* group, Op op, int64_t peer, int64_t tag, uint64_t meta) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = overflow_.find({group, meta});
    if (known != overflow_.end()) {
        return known->second;
    }
    auto it = groups_.find(group);
    if (it == groups_.end()) {
        // Nobody registered it: it was made outside torch.distributed. Counted under its address
        // so that it is at least seen and can be refused by name.
        char name[32];
        std::snprintf(name, sizeof name, "unknown-%p", group);
        it = groups_.emplace(group, Group{name, {}}).first;
        names_[name] = {};
    }
    Counter* counter = counter_for(key_of(it->second, op, peer, tag));
    const size_t start = hash(group, meta);
    for (size_t i = 0; i < kProbes; ++i) {
        Slot& slot = slots_[(start + i) % kSlots];
        if (slot.group.load(std::memory_order_relaxed) == nullptr) {
            slot.meta.store(meta, std::memory_order_relaxed);
            slot.counter.store(counter, std::memory_order_relaxed);
            slot.group.store(group, std::memory_order_release);
            return counter;
        }
    }
    overflow_[{group, meta}] = counter;
    return counter;
}

uint64_t Gate::target(const Counter& counter) const {
    const auto it = order_.targets.find(counter.key);
    return it == order_.targets.end() ? 0 : it->second;
}

bool Gate::targets_met() const {
    return std::all_of(order_.targets.begin(), order_.targets.end(), [&](const auto& target) {
        const auto it = counters_.find(target.first);
        const uint64_t count = it == counters_.end() ? 0 : it->second->count.load();
        return count >= target.second;
    });
}

// Whether the order that is active now still keeps a parked thread where it is: one that has not
// woken yet to an order which lets it go stands no more.
bool Gate::may_stand(const Parked& parked) const {
    if (order_.level < parked.level) {
        return false;
    }
    return parked.waiting != nullptr ? parked.waiting->count.load() + 1 > target(*parked.waiting)
                                     : targets_met();
}

void Gate::changed() {
    version_.fetch_add(1);
    if (on_change_) {
        on_change_();
    }
}

// Parks the calling thread for as long as `held` says, which is asked with the lock held.
template <typename Held>
void Gate::stand_while(std::unique_lock<std::mutex>& lock, const Parked& parked, Held held) {
    if (!held()) {
        return;
    }
    parked_.push_back(parked);
    changed();
    wake_.wait(lock, [&] { return !held(); });
    // Entries with the same place and key are interchangeable: any of them may be taken out.
    parked_.erase(std::find_if(parked_.begin(), parked_.end(), [&](const Parked& other) {
        return other.place == parked.place && other.waiting == parked.waiting;
    }));
}

template <typename Held>
void Gate::park_while(const Parked& parked, Held held) {
    if (unparkable > 0) {
        return;
    }
    const GilRelease no_gil;  // before the lock: whoever holds the lock must never want the GIL
    std::unique_lock<std::mutex> lock(mutex_);
    stand_while(lock, parked, held);
    changed();  // with the lock held: no report may tell of this under the version before
}

void Gate::hold(Counter* counter) {
    if (unparkable > 0) {
        changed();
        return;
    }
    // The operation has been counted. If it may not be issued, it is taken back until it may.
    bool counted = true;
    park_while({"gate", Level::kGate, counter}, [&] {
        const uint64_t count = counter->count.load();
        const uint64_t mine = counted ? count : count + 1;
        const bool held = order_.level >= Level::kGate && mine > target(*counter);
        if (held && counted) {
            counter->count.fetch_sub(1);
            // The sum that `version` returns must not fall: with the step that `changed` adds it
            // would be again what it was when the operation had been counted. Whoever had looked
            // just then would not look again, and the agent would never hear of the hold.
            version_.fetch_add(1);
            counted = false;
        } else if (!held && !counted) {
            counter->count.fetch_add(1);
            counted = true;
        }
        return held;
    });
}

void Gate::boundary() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const double now = now_seconds();
        if (steps_ > 0) {
            seconds_per_step_ = now - last_step_;
        }
        last_step_ = now;
        ++steps_;
    }
    point("boundary", Level::kStep);
}

void Gate::python_point() {
    point("python", Level::kAny);
}

void Gate::store_point() {
    point("store", Level::kStep);
}

void Gate::point(const char* place, Level level) {
    if (level_.load() != 0) {
        const Parked here{place, level, nullptr};
        park_while(here, [&] { return may_stand(here); });
    }
}

void Gate::enter_section(Counter* counter) {
    const GilRelease no_gil;
    std::unique_lock<std::mutex> lock(mutex_);
    const Parked here{"gate", Level::kGate, counter};
    stand_while(lock, here, [&] { return unparkable == 0 && may_stand(here); });
    // In one critical section: with the count seen and the rank not yet busy, a stand could be
    // taken while this thread goes on.
    counter->count.fetch_add(1);
    ++busy_;
    ++unparkable;
    lock.unlock();
    if (level_.load() != 0) {
        changed();
    }
}

void Gate::leave_section() {
    --unparkable;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        --busy_;
    }
    if (level_.load() != 0) {
        changed();
    }
}

void Gate::block_begin(const void* group) {
    enter_section(find(group, Op::kBlock, 0, 0));
}

void Gate::block_end() {
    leave_section();
}

void Gate::create_begin(std::vector<int64_t> ranks) {
    Counter* counter = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string name = kCreation;
        if (!ranks.empty() && ranks.size() < names_[kCreation].size()) {
            for (const int64_t rank : ranks) {
                name += " " + std::to_string(rank);
            }
            names_[name] = std::move(ranks);
        }
        counter = counter_for("collective/" + name);
    }
    enter_section(counter);
}

void Gate::create_end() {
    leave_section();
}

void Gate::never_park_this_thread() {
    ++unparkable;
}

void Gate::set_rank(int64_t rank, int64_t world_size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rank_ = rank;
    auto& everybody = names_[kCreation];
    everybody.resize(static_cast<size_t>(world_size));
    std::iota(everybody.begin(), everybody.end(), 0);
}

void Gate::set_order(const Order& order) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        order_ = order;
        level_.store(static_cast<int>(order.level));
    }
    wake_.notify_all();
    version_.fetch_add(1);
}

void Gate::release() {
    set_order(Order{});
}

bool Gate::parked() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return busy_ == 0 && std::any_of(parked_.begin(), parked_.end(), [&](const Parked& each) {
               return may_stand(each);
           });
}

uint64_t Gate::version() const {
    uint64_t sum = version_.load();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : counters_) {
        sum += entry.second->count.load();
    }
    return sum;
}

Report Gate::report() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Report report;
    report.request = order_.request;
    report.serial = order_.serial;
    // A thread held at an operation says more than one that waits elsewhere.
    std::set<std::string> waiting;
    for (const Parked& parked : parked_) {
        if (!may_stand(parked)) {
            continue;
        }
        if (parked.waiting != nullptr) {
            waiting.insert(parked.waiting->key);
        }
        if (report.place.empty() || parked.waiting != nullptr) {
            report.place = parked.place;
        }
    }
    report.waiting.assign(waiting.begin(), waiting.end());
    report.state = busy_ > 0 ? "busy" : report.place.empty() ? "running" : "parked";
    report.steps = steps_;
    report.seconds_per_step = seconds_per_step_;
    for (const auto& entry : counters_) {
        if (const uint64_t count = entry.second->count.load()) {
            report.counters.emplace_back(entry.first, count);
        }
    }
    for (const auto& entry : names_) {
        report.groups.emplace_back(entry.first, entry.second);
    }
    return report;
}

void Gate::on_change(std::function<void()> callback) {
    const std::lock_guard<std::mutex> lock(mutex_);
    on_change_ = std::move(callback);
}

void Gate::after_fork_in_child() {
    // Only the forking thread lives on: nobody will ever open the gate here, so it stays open.
    level_.store(0);
    new (&mutex_) std::mutex();
    new (&wake_) std::condition_variable();
    on_change_ = nullptr;
    order_ = Order{};
    parked_.clear();
}

}  // namespace torchmig
