// Which sockets of this process are torch's own: the store's and gloo's.
//
// Forked children must not keep them (a child that holds a connected TCP socket cannot be dumped),
// and what a destroyed backend leaves open must be closed before a dump. A user's sockets stay.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torchmig {

// Everything that a piece of code opens or starts is found by looking before and after it.
struct ProcessView {
    std::vector<uint64_t> sockets;  // inode numbers
    std::vector<int> epolls;        // file descriptors
    std::vector<int> threads;       // thread ids

    static ProcessView now();
};

// Remembers what is in `after` and not in `before` as torch's, but for the sockets in `others`.
void remember_torch(const ProcessView& before,
                    const ProcessView& after,
                    const std::vector<uint64_t>& others);

// Remembers every socket that torch's epolls watch now (pairs that were connected later).
void remember_watched();

// Inode numbers of torch's sockets.
std::vector<uint64_t> torch_socket_inodes();

// Torch's sockets that are still open: file descriptors.
std::vector<int> open_torch_sockets();

// Puts a silent eventfd in the place of each socket that torch's epolls watch, and keeps the
// connections open elsewhere until `neutralise_torch_sockets`. After this no backend hears of the
// end of a connection: gloo, which would take the descriptor out of its epoll on a thread of its
// own, aborts the process where it is not there any more. To be called while nothing moves, on all
// ranks before the first of them closes anything.
void mute_torch_sockets();

// Closes what `mute_torch_sockets` has kept, and puts a silent eventfd in the place of each of
// torch's sockets that is still open, so that finished Works which a script still holds keep their
// descriptors but no connection. Returns how many.
int neutralise_torch_sockets();

// Why something of torch's may be moving: a connection has bytes under way or has moved some since
// the last call, or a thread is not asleep. Empty if nothing is; two rounds of that from all ranks
// mean that nothing moves.
std::string what_moves();

// Closes torch's sockets and epolls; for the child after a fork.
void torch_sockets_after_fork_in_child();

}  // namespace torchmig
