// The one arena of this process, and what the hooks noticed.
#pragma once

#include <string>

#include "../arena.h"
#include "../arena_abi.h"

namespace torchmig::preload {

// Null where there is none: switched off by TORCHMIG_NO_ARENA, or no driver.
Arena* live_arena();

void note(Seen what);
void note_back(Seen what);

}  // namespace torchmig::preload
