// A key-value store whose connection can be dropped and made anew.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torchmig {

// Wraps the store that torch.distributed made. While it is detached, calls wait; waiting for a key
// is a point where the rank may park. Thread-safe. Clones share the connection.
class ReconnectableStore : public c10d::Store {
  public:
    explicit ReconnectableStore(c10::intrusive_ptr<c10d::Store> inner);

    // Waits until no call is under way, then drops the connection. May be called twice.
    void detach();
    // Uses `inner` from now on, and lets the calls that wait go on.
    void attach(c10::intrusive_ptr<c10d::Store> inner);

    c10::intrusive_ptr<c10d::Store> clone() override;
    using c10d::Store::compareSet;
    using c10d::Store::set;
    void set(const std::string& key, const std::vector<uint8_t>& value) override;
    std::vector<uint8_t> compareSet(const std::string& key,
                                    const std::vector<uint8_t>& current,
                                    const std::vector<uint8_t>& wanted) override;
    std::vector<uint8_t> get(const std::string& key) override;
    int64_t add(const std::string& key, int64_t value) override;
    bool deleteKey(const std::string& key) override;
    bool check(const std::vector<std::string>& keys) override;
    int64_t getNumKeys() override;
    void wait(const std::vector<std::string>& keys) override;
    void wait(const std::vector<std::string>& keys,
              const std::chrono::milliseconds& timeout) override;
    void setTimeout(const std::chrono::milliseconds& timeout) override;
    void append(const std::string& key, const std::vector<uint8_t>& value) override;
    std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
    void multiSet(const std::vector<std::string>& keys,
                  const std::vector<std::vector<uint8_t>>& values) override;
    bool hasExtendedApi() const override;
    void queuePush(const std::string& key, const std::vector<uint8_t>& value) override;
    std::vector<uint8_t> queuePop(const std::string& key, bool block) override;
    int64_t queueLen(const std::string& key) override;
    std::vector<std::string> listKeys() override;

    struct Connection;
    // A second handle on the same connection.
    ReconnectableStore(std::shared_ptr<Connection> connection,
                       const std::chrono::milliseconds& timeout);

  private:
    std::shared_ptr<Connection> connection_;
};

}  // namespace torchmig
