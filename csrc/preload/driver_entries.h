// The driver functions that expandable segments are made of, served from the arena.
#pragma once

namespace torchmig::preload {

// What to hand to libc10_cuda, which asks the CUDA runtime for driver functions by name: `real`
// itself, or a function of ours that uses the arena and calls `real` for what is not its own.
void* driver_entry(const char* name, void* real);

}  // namespace torchmig::preload
