#include "device_copy.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include "lazy_cuda.h"
#include "mapped_memory.h"
#include "streaming_copy.h"

namespace py = pybind11;

namespace torchmig {

namespace {

using cuda::Driver;

class PinnedMemory {
  public:
    PinnedMemory(const Driver& cuda, size_t size) : cuda_(cuda), memory_(size, -1, 0) {
        TORCHMIG_CUDA_CHECK(
            cuda_.cuMemHostRegister_v2(memory_.data(), size, cuda::kHostRegisterPortable));
    }
    ~PinnedMemory() { cuda_.cuMemHostUnregister(memory_.data()); }
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;

    char* data() const { return memory_.data(); }

  private:
    const Driver& cuda_;
    const MappedMemory memory_;
};

// The device's primary context, which is the one that torch uses.
class PrimaryContext {
  public:
    PrimaryContext(const Driver& cuda, int device) : cuda_(cuda), device_(device) {
        TORCHMIG_CUDA_CHECK(cuda_.cuDevicePrimaryCtxRetain(&context_, device));
    }
    ~PrimaryContext() { cuda_.cuDevicePrimaryCtxRelease_v2(device_); }
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;

    cuda::Context get() const { return context_; }

  private:
    const Driver& cuda_;
    const int device_;
    cuda::Context context_ = nullptr;
};

class CurrentContext {
  public:
    CurrentContext(const Driver& cuda, cuda::Context context) : cuda_(cuda) {
        TORCHMIG_CUDA_CHECK(cuda_.cuCtxGetCurrent(&before_));
        TORCHMIG_CUDA_CHECK(cuda_.cuCtxSetCurrent(context));
    }
    ~CurrentContext() { cuda_.cuCtxSetCurrent(before_); }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

  private:
    const Driver& cuda_;
    cuda::Context before_ = nullptr;
};

// Pieces that lie side by side in the staging and fit one buffer together.
struct Batch {
    uint64_t offset;
    uint64_t size;
    std::vector<Piece> pieces;
};

std::vector<Batch> make_batches(const std::vector<Piece>& pieces, size_t buffer_bytes) {
    std::vector<Batch> batches;
    uint64_t end = 0;
    for (const Piece& whole : pieces) {
        if (whole.offset < end) {
            throw std::invalid_argument("pieces overlap in the staging or are out of order");
        }
        end = whole.offset + whole.size;
        for (uint64_t done = 0; done < whole.size;) {
            Piece part{whole.address + done,
                       std::min<uint64_t>(buffer_bytes, whole.size - done),
                       whole.offset + done};
            done += part.size;
            const uint64_t part_end = part.offset + part.size;
            if (batches.empty() || part_end - batches.back().offset > buffer_bytes) {
                batches.push_back({part.offset, 0, {}});
            }
            batches.back().size = part_end - batches.back().offset;
            batches.back().pieces.push_back(part);
        }
    }
    return batches;
}

// One thread's stream, and an event for each of its two buffers.
class Lane {
  public:
    Lane(const Driver& cuda, char* buffers, size_t buffer_bytes)
        : cuda_(cuda), buffers_{buffers, buffers + buffer_bytes} {
        TORCHMIG_CUDA_CHECK(cuda_.cuStreamCreate(&stream_, cuda::kStreamNonBlocking));
        for (cuda::Event& event : events_) {
            TORCHMIG_CUDA_CHECK(cuda_.cuEventCreate(&event, cuda::kEventNoTiming));
        }
    }
    ~Lane() {
        cuda_.cuStreamSynchronize(stream_);
        for (const cuda::Event event : events_) {
            if (event != nullptr) {
                cuda_.cuEventDestroy_v2(event);
            }
        }
        cuda_.cuStreamDestroy_v2(stream_);
    }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    void out(const std::vector<Batch>& batches,
             std::atomic<size_t>& next,
             char* staging,
             uint64_t first_offset) {
        const Batch* before = nullptr;
        int slot = 0;
        for (;;) {
            const size_t index = next.fetch_add(1);
            const Batch* batch = index < batches.size() ? &batches[index] : nullptr;
            if (batch != nullptr) {
                for (const Piece& piece : batch->pieces) {
                    TORCHMIG_CUDA_CHECK(
                        cuda_.cuMemcpyDtoHAsync_v2(buffers_[slot] + (piece.offset - batch->offset),
                                                   piece.address,
                                                   piece.size,
                                                   stream_));
                }
                TORCHMIG_CUDA_CHECK(cuda_.cuEventRecord(events_[slot], stream_));
            }
            if (before != nullptr) {
                TORCHMIG_CUDA_CHECK(cuda_.cuEventSynchronize(events_[slot ^ 1]));
                streaming_copy(
                    staging + (before->offset - first_offset), buffers_[slot ^ 1], before->size);
            }
            if (batch == nullptr) {
                return;
            }
            before = batch;
            slot ^= 1;
        }
    }

    void in(const std::vector<Batch>& batches,
            std::atomic<size_t>& next,
            const char* staging,
            uint64_t first_offset) {
        int slot = 0;
        for (size_t index = next.fetch_add(1); index < batches.size(); index = next.fetch_add(1)) {
            const Batch& batch = batches[index];
            TORCHMIG_CUDA_CHECK(cuda_.cuEventSynchronize(events_[slot]));
            cached_copy(buffers_[slot], staging + (batch.offset - first_offset), batch.size);
            for (const Piece& piece : batch.pieces) {
                TORCHMIG_CUDA_CHECK(
                    cuda_.cuMemcpyHtoDAsync_v2(piece.address,
                                               buffers_[slot] + (piece.offset - batch.offset),
                                               piece.size,
                                               stream_));
            }
            TORCHMIG_CUDA_CHECK(cuda_.cuEventRecord(events_[slot], stream_));
            slot ^= 1;
        }
        TORCHMIG_CUDA_CHECK(cuda_.cuStreamSynchronize(stream_));
    }

  private:
    const Driver& cuda_;
    char* const buffers_[2];
    cuda::Stream stream_ = nullptr;
    cuda::Event events_[2] = {nullptr, nullptr};
};

int thread_count(const CopyOptions& options, size_t batches) {
    const int processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const int wanted =
        options.threads > 0 ? options.threads : std::min(processors, CopyOptions::kMaxThreads);
    return static_cast<int>(std::min<size_t>(static_cast<size_t>(wanted), batches));
}

}  // namespace

void copy_pieces(Direction direction,
                 int device,
                 int staging_fd,
                 const std::vector<Piece>& pieces,
                 const CopyOptions& options) {
    const size_t buffer_bytes =
        options.buffer_bytes != 0 ? options.buffer_bytes : CopyOptions::kBufferBytes;
    const std::vector<Batch> batches = make_batches(pieces, buffer_bytes);
    if (batches.empty()) {
        return;
    }
    std::string why;
    const Driver* cuda = cuda::driver(&why);
    if (cuda == nullptr) {
        throw std::runtime_error("cannot copy device memory: " + why);
    }
    const PrimaryContext context(*cuda, device);
    const CurrentContext current(*cuda, context.get());
    // Mappings of a file begin at a page, of huge pages at one of theirs.
    const uint64_t first = batches.front().offset & ~(kHugePageBytes - 1);
    const uint64_t last = batches.back().offset + batches.back().size;
    const MappedMemory staging(last - first, staging_fd, static_cast<off_t>(first));
    const int threads = thread_count(options, batches.size());
    const PinnedMemory buffers(*cuda, buffer_bytes * 2 * static_cast<size_t>(threads));

    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::exception_ptr failure;
    const auto work = [&](int number) {
        try {
            const CurrentContext in_thread(*cuda, context.get());
            Lane lane(*cuda,
                      buffers.data() + buffer_bytes * 2 * static_cast<size_t>(number),
                      buffer_bytes);
            if (direction == Direction::kOut) {
                lane.out(batches, next, staging.data(), first);
            } else {
                lane.in(batches, next, staging.data(), first);
            }
        } catch (...) {
            next.store(batches.size());
            const std::lock_guard<std::mutex> lock(mutex);
            failure = std::current_exception();
        }
    };
    std::vector<std::thread> pool;
    for (int number = 1; number < threads; number++) {
        pool.emplace_back(work, number);
    }
    work(0);
    for (std::thread& thread : pool) {
        thread.join();
    }
    if (failure != nullptr) {
        std::rethrow_exception(failure);
    }
}

void register_device_copy(py::module_& m) {
    using PyPiece = std::tuple<uint64_t, uint64_t, uint64_t>;
    m.def(
        "copy_pieces",
        [](bool out,
           int device,
           int staging_fd,
           const std::vector<PyPiece>& pieces,
           int threads,
           size_t buffer_bytes) {
            std::vector<Piece> all;
            all.reserve(pieces.size());
            for (const auto& [address, size, offset] : pieces) {
                all.push_back({address, size, offset});
            }
            CopyOptions options;
            options.threads = threads;
            options.buffer_bytes = buffer_bytes;
            const py::gil_scoped_release no_gil;
            copy_pieces(out ? Direction::kOut : Direction::kIn, device, staging_fd, all, options);
        },
        py::arg("out"),
        py::arg("device"),
        py::arg("staging_fd"),
        py::arg("pieces"),
        py::arg("threads") = 0,
        py::arg("buffer_bytes") = 0,
        "Copy (address, size, staging offset) pieces of one device out of it or into it.");
    m.def("touch_file",
          &touch_file,
          py::arg("fd"),
          py::arg("offset"),
          py::arg("size"),
          py::call_guard<py::gil_scoped_release>(),
          "Find memory for a stretch of a memfd; return how many bytes are in huge pages.");
}

}  // namespace torchmig
