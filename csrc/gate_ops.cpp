// Puts the gate before every c10d operation: typed kernels for the signatures known here, a boxed
// one for any that a newer torch has changed or added.
#include "gate_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "gate.h"

namespace torchmig {

namespace {

using at::Tensor;
using at::TensorList;
using c10d::ProcessGroup;
using c10d::ReduceOp;
using c10d::Work;
using Group = c10::intrusive_ptr<ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Reduce = c10::intrusive_ptr<ReduceOp>;
using TensorLists = std::vector<std::vector<Tensor>>;
using Ints = std::vector<int64_t>;

// NCCL matches point-to-point operations by order alone; gloo by tag.
int64_t tag_of(const Group& group, int64_t tag) {
    return group->getBackendType() == ProcessGroup::BackendType::NCCL ? 0 : tag;
}

c10::DispatchKeySet below(c10::DispatchKeySet keys) {
    return keys &
           c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
}

template <typename First, typename... Rest>
const Group& find_group(const First& first, const Rest&... rest) {
    if constexpr (std::is_same_v<std::decay_t<First>, Group>) {
        return first;
    } else {
        static_assert(sizeof...(rest) > 0, "no argument is a process group");
        return find_group(rest...);
    }
}

// One kernel per operation: the name is a template argument, so that each has its own handle.
template <const char* Name, typename Signature>
struct Kernel;

template <const char* Name, typename Return, typename... Args>
struct Kernel<Name, Return(Args...)> {
    static Return call(c10::DispatchKeySet keys, Args... args) {
        Gate::instance().before_op(find_group(args...).get(), Op::kCollective);
        return next(keys, std::forward<Args>(args)...);
    }
    static Return next(c10::DispatchKeySet keys, Args... args) {
        static const auto op =
            c10::Dispatcher::singleton().findSchemaOrThrow(Name, "").typed<Return(Args...)>();
        return op.redispatch(below(keys), std::forward<Args>(args)...);
    }
};

#define TORCHMIG_COLLECTIVES(X)                                                                   \
    X(broadcast_,                                                                                 \
      std::tuple<std::vector<Tensor>, WorkPtr>(                                                   \
          TensorList, const Group&, int64_t, int64_t, bool, int64_t))                             \
    X(allreduce_,                                                                                 \
      std::tuple<std::vector<Tensor>, WorkPtr>(                                                   \
          TensorList, const Group&, const Reduce&, const std::optional<Tensor>&, bool, int64_t))  \
    X(allreduce_coalesced_, WorkPtr(TensorList, const Group&, const Reduce&, bool, int64_t))      \
    X(reduce_, WorkPtr(TensorList, const Group&, const Reduce&, int64_t, int64_t, bool, int64_t)) \
    X(allgather_,                                                                                 \
      std::tuple<TensorLists, WorkPtr>(                                                           \
          const TensorLists&, TensorList, const Group&, bool, int64_t))                           \
    X(_allgather_base_,                                                                           \
      std::tuple<Tensor, WorkPtr>(Tensor&, Tensor&, const Group&, bool, int64_t))                 \
    X(allgather_coalesced_, WorkPtr(const TensorLists&, const TensorList&, const Group&, bool))   \
    X(allgather_into_tensor_coalesced_,                                                           \
      WorkPtr(const TensorList, const TensorList, const Group&, bool))                            \
    X(gather_,                                                                                    \
      WorkPtr(const TensorLists&, const TensorList&, const Group&, int64_t, bool, int64_t))       \
    X(scatter_,                                                                                   \
      std::tuple<std::vector<Tensor>, WorkPtr>(                                                   \
          const TensorList&, const TensorLists&, const Group&, int64_t, bool, int64_t))           \
    X(reduce_scatter_,                                                                            \
      std::tuple<std::vector<Tensor>, WorkPtr>(                                                   \
          const TensorList&, const TensorLists&, const Group&, const Reduce&, bool, int64_t))     \
    X(_reduce_scatter_base_,                                                                      \
      std::tuple<Tensor, WorkPtr>(Tensor&, Tensor&, const Group&, const Reduce&, bool, int64_t))  \
    X(reduce_scatter_tensor_coalesced_,                                                           \
      WorkPtr(const TensorList, const TensorList, const Group&, const Reduce&, bool, int64_t))    \
    X(alltoall_base_, WorkPtr(Tensor&, Tensor&, const Group&, Ints, Ints, bool, int64_t))         \
    X(alltoall_,                                                                                  \
      std::tuple<std::vector<Tensor>, WorkPtr>(                                                   \
          const TensorList&, const TensorList&, const Group&, bool, int64_t))                     \
    X(monitored_barrier_, void(Tensor, const Group&, const Ints&, int64_t, bool))                 \
    X(barrier, WorkPtr(Tensor, const Group&, const Ints&, bool, int64_t))

#define TORCHMIG_NAME(name, ...) constexpr char name_##name[] = "c10d::" #name;
TORCHMIG_COLLECTIVES(TORCHMIG_NAME)
#undef TORCHMIG_NAME
constexpr char name_send[] = "c10d::send";
constexpr char name_recv_[] = "c10d::recv_";
constexpr char name_recv_any_source_[] = "c10d::recv_any_source_";

using PeerSignature = WorkPtr(TensorList, const Group&, int64_t, int64_t);
using AnySignature = WorkPtr(TensorList, const Group&, int64_t);

WorkPtr send(
    c10::DispatchKeySet keys, TensorList tensors, const Group& group, int64_t peer, int64_t tag) {
    Gate::instance().before_op(group.get(), Op::kSend, peer, tag_of(group, tag));
    return Kernel<name_send, PeerSignature>::next(keys, tensors, group, peer, tag);
}

WorkPtr recv(
    c10::DispatchKeySet keys, TensorList tensors, const Group& group, int64_t peer, int64_t tag) {
    Gate::instance().before_op(group.get(), Op::kRecv, peer, tag_of(group, tag));
    return Kernel<name_recv_, PeerSignature>::next(keys, tensors, group, peer, tag);
}

WorkPtr recv_any_source(c10::DispatchKeySet keys,
                        TensorList tensors,
                        const Group& group,
                        int64_t tag) {
    Gate::instance().before_op(group.get(), Op::kRecv, -1, tag_of(group, tag));
    return Kernel<name_recv_any_source_, AnySignature>::next(keys, tensors, group, tag);
}

// For operations whose signature is not known here: finds the group among the boxed arguments.
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i].name() == "process_group") {
            const auto group =
                torch::jit::peek(*stack, i, arguments.size()).toCustomClass<ProcessGroup>();
            Gate::instance().before_op(group.get(), Op::kCollective);
        }
    }
    op.redispatchBoxed(below(keys), stack);
}

struct Registration {
    std::unique_ptr<torch::Library> library;
    std::vector<std::string> typed;
    std::vector<std::string> boxed;
};

Registration& registration() {
    static auto* made = new Registration();  // leaked: kernels must outlive static destruction
    return *made;
}

bool has_group(const c10::FunctionSchema& schema) {
    const auto& arguments = schema.arguments();
    return std::any_of(arguments.begin(), arguments.end(), [](const auto& a) {
        return a.name() == "process_group";
    });
}

// True if torch's operation has the signature that the kernel was written for.
template <typename Signature>
bool fits(const c10::OperatorHandle& op) {
    try {
        op.typed<Signature>();
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

}  // namespace

void install_gate() {
    auto& made = registration();
    if (made.library) {
        return;
    }
    made.library = std::make_unique<torch::Library>(
        torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        if (name.name.rfind("c10d::", 0) != 0) {
            continue;
        }
        const auto op = dispatcher.findOp(name);
        if (!op || !op->hasSchema() || !has_group(op->schema())) {
            continue;
        }
        const std::string bare = name.name.substr(6);
#define TORCHMIG_IMPL(known, ...)                                                        \
    if (bare == #known && fits<__VA_ARGS__>(*op)) {                                      \
        made.library->impl(#known, TORCH_FN((Kernel<name_##known, __VA_ARGS__>::call))); \
        made.typed.push_back(bare);                                                      \
        continue;                                                                        \
    }
        TORCHMIG_COLLECTIVES(TORCHMIG_IMPL)
#undef TORCHMIG_IMPL
        if (bare == "send" && fits<PeerSignature>(*op)) {
            made.library->impl("send", TORCH_FN(send));
            made.typed.push_back(bare);
        } else if (bare == "recv_" && fits<PeerSignature>(*op)) {
            made.library->impl("recv_", TORCH_FN(recv));
            made.typed.push_back(bare);
        } else if (bare == "recv_any_source_" && fits<AnySignature>(*op)) {
            made.library->impl("recv_any_source_", TORCH_FN(recv_any_source));
            made.typed.push_back(bare);
        } else {
            made.library->impl(bare.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
            made.boxed.push_back(bare);
        }
    }
}

std::vector<std::string> typed_operations() {
    return registration().typed;
}
std::vector<std::string> boxed_operations() {
    return registration().boxed;
}

}  // namespace torchmig
