"""What a restore will read lies in the page cache before torch is there."""

import os
import random
import subprocess
import sys

import pytest

from torchmig.agent import entry
from torchmig.errors import ExitCode
from torchmig.repo import JobName, Kind, Manifest, RankSection, Repository
from torchmig.repo.readahead import ReadAhead

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
    return [path for path in (folder / "data").rglob("*") if path.is_file()]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two snapshots of jobs "one" and "two", each with a process and GPU blocks, on a disk."""
    folder = tmp_path / "repo"
    noise = random.Random(1)
    with Repository.open(str(folder), create=True) as repository:
        for job in ("one", "two"):
            with repository.writer() as writer:
                streams = []
                for name, kind in (("gpu/0", Kind.GPU_BLOCK), ("pages", Kind.HOST_PAGES)):
                    stream = writer.stream(f"rank-0/{name}", kind)
                    stream.write(0, noise.randbytes(24 * MIB))
                    streams.append(stream.close())
            sections = [RankSection(0, "host", 1, streams)]
            repository.commit(Manifest(JobName(job), "suspend", ranks=sections))
    forget(folder)
    if all(map(in_memory, packs(folder))):
        pytest.skip(f"'{folder}' is on no disk")
    monkeypatch.chdir(tmp_path)
    return folder


def packs_of(folder, job):
    with Repository.open(str(folder)) as repository:
        manifest = repository.load("latest", job)
        with repository.reader(manifest) as reader:
            ids = {
                reader.locate(stream, row).pack_id.hex()
                for stream in manifest.streams
                for row in reader.rows(stream)
            }
    return {path for path in packs(folder) if path.name in ids}


def test_all_of_the_snapshot_is_read_and_nothing_else(repository):
    wanted = packs_of(repository, "one")
    forget(repository)
    ahead = ReadAhead(str(repository), "latest", "one", 1 << 30)
    ahead.start()
    ahead.join()
    assert all(map(in_memory, wanted))
    assert not any(map(in_memory, packs_of(repository, "two") - wanted))


def test_processes_come_first_and_memory_is_left(repository):
    ahead = ReadAhead(str(repository), "latest", "one", 25 * MIB)
    ahead.start()
    ahead.join()
    with Repository.open(str(repository)) as opened:
        manifest = opened.load("latest", "one")
        with opened.reader(manifest) as reader:
            blocks, pages = (
                {reader.locate(stream, row).pack_id.hex() for row in reader.rows(stream)}
                for stream in manifest.streams
            )
    paths = {path.name: path for path in packs(repository)}
    assert all(in_memory(paths[name]) for name in pages - blocks)
    assert not all(in_memory(paths[name]) for name in blocks)


@pytest.mark.parametrize(
    ("arguments", "environment", "is_read"),
    [
        (["--restore=latest", "--job=two", "--repo=repo"], {}, True),
        (["--nproc-per-node", "2", "--repo", "repo", "--restore", "latest"], {}, True),
        (["--restore=latest"], {"TORCHMIG_REPO": "repo"}, True),
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
    original = ReadAhead.start
    monkeypatch.setattr(ReadAhead, "start", lambda self: (started.append(self), original(self)))
    wanted = packs_of(repository, "two")
    forget(repository)
    entry.read_ahead(arguments)
    for thread in started:
        thread.join()
    assert all(map(in_memory, wanted)) is is_read


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
