"""What an agent knows of its ranks before it asks them anything."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from torchmig.agent.node import dumped_bytes

MIB = 1 << 20
JOB = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 100 << 20, access=mmap.ACCESS_READ)
    sum(mapped[::4096])
own = bytearray(b"1") * (40 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_that_is_only_a_files_needs_no_room():
    # A file of 100 MiB and more that lies on a disk: those of a tmpfs count as shared memory.
    library = Path(find_spec("torch").origin).with_name("lib") / "libtorch_cpu.so"
    with subprocess.Popen(
        [sys.executable, "-c", JOB, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as job:
        assert job.stdout.readline() == b"ready\n"
        assert 40 * MIB <= dumped_bytes(job.pid) < 100 * MIB
        job.stdin.close()
    assert dumped_bytes(job.pid) == 0
