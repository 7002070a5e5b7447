"""What a restore will read lies in the page cache before torch is there."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchmig.agent import entry
from torchmig.errors import ExitCode
from torchmig.repo import JobName, Kind, Manifest, RankSection, Repository
from torchmig.repo.readahead import read_ahead

MIB = 1 << 20


def in_memory(path):
    """Return whether a pack lies in the page cache, but for the header at its end."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return os.preadv(file.fileno(), [bytearray(size)], 0, os.RWF_NOWAIT) > size - MIB // 8
        except BlockingIOError:
            return False
        except OSError as error:
            pytest.skip(f"the file system of '{path}' does not say what is in memory: {error}")


def forget(folder):
    for path in packs(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def packs(folder):
    """Return the packs, but for the small ones of trees."""
    files = (path for path in (folder / "data").rglob("*") if path.is_file())
    return [path for path in files if path.stat().st_size > MIB]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Snapshots of jobs "one" and "two", each with GPU blocks and pages, on a disk.

    Both lie in ranks of their own, those of "two" were on two hosts.
    """
    folder = tmp_path / "repo"
    noise = random.Random(1)
    with Repository.open(str(folder), create=True) as repository:
        for job, hosts in (("one", ("here", "here")), ("two", ("here", "there"))):
            streams = []
            for name, kind in (("gpu/0", Kind.GPU_BLOCK), ("pages", Kind.HOST_PAGES)):
                with repository.writer() as writer:  # one each, and so packs of its own
                    stream = writer.stream(f"rank-0/{name}", kind)
                    stream.write(0, noise.randbytes(24 * MIB))
                    streams.append(stream.close())
            sections = [
                RankSection(rank, host, 1, [stream])
                for rank, (host, stream) in enumerate(zip(hosts, streams, strict=True))
            ]
            repository.commit(Manifest(JobName(job), "suspend", ranks=sections))
    forget(folder)
    if all(map(in_memory, packs(folder))):
        pytest.skip(f"'{folder}' is on no disk")
    monkeypatch.chdir(tmp_path)
    return folder


def packs_of_stream(folder, job, number):
    with Repository.open(str(folder)) as repository:
        stream = repository.load("latest", job).streams[number]
        with repository.reader() as reader:
            ids = {reader.locate(stream, row).pack_id.hex() for row in reader.rows(stream)}
    return {path for path in packs(folder) if path.name in ids}


def test_all_of_the_snapshot_is_read_and_nothing_else(repository):
    blocks, pages = (packs_of_stream(repository, "one", number) for number in range(2))
    forget(repository)
    read_ahead(str(repository), "latest", "one", "elsewhere", 1 << 30)
    assert all(map(in_memory, blocks | pages))
    assert not any(map(in_memory, set(packs(repository)) - blocks - pages))


def test_of_several_hosts_ones_own_ranks_are_read(repository):
    here, there = (packs_of_stream(repository, "two", number) for number in range(2))
    forget(repository)
    read_ahead(str(repository), "latest", "two", "there", 1 << 30)
    assert all(map(in_memory, there))
    assert not any(map(in_memory, here - there))
    read_ahead(str(repository), "latest", "two", "elsewhere", 1 << 30)
    assert not any(map(in_memory, here - there))


def test_processes_come_first_and_memory_is_left(repository):
    blocks, pages = (packs_of_stream(repository, "one", number) for number in range(2))
    forget(repository)
    read_ahead(str(repository), "latest", "one", "here", 25 * MIB)
    assert all(map(in_memory, pages))
    assert not all(map(in_memory, blocks))


@pytest.mark.parametrize(
    ("arguments", "environment", "is_read"),
    [
        (["--restore=latest", "--job=one", "--repo=repo"], {}, True),
        (["--nproc-per-node", "2", "--repo", "repo", "--restore", "latest", "--job=one"], {}, True),
        (["--restore=latest"], {"TORCHMIG_REPO": "repo", "TORCHMIG_JOB": "one"}, True),
        (["--repo=repo", "train.py"], {}, False),
        (["--restore=nothing", "--repo=repo"], {}, False),
        (["--restore=latest", "--repo=elsewhere"], {}, False),
        (["--restore=latest", "--repo=s3://bucket/prefix"], {}, False),
    ],
)
def test_what_the_command_line_asks_for(repository, monkeypatch, arguments, environment, is_read):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    wanted = packs_of_stream(repository, "one", 0)
    forget(repository)
    entry.read_ahead(arguments)
    for process in started:
        assert process.wait(60) == 0
    assert all(map(in_memory, wanted)) is is_read


def test_it_ends_with_its_starter(repository):
    code = (
        "import os, subprocess, sys; from torchmig.agent import entry;"
        "start = subprocess.Popen.__init__\n"
        "def slow(self, words, **options):\n"
        "    words[:4] = [sys.executable, '-P', '-c', 'import time; from torchmig.repo import '\n"
        "        'readahead as r; r.read_ahead = lambda *_: time.sleep(100); r.main()']\n"
        "    start(self, words, **options); print(self.pid, flush=True)\n"
        "subprocess.Popen.__init__ = slow\n"
        "entry.read_ahead(['--restore=latest', '--repo=repo'])\n"
        "os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gone = Path("/proc", done.stdout.strip())
    deadline = time.monotonic() + 30
    while gone.exists() and "Z" not in gone.joinpath("stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_bad_arguments_are_the_programs_to_refuse():
    command = [sys.executable, "-c", "from torchmig.agent.entry import main; main()"]
    for bad in (["--restore"], ["--restore=x", "--staging=much"], ["--restore=x", "--repo="]):
        done = subprocess.run([*command, *bad], capture_output=True, text=True, check=False)
        assert done.returncode != ExitCode.OK
        assert "Traceback" not in done.stderr
        assert done.stderr.count("torchmig-run: ") == 1, done.stderr


def test_torch_is_not_there_yet():
    code = (
        "import sys; from torchmig.agent import entry; entry.read_ahead(['--restore=latest']);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
