// Who calls a hooked function, and where the function behind the hook is.
#pragma once

namespace torchmig::preload {

// True if the address lies in libc10_cuda, the home of the caching allocator. Other libraries'
// allocations are left to the runtime: the driver saves what they hold.
bool is_allocator(const void* return_address);

// True if it lies in libnccl.
bool is_nccl(const void* return_address);

// The function of this name in the CUDA runtime that the process has loaded, null if it has none.
// The runtime is often loaded out of the global scope, where dlsym's RTLD_NEXT does not look.
void* runtime_function(const char* name);

}  // namespace torchmig::preload
