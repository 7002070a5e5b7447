// The one arena of this process, and what the hooks noticed.
#pragma once

#include <string>

#include "../arena.h"
#include "../arena_abi.h"

namespace torchmig::preload {

// Null where there is none: switched off by TORCHMIG_NO_ARENA, or no driver.
Arena* live_arena();

// Whether the agent has set this variable for the ranks: it writes what the user has said in
// whatever spelling as 1 or leaves it out.
bool switched_on(const char* variable);

void note(Seen what);
void note_back(Seen what);

}  // namespace torchmig::preload
