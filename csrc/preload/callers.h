// Who calls a hooked function, and where the function behind the hook is.
#pragma once

namespace torchmig::preload {

// True if the address lies in libc10_cuda, the home of the caching allocator. Other libraries'
// allocations are left to the runtime: the driver saves what they hold.
bool is_allocator(const void* return_address);

// True if it lies in libnccl.
bool is_nccl(const void* return_address);

// The function of this name in the library, whose file name begins so, that the process has loaded;
// null if it has none. CUDA's libraries are often loaded out of the global scope, where dlsym's
// RTLD_NEXT does not look.
void* function_behind(const char* library, const char* name);

}  // namespace torchmig::preload
