// What a forked child of a rank (a DataLoader worker, say) must give up.
#pragma once

namespace torchmig {

// From now on, children drop torch's sockets and have no gate and no control thread. Once a
// process.
void install_fork_hook();

}  // namespace torchmig
