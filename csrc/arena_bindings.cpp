#include "arena_bindings.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arena.h"
#include "arena_abi.h"
#include "arena_host.h"

namespace py = pybind11;

namespace torchmig {

namespace {

using PyMapping = std::tuple<int, uint64_t, uint64_t>;  // device, address, size

// The preloaded library's door; null in a process without it.
const ArenaAbi* live() {
    using Door = const ArenaAbi* (*)();
    static const ArenaAbi* const abi = [] {
        const auto door = reinterpret_cast<Door>(dlsym(RTLD_DEFAULT, kArenaAbiSymbol));
        return door != nullptr ? door() : nullptr;
    }();
    if (abi != nullptr && abi->version != kArenaAbiVersion) {
        throw std::runtime_error("the preloaded library is of another version (" +
                                 std::to_string(abi->version) + ", wanted " +
                                 std::to_string(kArenaAbiVersion) + "); build both again");
    }
    return abi;
}

void check(const char* what, Result result) {
    if (result == cuda::kSuccess) {
        return;
    }
    const std::string text = std::string(what) + " failed: " + cuda::describe(result);
    if (result == cuda::kOutOfMemory) {
        PyErr_SetString(PyExc_MemoryError, text.c_str());
        throw py::error_already_set();
    }
    throw std::runtime_error(text);
}

std::string why_no_live_arena() {
    const ArenaAbi* abi = live();
    return abi == nullptr ? "the arena's library is not preloaded" : abi->why_unusable();
}

void register_live_arena(py::module_& m) {
    m.def("arena_why_unusable",
          &why_no_live_arena,
          "Why this process has no arena; empty where it has one.");
    m.def("arena_detach", [] {
        const Result result = [] {
            const py::gil_scoped_release no_gil;
            return live() != nullptr ? live()->detach() : cuda::kSuccess;
        }();
        check("giving back the arena's memory", result);
    });
    m.def("arena_attach", [] {
        const Result result = [] {
            const py::gil_scoped_release no_gil;
            return live() != nullptr ? live()->attach() : cuda::kSuccess;
        }();
        check("putting memory behind the arena", result);
    });
    m.def("arena_physical_bytes", [] { return live() != nullptr ? live()->physical_bytes() : 0; });
    m.def("arena_mappings", [] {
        std::vector<PyMapping> out;
        if (live() == nullptr) {
            return out;
        }
        std::vector<AbiMapping> all(live()->mappings(nullptr, 0));
        all.resize(std::min(live()->mappings(all.data(), all.size()), all.size()));
        for (const AbiMapping& mapping : all) {
            out.emplace_back(mapping.device, mapping.address, mapping.size);
        }
        return out;
    });
    m.def(
        "is_nccl_socket",
        [](uint64_t inode) { return live() != nullptr && live()->is_nccl_socket(inode) != 0; },
        py::arg("inode"));
    m.def("arena_seen", [] {
        const ArenaAbi* abi = live();
        const auto count = [abi](Seen what) {
            return abi != nullptr ? abi->seen(static_cast<int>(what)) : 0;
        };
        py::dict out;
        out["managed_memory"] = count(Seen::kManagedMemory);
        out["ipc_export"] = count(Seen::kIpcExport);
        out["ipc_import"] = count(Seen::kIpcImport);
        out["shareable_memory"] = count(Seen::kShareableMemory);
        out["multicast"] = count(Seen::kMulticast);
        out["async_allocator"] = count(Seen::kAsyncAllocator);
        out["cupti"] = count(Seen::kCupti);
        return out;
    });
}

// An arena over host memory, with the driver's steps and the arena's own.
class HostArena {
  public:
    HostArena(uintptr_t base,
              size_t size_per_device,
              size_t granularity,
              int max_devices,
              size_t capacity)
        : backing_(new HostBacking(capacity)),
          arena_({base, size_per_device, granularity, max_devices},
                 std::unique_ptr<Backing>(backing_)) {}

    HostBacking* backing_;  // owned by arena_
    Arena arena_;
};

void register_host_arena(py::module_& m) {
    py::class_<HostArena>(m, "HostArena", "The arena over host memory.")
        .def(py::init<uintptr_t, size_t, size_t, int, size_t>(),
             py::arg("base"),
             py::arg("size_per_device"),
             py::arg("granularity"),
             py::arg("max_devices"),
             py::arg("capacity"))
        .def("allocate",
             [](HostArena& self, int device, size_t size) {
                 uintptr_t address = 0;
                 const Result result = [&] {
                     const py::gil_scoped_release no_gil;
                     return self.arena_.allocate(device, size, &address);
                 }();
                 check("allocate", result);
                 return address;
             })
        .def("free",
             [](HostArena& self, uintptr_t address) { check("free", self.arena_.free(address)); })
        .def("reserve",
             [](HostArena& self, int device, size_t size) {
                 uintptr_t address = 0;
                 check("reserve", self.arena_.reserve(device, size, &address));
                 return address;
             })
        .def("unreserve",
             [](HostArena& self, uintptr_t address) {
                 check("unreserve", self.arena_.unreserve(address));
             })
        .def("create",
             [](HostArena& self, int device, size_t size) {
                 AllocationProperties properties{};
                 properties.location = {cuda::kLocationDevice, device};
                 Handle handle = 0;
                 check("create", self.arena_.create(size, properties, &handle));
                 return handle;
             })
        .def("release",
             [](HostArena& self, Handle handle) { check("release", self.arena_.release(handle)); })
        .def("map",
             [](HostArena& self, uintptr_t address, size_t size, size_t offset, Handle handle) {
                 check("map", self.arena_.map(address, size, offset, handle));
             })
        .def("unmap",
             [](HostArena& self, uintptr_t address, size_t size) {
                 check("unmap", self.arena_.unmap(address, size));
             })
        .def("set_access",
             [](HostArena& self, uintptr_t address, size_t size, int device) {
                 const AccessDescription access{{cuda::kLocationDevice, device},
                                                cuda::kAccessReadWrite};
                 check("set_access", self.arena_.set_access(address, size, &access, 1));
             })
        .def("detach", [](HostArena& self) { check("detach", self.arena_.detach()); })
        .def("attach", [](HostArena& self) { check("attach", self.arena_.attach()); })
        .def("set_capacity",
             [](HostArena& self, size_t capacity) { self.backing_->set_capacity(capacity); })
        .def_property_readonly("detached",
                               [](const HostArena& self) { return self.arena_.detached(); })
        .def_property_readonly("backing_bytes",
                               [](const HostArena& self) { return self.backing_->used(); })
        .def_property_readonly("physical_bytes",
                               [](const HostArena& self) { return self.arena_.physical_bytes(); })
        .def_property_readonly("why_unusable",
                               [](const HostArena& self) { return self.arena_.why_unusable(); })
        .def("mappings", [](const HostArena& self) {
            std::vector<PyMapping> out;
            for (const Mapping& mapping : self.arena_.mappings()) {
                out.emplace_back(mapping.device, mapping.address, mapping.size);
            }
            return out;
        });
}

}  // namespace

void register_arena(py::module_& m) {
    register_live_arena(m);
    register_host_arena(m);
}

}  // namespace torchmig
