#include "store.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "gate.h"

namespace torchmig {

namespace {

// A wait asks again and again whether the keys are there, so that between two questions the rank
// can park and the connection can be dropped. The pause grows: a key that comes soon is seen soon,
// and thousands of ranks that wait for long do not keep the server busy.
constexpr std::chrono::milliseconds kFirstPause{1};
constexpr std::chrono::milliseconds kLongestPause{200};

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
                changed.wait_for(lock, kLongestPause, [&] { return static_cast<bool>(inner); });
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

void ReconnectableStore::wait(const std::vector<std::string>& keys) {
    wait(keys, timeout_);
}

void ReconnectableStore::wait(const std::vector<std::string>& keys,
                              const std::chrono::milliseconds& timeout) {
    std::chrono::milliseconds left = timeout;
    std::chrono::milliseconds pause = kFirstPause;
    while (!check(keys)) {
        if (left <= std::chrono::milliseconds::zero()) {
            // Let the store itself say so, in its own words and with its own exception.
            connection_->with([&](c10d::Store& store) { store.wait(keys, kFirstPause); });
            return;
        }
        std::this_thread::sleep_for(std::min(pause, left));
        left -= pause;
        pause = std::min(pause * 2, kLongestPause);
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
