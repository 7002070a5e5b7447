"""The thin part of torchmig inside a rank.

Only the standard library, torch and the extension are imported here: whatever else a rank holds at
the cut would be dumped with it.
"""

import os

SOCKET = "TORCHMIG_RANK_SOCKET"
PID = "TORCHMIG_RANK_PID"


def autoload() -> None:
    """Enter the process that torchmig-run started; anywhere else return at once.

    torch calls this at the end of its import through the entry point group ``torch.backends``.
    """
    socket_path = os.environ.get(SOCKET)
    # The variables are inherited by what the script starts; only the rank itself is a rank.
    if socket_path is None or os.environ.get(PID) != str(os.getpid()):
        return
    from torchmig.worker import entry

    entry.enter(socket_path)
