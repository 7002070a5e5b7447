#include "store.h"

#include <condition_variable>
#include <mutex>

#include "gate.h"

namespace torchmig {

namespace {

// A wait is cut into slices, so that between two of them the rank can park and the connection can
// be dropped. Keys that are there already answer at once; only true waiting is sliced.
constexpr std::chrono::milliseconds kSlice{200};

}  // namespace

struct ReconnectableStore::Connection {
    std::mutex mutex;
    std::condition_variable changed;
    c10::intrusive_ptr<c10d::Store> inner;
    int under_way = 0;

    // Runs `call` on the store, waiting for one if there is none.
    template <typename Call>
    auto with(Call call) {
        c10::intrusive_ptr<c10d::Store> store;
        {
            std::unique_lock<std::mutex> lock(mutex);
            while (!inner) {
                lock.unlock();
                Gate::instance().store_point();
                lock.lock();
                changed.wait_for(lock, kSlice, [&] { return static_cast<bool>(inner); });
            }
            store = inner;
            ++under_way;
        }
        struct Done {
            Connection* connection;
            c10::intrusive_ptr<c10d::Store>* store;
            ~Done() {
                store->reset();  // before detach() returns, nobody but it holds the store
                const std::lock_guard<std::mutex> lock(connection->mutex);
                --connection->under_way;
                connection->changed.notify_all();
            }
        } done{this, &store};
        return call(*store);
    }
};

ReconnectableStore::ReconnectableStore(c10::intrusive_ptr<c10d::Store> inner)
    : c10d::Store(inner->getTimeout()), connection_(std::make_shared<Connection>()) {
    connection_->inner = std::move(inner);
}

ReconnectableStore::ReconnectableStore(std::shared_ptr<Connection> connection,
                                       const std::chrono::milliseconds& timeout)
    : c10d::Store(timeout), connection_(std::move(connection)) {}

void ReconnectableStore::detach() {
    c10::intrusive_ptr<c10d::Store> dropped;
    std::unique_lock<std::mutex> lock(connection_->mutex);
    std::swap(dropped, connection_->inner);
    connection_->changed.wait(lock, [&] { return connection_->under_way == 0; });
    lock.unlock();  // the destructor of the store may take its time
}

void ReconnectableStore::attach(c10::intrusive_ptr<c10d::Store> inner) {
    inner->setTimeout(timeout_);
    {
        const std::lock_guard<std::mutex> lock(connection_->mutex);
        connection_->inner = std::move(inner);
    }
    connection_->changed.notify_all();
}

c10::intrusive_ptr<c10d::Store> ReconnectableStore::clone() {
    return c10::make_intrusive<ReconnectableStore>(connection_, timeout_);
}

void ReconnectableStore::set(const std::string& key, const std::vector<uint8_t>& value) {
    connection_->with([&](c10d::Store& store) { store.set(key, value); });
}

std::vector<uint8_t> ReconnectableStore::compareSet(const std::string& key,
                                                    const std::vector<uint8_t>& current,
                                                    const std::vector<uint8_t>& wanted) {
    return connection_->with(
        [&](c10d::Store& store) { return store.compareSet(key, current, wanted); });
}

std::vector<uint8_t> ReconnectableStore::get(const std::string& key) {
    wait({key});
    return connection_->with([&](c10d::Store& store) { return store.get(key); });
}

int64_t ReconnectableStore::add(const std::string& key, int64_t value) {
    return connection_->with([&](c10d::Store& store) { return store.add(key, value); });
}

bool ReconnectableStore::deleteKey(const std::string& key) {
    return connection_->with([&](c10d::Store& store) { return store.deleteKey(key); });
}

bool ReconnectableStore::check(const std::vector<std::string>& keys) {
    return connection_->with([&](c10d::Store& store) { return store.check(keys); });
}

int64_t ReconnectableStore::getNumKeys() {
    return connection_->with([&](c10d::Store& store) { return store.getNumKeys(); });
}

void ReconnectableStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void ReconnectableStore::wait(const std::vector<std::string>& keys,
                              const std::chrono::milliseconds& timeout) {
    std::chrono::milliseconds left = timeout;
    while (true) {
        const std::chrono::milliseconds slice = std::min(left, kSlice);
        const bool last = left <= kSlice;
        const bool there = connection_->with([&](c10d::Store& store) {
            try {
                store.wait(keys, slice);
                return true;
            } catch (const std::exception&) {
                // Either the slice is over, or the store is broken; then check() says so.
                if (last && !store.check(keys)) {
                    throw;
                }
                return store.check(keys);
            }
        });
        if (there) {
            return;
        }
        left -= slice;
        Gate::instance().store_point();  // time spent parked is not taken from the timeout
    }
}

void ReconnectableStore::setTimeout(const std::chrono::milliseconds& timeout) {
    c10d::Store::setTimeout(timeout);
    connection_->with([&](c10d::Store& store) { store.setTimeout(timeout); });
}

void ReconnectableStore::append(const std::string& key, const std::vector<uint8_t>& value) {
    connection_->with([&](c10d::Store& store) { store.append(key, value); });
}

std::vector<std::vector<uint8_t>> ReconnectableStore::multiGet(
    const std::vector<std::string>& keys) {
    wait(keys);
    return connection_->with([&](c10d::Store& store) { return store.multiGet(keys); });
}

void ReconnectableStore::multiSet(const std::vector<std::string>& keys,
                                  const std::vector<std::vector<uint8_t>>& values) {
    connection_->with([&](c10d::Store& store) { store.multiSet(keys, values); });
}

bool ReconnectableStore::hasExtendedApi() const {
    return connection_->with([&](c10d::Store& store) { return store.hasExtendedApi(); });
}

void ReconnectableStore::queuePush(const std::string& key, const std::vector<uint8_t>& value) {
    connection_->with([&](c10d::Store& store) { store.queuePush(key, value); });
}

std::vector<uint8_t> ReconnectableStore::queuePop(const std::string& key, bool block) {
    return connection_->with([&](c10d::Store& store) { return store.queuePop(key, block); });
}

int64_t ReconnectableStore::queueLen(const std::string& key) {
    return connection_->with([&](c10d::Store& store) { return store.queueLen(key); });
}

std::vector<std::string> ReconnectableStore::listKeys() {
    return connection_->with([&](c10d::Store& store) { return store.listKeys(); });
}

}  // namespace torchmig
