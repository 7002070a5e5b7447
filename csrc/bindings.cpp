// Registers the components with Python; nothing else happens here.
#include <malloc.h>
#include <torch/extension.h>

#include "arena_bindings.h"
#include "backend_swap.h"
#include "control.h"
#include "device_copy.h"
#include "fork_cuda.h"
#include "fork_hook.h"
#include "gate.h"
#include "gate_ops.h"
#include "store.h"
#include "torch_sockets.h"

namespace py = pybind11;
using torchmig::Gate;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void register_gate(py::module_& m) {
    m.def("install_gate", &torchmig::install_gate);
    m.def("typed_operations", &torchmig::typed_operations);
    m.def("boxed_operations", &torchmig::boxed_operations);
    m.def(
        "register_group",
        [](const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           const std::string& name,
           std::vector<int64_t> ranks) {
            Gate::instance().register_group(group.get(), name, std::move(ranks));
        },
        py::arg("group"),
        py::arg("name"),
        py::arg("ranks"));
    m.def("boundary", [] { Gate::instance().boundary(); });
    m.def("python_point", [] { Gate::instance().python_point(); });
    m.def(
        "block_begin",
        [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
            Gate::instance().block_begin(group.get());
        },
        py::arg("group"));
    m.def("block_end", [] { Gate::instance().block_end(); });
    m.def(
        "create_begin",
        [](std::vector<int64_t> ranks) { Gate::instance().create_begin(std::move(ranks)); },
        py::arg("ranks"));
    m.def("create_end", [] { Gate::instance().create_end(); });
    m.def("gate_version", [] { return Gate::instance().version(); });
    m.def("counters", [] {
        std::map<std::string, uint64_t> out;
        for (const auto& entry : Gate::instance().report().counters) {
            out.insert(entry);
        }
        return out;
    });
}

void register_control(py::module_& m) {
    m.def("start_control",
          &torchmig::start_control,
          py::arg("socket_path"),
          py::arg("rank"),
          py::arg("world_size"),
          py::arg("signal_number"),
          NoGil());
    m.def("control_ended", &torchmig::control_ended, NoGil());
    m.def("install_fork_hook", &torchmig::install_fork_hook);
    // What a step has allocated and freed stays in the heap as dirty pages, which a dump would
    // save.
    m.def("trim_heap", [] { malloc_trim(0); }, NoGil());
}

void register_communication(py::module_& m) {
    m.def("swap_backend",
          &torchmig::swap_backend,
          py::arg("group"),
          py::arg("old"),
          py::arg("replacement"),
          NoGil());
    py::class_<torchmig::ParkedBackend, c10d::Backend, c10::intrusive_ptr<torchmig::ParkedBackend>>(
        m, "ParkedBackend")
        .def(py::init([](int rank, int size, const std::string& name) {
                 return c10::make_intrusive<torchmig::ParkedBackend>(rank, size, name);
             }),
             py::arg("rank"),
             py::arg("size"),
             py::arg("name"));
    py::class_<torchmig::ReconnectableStore,
               c10d::Store,
               c10::intrusive_ptr<torchmig::ReconnectableStore>>(m, "ReconnectableStore")
        .def(py::init([](const c10::intrusive_ptr<c10d::Store>& inner) {
                 return c10::make_intrusive<torchmig::ReconnectableStore>(inner);
             }),
             py::arg("inner"))
        .def("detach", &torchmig::ReconnectableStore::detach, NoGil())
        .def("attach", &torchmig::ReconnectableStore::attach, py::arg("inner"), NoGil());
}

void register_sockets(py::module_& m) {
    py::class_<torchmig::ProcessView>(m, "ProcessView").def_static("now", [] {
        return torchmig::ProcessView::now();
    });
    m.def("remember_torch",
          &torchmig::remember_torch,
          py::arg("before"),
          py::arg("after"),
          py::arg("others") = std::vector<uint64_t>());
    m.def("remember_watched", &torchmig::remember_watched);
    m.def("torch_socket_inodes", &torchmig::torch_socket_inodes);
    m.def("mute_torch_sockets", &torchmig::mute_torch_sockets);
    m.def("neutralise_torch_sockets", &torchmig::neutralise_torch_sockets);
    m.def("what_moves", &torchmig::what_moves, NoGil());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "The part of torchmig that lives inside a rank";
    register_gate(m);
    register_control(m);
    register_communication(m);
    register_sockets(m);
    torchmig::register_arena(m);
    torchmig::register_device_copy(m);
    m.def("install_fork_cuda", &torchmig::install_fork_cuda);
}
