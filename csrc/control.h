// The control thread: takes the agent's requests, also while Python is busy.
//
// Lines of text over a unix stream socket. From the agent:
//   order <request> <serial> <level> <final> <n>   followed by n lines "<key> <target>"
//   release
//   call <number> <name> <json>   runs torchmig.worker.phases.<name>(json) with the GIL
//   detach                 the rank closes the socket and tries to connect again until it can
// To the agent, one JSON object a line: hello, report, result, error, ended.
#pragma once

#include <string>

namespace torchmig {

// Connects to the agent and starts the thread. `signal_number` interrupts the main thread at
// level "any"; its Python handler calls Gate::python_point.
void start_control(const std::string& socket_path, int rank, int world_size, int signal_number);

// The interpreter is about to end: no Python from here on.
void control_ended();

void control_after_fork_in_child();

}  // namespace torchmig
