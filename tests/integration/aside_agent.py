"""torchmig-run whose images go through processes of their own, however few bytes and cores.

Each of them is killed as soon as it has its request while the file that FAULT names exists, and
stopped there while that file says so.
"""

import os
import signal
import sys
from pathlib import Path

from torchmig.agent.main import main
from torchmig.capture.process import aside

FAULT = Path(os.environ["FAULT"])
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Popen(aside.subprocess.Popen):
    def __init__(self, args, **options):
        super().__init__(args, **options)
        if aside.__name__ in args and FAULT.exists():
            self.send_signal(SIGNALS[FAULT.read_text()])


aside.SMALLEST_BYTES = 0
aside.FEWEST_CORES = 1
aside.subprocess.Popen = Popen

sys.exit(main())
