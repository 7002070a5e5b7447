// The gate: where a rank's collectives and point-to-point operations are counted and may be held.
//
// Idle, an operation costs one atomic add and one load. When the agent has given an order, the rule
// written in torchmig/cut/__init__.py decides whether a thread goes on or parks here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torchmig {

// How far the rank is asked to go before it parks; each level includes the ones before it.
enum class Level : int {
    kFree = 0,  // nothing is asked
    kStep = 1,  // park at the end of an optimizer step
    kGate = 2,  // also hold operations above their target
    kAny = 3,   // also park at any Python safe point
};

enum class Op : uint8_t { kCollective = 0, kSend = 1, kRecv = 2, kBlock = 3 };

// One counter: operations issued by this rank on one group (or channel of it).
struct Counter {
    std::string key;  // the text form in torchmig/cut/keys.py
    std::atomic<uint64_t> count{0};
};

struct Order {
    uint64_t request = 0;
    uint64_t serial = 0;
    Level level = Level::kFree;
    bool final = false;
    std::map<std::string, uint64_t> targets;
};

// What the control thread tells the agent.
struct Report {
    uint64_t request = 0;
    uint64_t serial = 0;
    std::string state;                 // running | parked | busy
    std::string place;                 // boundary | gate | python | store, when parked
    std::vector<std::string> waiting;  // the keys that threads are held at, each once
    uint64_t steps = 0;
    double seconds_per_step = 0;
    std::vector<std::pair<std::string, uint64_t>> counters;
    std::vector<std::pair<std::string, std::vector<int64_t>>> groups;
};

class Gate {
  public:
    static Gate& instance();

    // Tell the gate which group a ProcessGroup object is. The address may be that of a group that
    // has been destroyed: its counters stay, under its name.
    void register_group(const void* group, const std::string& name, std::vector<int64_t> ranks);

    // Called by every c10d operation before it is issued. `peer` is a rank within the group (-1:
    // any source), `tag` counts only for backends that match by tag.
    void before_op(const void* group, Op op, int64_t peer = 0, int64_t tag = 0) {
        Counter* counter = find(group, op, peer, tag);
        // The add comes before the load: either this thread sees the order, or the one who
        // gave the order sees this operation in the counter.
        counter->count.fetch_add(1, std::memory_order_seq_cst);
        if (level_.load(std::memory_order_seq_cst) != 0) {
            hold(counter);
        }
    }

    // Points where a thread may park.
    void boundary();      // an optimizer step has ended
    void python_point();  // the interpreter is between two instructions
    void store_point();   // the thread waits for a key in the store
    // Around a coalesced block: the block counts as one, its operations count but are not held.
    void block_begin(const void* group);
    void block_end();
    // Around the making of a group: a collective of those that must all make it, which are `ranks`
    // (nobody named: the whole job), and busy until create_end.
    void create_begin(std::vector<int64_t> ranks);
    void create_end();

    // The calling thread is never parked from now on: the control thread carries the requests out.
    static void never_park_this_thread();

    // The agent's side, called by the control thread.
    void set_order(const Order& order);
    void release();
    Report report() const;
    bool parked() const;
    // Grows whenever a report would read differently, so that no two reports share a version.
    uint64_t version() const;
    // The callback may be called with the lock held: it must not call the gate.
    void on_change(std::function<void()> callback);
    void set_rank(int64_t rank, int64_t world_size);
    void after_fork_in_child();

  private:
    struct Slot {
        std::atomic<const void*> group{nullptr};
        std::atomic<uint64_t> meta{0};
        std::atomic<Counter*> counter{nullptr};
    };
    struct Group {
        std::string name;
        std::vector<int64_t> ranks;
    };
    struct Parked {
        const char* place;
        Level level;             // the least at which a thread may park there
        const Counter* waiting;  // null when not at an operation
    };

    Gate();
    Counter* find(const void* group, Op op, int64_t peer, int64_t tag) {
        const uint64_t meta = (static_cast<uint64_t>(op) << 62) |
                              ((static_cast<uint64_t>(peer + 1) & 0xffffff) << 38) |
                              (static_cast<uint64_t>(tag) & 0x3fffffffffULL);
        const size_t start = hash(group, meta);
        for (size_t i = 0; i < kProbes; ++i) {
            Slot& slot = slots_[(start + i) % kSlots];
            const void* owner = slot.group.load(std::memory_order_acquire);
            if (owner == group && slot.meta.load(std::memory_order_relaxed) == meta) {
                return slot.counter.load(std::memory_order_relaxed);
            }
            if (owner == nullptr) {
                break;
            }
        }
        return find_slow(group, op, peer, tag, meta);
    }
    static size_t hash(const void* group, uint64_t meta) {
        uint64_t h = reinterpret_cast<uintptr_t>(group) * 0x9e3779b97f4a7c15ULL;
        h = (h ^ meta) * 0xff51afd7ed558ccdULL;
        return static_cast<size_t>(h >> 33);
    }
    Counter* find_slow(const void* group, Op op, int64_t peer, int64_t tag, uint64_t meta);
    Counter* counter_for(const std::string& key);
    std::string key_of(const Group& group, Op op, int64_t peer, int64_t tag) const;
    void hold(Counter* counter);
    void enter_section(Counter* counter);
    void leave_section();
    void point(const char* place, Level level);
    template <typename Held>
    void park_while(const Parked& parked, Held held);
    template <typename Held>
    void stand_while(std::unique_lock<std::mutex>& lock, const Parked& parked, Held held);
    bool targets_met() const;
    bool may_stand(const Parked& parked) const;
    uint64_t target(const Counter& counter) const;
    void changed();

    static constexpr size_t kSlots = 4096;
    static constexpr size_t kProbes = 64;

    std::unique_ptr<Slot[]> slots_;
    std::atomic<int> level_{0};
    int64_t rank_ = 0;
    mutable std::mutex mutex_;
    std::condition_variable wake_;
    Order order_;
    std::map<const void*, Group> groups_;                // live objects
    std::map<std::string, std::vector<int64_t>> names_;  // every group ever, by name
    std::map<std::string, std::unique_ptr<Counter>> counters_;
    std::map<std::tuple<const void*, uint64_t>, Counter*> overflow_;
    std::vector<Parked> parked_;
    int busy_ = 0;
    uint64_t steps_ = 0;
    double last_step_ = 0;
    double seconds_per_step_ = 0;
    std::atomic<uint64_t> version_{0};
    std::function<void()> on_change_;
};

// Gives up the GIL for a scope if this thread holds it.
class GilRelease {
  public:
    GilRelease();
    ~GilRelease();
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;

  private:
    void* state_;
};

}  // namespace torchmig
