#include "fork_hook.h"

#include <pthread.h>

#include "control.h"
#include "torch_sockets.h"

namespace torchmig {

namespace {

void in_child() {
    control_after_fork_in_child();
    torch_sockets_after_fork_in_child();
}

}  // namespace

void install_fork_hook() {
    static const int once = pthread_atfork(nullptr, nullptr, in_child);
    (void)once;
}

}  // namespace torchmig
