"""What this host can do, looked at one thing at a time: the checks behind ``torchmig doctor``.

Each check tries the thing itself where that is harmless, since what the kernel, a container or a
security module allows is not written in one place.
"""

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from torchmig.criu import find_criu, load_pycriu
from torchmig.errors import HostUnfitError
from torchmig.gpu_settings import NEEDED, misfits
from torchmig.units import format_size, version_numbers

OLDEST_KERNEL = (5, 9)  # CAP_CHECKPOINT_RESTORE, clone3 with chosen pids, time namespaces
OLDEST_TORCH = (2, 11)
OLDEST_DRIVER = (570,)  # checkpoints of a process
REMAPPING_DRIVER = (580,)  # restores on other GPUs than before
RDMA_DEVICES = Path("/sys/class/infiniband")  # RoCE's and EFA's too
FEW_FILES = 4096
LITTLE_SPACE_BYTES = 10 * 1024**3
LONGEST_SOCKET_PATH = 107 - len("/agent-4194304.sock")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}
_CAP_IPC_LOCK = 14


class State(Enum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"  # works, with a limit that may hurt
    FAILED = "failed"  # this host cannot checkpoint


@dataclass(frozen=True)
class Check:
    """One line of the table: what was looked at, what was found, what cures it."""

    name: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Where:
    """What the checks look at besides the host itself."""

    criu: str | None
    work_dir: str | None
    runtime_dir: str


def examine(where: Where) -> list[Check]:
    """Run every check and return the outcomes in the order in which they are best read."""
    checks: list[Callable[[Where], Check]] = [
        _kernel,
        _rights,
        _namespaces,
        _ptrace,
        _criu,
        _criu_check,
        _pycriu,
        _torch,
        _extension,
        _autoload,
        _driver,
        _gpu_settings,
        _remote_memory,
        _files_limit,
        _memlock_limit,
        _memory,
        _runtime_dir,
        _work_dir,
    ]
    return [check(where) for check in checks]


def require_fit(where: Where) -> None:
    """Do the checks that cost next to nothing and without which no rank can be dumped.

    Raises:
        HostUnfitError: One of them failed; the message names it and its cure.
    """
    for check in (_kernel, _rights, _namespaces, _ptrace, _criu, _pycriu, _runtime_dir, _work_dir):
        outcome = check(where)
        if outcome.state is State.FAILED:
            raise HostUnfitError(
                f"this host cannot checkpoint: {outcome.name}: {outcome.found}; {outcome.cure}"
            )


def _kernel(_where: Where) -> Check:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    numbers = version_numbers(platform.release())
    if platform.system() != "Linux" or platform.machine() != "x86_64" or numbers < OLDEST_KERNEL:
        return Check("kernel", State.FAILED, found, "use Linux 5.9 or newer on x86-64")
    return Check("kernel", State.OK, found)


def _rights(_where: Where) -> Check:
    if os.geteuid() != 0:
        return Check("rights", State.FAILED, f"user {os.geteuid()}, not root", "run as root")
    effective = _effective_capabilities()
    lacking = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        cure = "start the container privileged"
        return Check("rights", State.FAILED, f"root without {', '.join(lacking)}", cure)
    return Check("rights", State.OK, "root with the capabilities that CRIU needs")


def _namespaces(_where: Where) -> Check:
    # Pids of the ranks are chosen through ns_last_pid, so that a restored pid is free.
    script = "echo 9999 > /proc/sys/kernel/ns_last_pid && sh -c 'echo $$'"
    answer = _try(["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", script])
    if answer.returncode != 0:
        found = _last_line(answer.stderr) or f"unshare ended with {answer.returncode}"
        return Check("namespaces", State.FAILED, found, "run as root, in a container privileged")
    if answer.stdout.strip() != "10000":
        found = f"ns_last_pid is not obeyed: pid {answer.stdout.strip()} for 10000"
        return Check("namespaces", State.FAILED, found, "use a kernel with CHECKPOINT_RESTORE")
    return Check("namespaces", State.OK, "PID namespaces with chosen pids")


def _ptrace(_where: Where) -> Check:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return Check("ptrace", State.OK, "not restricted")
    if scope == "3":
        cure = "boot with kernel.yama.ptrace_scope below 3"
        return Check("ptrace", State.FAILED, "forbidden to everybody (ptrace_scope 3)", cure)
    return Check("ptrace", State.OK, f"ptrace_scope {scope}")


def _criu(where: Where) -> Check:
    try:
        criu = find_criu(where.criu)
    except HostUnfitError as error:
        found, _, cure = str(error).partition("; run ")
        return Check("criu", State.FAILED, found, f"run {cure}")
    found = f"{criu.version} in {criu.path}"
    if not criu.takes_sockets:
        cure = "CRIU 4.2 for scripts with internet sockets of their own, on Linux 6.16 or newer"
        return Check("criu", State.WARNING, found, cure)
    return Check("criu", State.OK, found)


def _criu_check(where: Where) -> Check:
    try:
        criu = find_criu(where.criu)
    except HostUnfitError:
        return Check("criu check", State.FAILED, "there is no CRIU to ask", "see criu")
    answer = _try([str(criu.path), "check"])
    if answer.returncode != 0:
        errors = [line for line in answer.stderr.splitlines() if "Error" in line]
        found = errors[-1] if errors else _last_line(answer.stderr) or "no answer"
        return Check("criu check", State.FAILED, found, f"see '{criu.path} check'")
    return Check("criu check", State.OK, _last_line(answer.stdout) or "looks good")


def _pycriu(where: Where) -> Check:
    try:
        criu = find_criu(where.criu)
    except HostUnfitError:
        return Check("pycriu", State.FAILED, "there is no CRIU whose it could be", "see criu")
    try:
        load_pycriu(criu)
    except HostUnfitError as error:
        found, _, cure = str(error).rpartition("; ")
        return Check("pycriu", State.FAILED, found, cure)
    return Check("pycriu", State.OK, str(criu.pycriu_folder))


def _torch(_where: Where) -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", State.FAILED, "not installed", "install torch 2.11 or newer")
    if version_numbers(version) < OLDEST_TORCH:
        return Check("torch", State.FAILED, version, "install torch 2.11 or newer")
    return Check("torch", State.OK, version)


def _extension(_where: Where) -> Check:
    # In a process of its own: an extension built for another torch may not end in an exception.
    answer = _try([sys.executable, "-c", "import torch, torchmig._C as c; print(c.__file__)"])
    if answer.returncode != 0:
        found = _last_line(answer.stderr) or f"the import ended with {answer.returncode}"
        cure = "run 'make setup', or install torchmig again with --no-build-isolation"
        return Check("extension", State.FAILED, found, cure)
    return Check("extension", State.OK, answer.stdout.strip())


def _autoload(_where: Where) -> Check:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        found = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torchmig out of the ranks"
        return Check("autoload", State.FAILED, found, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    names = [point.name for point in metadata.entry_points(group="torch.backends")]
    if "torchmig" not in names:
        cure = "install torchmig into the Python that runs the job"
        return Check("autoload", State.FAILED, "torch would not load torchmig", cure)
    return Check("autoload", State.OK, "torch loads torchmig in ranks")


def _driver(_where: Where) -> Check:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return Check("driver", State.WARNING, "cannot look", "install nvidia-ml-py")
    except pynvml.NVMLError:
        return Check("driver", State.OK, "no NVIDIA driver: jobs on the CPU only")
    try:
        version = str(pynvml.nvmlSystemGetDriverVersion())
        gpus = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    found = f"{version}, {', '.join(gpus) or 'no GPU'}"
    if version_numbers(version) < OLDEST_DRIVER:
        return Check("driver", State.FAILED, found, "install driver 570 or newer")
    if version_numbers(version) < REMAPPING_DRIVER:
        cure = "install driver 580 or newer to restore on other GPUs"
        return Check("driver", State.WARNING, found, cure)
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        cure = (
            "unset NCCL_CUMEM_ENABLE: without cuMem, ranks in PID namespaces do not find each other"
        )
        return Check("driver", State.WARNING, f"{found}, NCCL_CUMEM_ENABLE=0", cure)
    return Check("driver", State.OK, found)


def _gpu(index: int) -> str:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = f"{pynvml.nvmlDeviceGetName(handle)}"
    return f"GPU {index}: {name}, {format_size(memory.free)} of {format_size(memory.total)} free"


def _gpu_settings(_where: Where) -> Check:
    """Look at what the user has set, which ranks would otherwise be given."""
    if found := misfits(os.environ):
        what = "; ".join(f"{each.setting}: {each.reason}" for each in found)
        cure = ", ".join(each.cure for each in found)
        return Check("gpu settings", State.WARNING, what, cure)
    given = f"ranks are given {', '.join(sorted(NEEDED))} = 0, those of one node NCCL_NET=Socket"
    return Check("gpu settings", State.OK, given)


def remote_memory_devices(environment: Mapping[str, str]) -> list[str]:
    """Return the names of this host's RDMA devices that NCCL would open in this environment.

    It opens all, in its first communicator, and closes none before the process ends: whoever has
    one open cannot be checkpointed.
    """
    is_kept_off = environment.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if is_kept_off or environment.get("NCCL_NET", "").lower() == "socket":
        return []
    return sorted(path.name for path in RDMA_DEVICES.glob("*"))


def _remote_memory(_where: Where) -> Check:
    name = "remote memory"
    devices = remote_memory_devices(os.environ)
    if not devices:
        return Check(name, State.OK, "no InfiniBand, RoCE or EFA that NCCL would use")
    cure = "NCCL_NET=Socket for jobs of several nodes, or they cannot be checkpointed"
    return Check(name, State.WARNING, f"NCCL would use {', '.join(devices)}", cure)


def _files_limit(_where: Where) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        cure = f"raise it: ulimit -n {FEW_FILES}" if hard < 0 or hard >= FEW_FILES else "raise it"
        return Check("open files", State.WARNING, f"at most {soft}", cure)
    return Check("open files", State.OK, f"at most {soft}" if soft >= 0 else "no limit")


def _memlock_limit(_where: Where) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _effective_capabilities() >> _CAP_IPC_LOCK & 1:
        return Check("locked memory", State.OK, "no limit")
    cure = "ulimit -l unlimited, or add CAP_IPC_LOCK: staging is pinned"
    return Check("locked memory", State.WARNING, f"at most {format_size(soft)}", cure)


def _memory(_where: Where) -> Check:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    available = kibibytes["MemAvailable"] * 1024
    found = f"{format_size(available)} of {format_size(kibibytes['MemTotal'] * 1024)} free"
    if available < LITTLE_SPACE_BYTES // 10:
        cure = "free some: a checkpoint needs a job's GPU bytes in host memory"
        return Check("memory", State.WARNING, found, cure)
    return Check("memory", State.OK, found)


def _runtime_dir(where: Where) -> Check:
    name = "runtime folder"
    folder = Path(where.runtime_dir)
    if len(os.fsencode(folder.absolute())) > LONGEST_SOCKET_PATH:
        cure = f"name one of at most {LONGEST_SOCKET_PATH} bytes in TORCHMIG_RUNTIME_DIR"
        return Check(name, State.FAILED, f"'{folder}' is too long for a socket", cure)
    ancestor = _existing(folder)
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        cure = "name a folder that can be written in TORCHMIG_RUNTIME_DIR"
        return Check(name, State.FAILED, f"'{folder}' cannot be made or written", cure)
    return Check(name, State.OK, str(folder))


def _work_dir(where: Where) -> Check:
    name = "work folder"
    folder = Path(where.work_dir or tempfile.gettempdir())
    ancestor = _existing(folder)
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        cure = "name a folder that can be written in TORCHMIG_WORK_DIR"
        return Check(name, State.FAILED, f"'{folder}' cannot be made or written", cure)
    free = shutil.disk_usage(ancestor).free
    found = f"{folder}, {format_size(free)} free"
    if free < LITTLE_SPACE_BYTES:
        cure = "name one with more space in TORCHMIG_WORK_DIR: a job's host memory goes there"
        return Check(name, State.WARNING, found, cure)
    return Check(name, State.OK, found)


def available_bytes() -> int:
    """Return how much memory this host, or the container that we are in, has left."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is none, or it has no limit
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        available = min(available, limit - used)
    if available <= 0:
        raise HostUnfitError("cannot find out how much memory is available; name --staging")
    return available


def _existing(folder: Path) -> Path:
    """Return the nearest folder above, or the folder itself, that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _try(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program that may be missing or hang; both count as failed."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
