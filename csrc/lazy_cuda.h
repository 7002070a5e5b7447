// The CUDA driver's functions, found in libcuda.so.1 when they are first needed.
//
// Neither the CUDA toolkit nor a driver has to be there when this is built or loaded, so the few
// types that are used are declared here; lazy_cuda.cpp checks them against cuda.h where one exists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace torchmig::cuda {

using Result = int;  // CUresult
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using DevicePtr = unsigned long long;
using Handle = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kInvalidContext = 201;
constexpr Result kNotSupported = 801;
constexpr Result kUnknown = 999;

constexpr int kAllocationPinned = 1;
constexpr int kLocationDevice = 1;
constexpr int kAccessReadWrite = 3;
constexpr int kAttributeRdmaWithVmm = 110;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventNoTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;

// CUmemLocation
struct Location {
    int type;
    int id;
};

// CUmemAllocationProp
struct AllocationProperties {
    int type;
    int requested_handle_types;
    Location location;
    void* win32_handle_meta_data;
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};

// CUmemAccessDesc
struct AccessDescription {
    Location location;
    int flags;
};

// One line a function: name as libcuda exports it, then its parameters.
#define TORCHMIG_CUDA_FUNCTIONS(X)                                                      \
    X(cuInit, unsigned flags)                                                           \
    X(cuGetErrorName, Result result, const char** name)                                 \
    X(cuGetErrorString, Result result, const char** text)                               \
    X(cuDriverGetVersion, int* version)                                                 \
    X(cuDeviceGetAttribute, int* value, int attribute, Device device)                   \
    X(cuDevicePrimaryCtxRetain, Context* context, Device device)                        \
    X(cuDevicePrimaryCtxRelease_v2, Device device)                                      \
    X(cuDevicePrimaryCtxGetState, Device device, unsigned* flags, int* active)          \
    X(cuCtxGetCurrent, Context* context)                                                \
    X(cuCtxSetCurrent, Context context)                                                 \
    X(cuCtxGetDevice, Device* device)                                                   \
    X(cuCtxSynchronize)                                                                 \
    X(cuMemGetInfo_v2, size_t* free, size_t* total)                                     \
    X(cuMemAddressReserve,                                                              \
      DevicePtr* out,                                                                   \
      size_t size,                                                                      \
      size_t align,                                                                     \
      DevicePtr at,                                                                     \
      unsigned long long flags)                                                         \
    X(cuMemAddressFree, DevicePtr address, size_t size)                                 \
    X(cuMemCreate,                                                                      \
      Handle* handle,                                                                   \
      size_t size,                                                                      \
      const AllocationProperties* properties,                                           \
      unsigned long long flags)                                                         \
    X(cuMemRelease, Handle handle)                                                      \
    X(cuMemMap,                                                                         \
      DevicePtr address,                                                                \
      size_t size,                                                                      \
      size_t offset,                                                                    \
      Handle handle,                                                                    \
      unsigned long long flags)                                                         \
    X(cuMemUnmap, DevicePtr address, size_t size)                                       \
    X(cuMemSetAccess,                                                                   \
      DevicePtr address,                                                                \
      size_t size,                                                                      \
      const AccessDescription* access,                                                  \
      size_t count)                                                                     \
    X(cuMemHostRegister_v2, void* address, size_t size, unsigned flags)                 \
    X(cuMemHostUnregister, void* address)                                               \
    X(cuMemcpyDtoHAsync_v2, void* to, DevicePtr from, size_t size, Stream stream)       \
    X(cuMemcpyHtoDAsync_v2, DevicePtr to, const void* from, size_t size, Stream stream) \
    X(cuStreamCreate, Stream* stream, unsigned flags)                                   \
    X(cuStreamDestroy_v2, Stream stream)                                                \
    X(cuStreamSynchronize, Stream stream)                                               \
    X(cuEventCreate, Event* event, unsigned flags)                                      \
    X(cuEventRecord, Event event, Stream stream)                                        \
    X(cuEventSynchronize, Event event)                                                  \
    X(cuEventDestroy_v2, Event event)

struct Driver {
#define TORCHMIG_CUDA_MEMBER(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
    TORCHMIG_CUDA_FUNCTIONS(TORCHMIG_CUDA_MEMBER)
#undef TORCHMIG_CUDA_MEMBER
};

// The driver, loaded on the first call; null where libcuda.so.1 is absent or too old. `why` then
// holds the reason.
const Driver* driver(std::string* why = nullptr);

// Whether this process has libcuda loaded already; loads nothing.
bool driver_is_loaded();

// A driver call that failed.
class CudaError : public std::runtime_error {
  public:
    CudaError(Result code, const char* expression, const char* file, int line);
    Result code;
};

// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)", or the number where there is no driver to ask.
std::string describe(Result code);

#define TORCHMIG_CUDA_CHECK(expression)                                                  \
    do {                                                                                 \
        const ::torchmig::cuda::Result result_ = (expression);                           \
        if (result_ != ::torchmig::cuda::kSuccess) {                                     \
            throw ::torchmig::cuda::CudaError(result_, #expression, __FILE__, __LINE__); \
        }                                                                                \
    } while (false)

}  // namespace torchmig::cuda
