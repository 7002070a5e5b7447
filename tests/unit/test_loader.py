"""The process that brings a snapshot, and what it begins with before torch is there."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from arriving import digests, take
from waiting import wait_until

from torchmig.agent import entry, workfolders
from torchmig.agent.loader import Loader, Request
from torchmig.capture.device.blocks import place, to_state
from torchmig.capture.device.windows import Block
from torchmig.errors import ExitCode, HostUnfitError, IntegrityError, TorchmigError
from torchmig.progress import make_progress
from torchmig.repo import Depot, JobName, Kind, Manifest, RankSection, Repository

PROGRAM = Path(sys.executable).with_name("torchmig-run")
MIB = 1 << 20
SIZES = (30 * MIB, 5, 50 * MIB)
IMAGE = "core-1.img"
QUIET = make_progress(as_json=False, quiet=True)


def image(rank):
    return random.Random(rank).randbytes(40 * MIB)


def packs(folder):
    """Return the packs, but for the small ones of trees."""
    files = (path for path in (folder / "data").rglob("*") if path.is_file())
    return [path for path in files if path.stat().st_size > MIB]


def packs_of(folder, job, name):
    with Repository.open(str(folder)) as repository:
        manifest = repository.load("latest", job)
        (stream,) = (stream for stream in manifest.streams if stream.name == name)
        with repository.reader() as reader:
            ids = {reader.locate(stream, row).pack_id.hex() for row in reader.rows(stream)}
    return {path for path in packs(folder) if path.name in ids}


def write(repository, name, kind, parts):
    with repository.writer() as writer:  # one for each stream, and so packs of its own
        stream = writer.stream(name, kind)
        for offset, data in parts:
            stream.write(offset, data)
        return stream.close()


def commit(repository, job, nodes, noise):
    """Commit two ranks, each with GPU blocks and pages; return what the blocks hold."""
    contents, sections = [], []
    blocks = [Block(0, number << 32, size) for number, size in enumerate(SIZES)]
    for rank, node in enumerate(nodes):
        data = [noise.randbytes(size) for size in SIZES]
        parts = [
            (placed.stream_offset, part) for placed, part in zip(place(blocks), data, strict=True)
        ]
        streams = [
            write(repository, f"rank-{rank}/gpu/0", Kind.GPU_BLOCK, parts),
            write(repository, f"rank-{rank}/images/{IMAGE}", Kind.CRIU_IMAGE, [(0, image(rank))]),
        ]
        state = {"gpu": {"facts": {"devices": [{}]}, "blocks": to_state(blocks)}}
        sections.append(RankSection(rank, node, 1, streams, state))
        contents.append(data)
    hosts = {node: [r for r, other in enumerate(nodes) if other == node] for node in nodes}
    repository.commit(
        Manifest(
            JobName(job),
            "suspend",
            nodes=[{"node": 0, "host": host, "ranks": ranks} for host, ranks in hosts.items()],
            ranks=sections,
        )
    )
    return contents


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Jobs "one", of one host, and "two", of the hosts "here" and "there"."""
    folder = tmp_path_factory.mktemp("loader") / "repo"
    noise = random.Random(1)
    with Repository.open(str(folder), create=True) as repository:
        one = commit(repository, "one", ("here", "here"), noise)
        commit(repository, "two", ("here", "there"), noise)
    return folder, one


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made[0].parent)
    return made[0]


def load(folder, reference="latest", job="one", work=None, **options):
    options = {"ranks": None, "host": "here", "staging_bytes": None, **options}
    return Loader(Request(Depot(str(folder)).to_dict(), reference, job, **options), work)


def manifest_of(folder, job="one"):
    with Repository.open(str(folder)) as repository:
        return repository.load("latest", job)


def take_all(loaded):
    """Return the hashes of a rank's blocks."""
    return take(loaded.arrivals, loaded.staging, SIZES)


def ended(pid):
    try:
        return Path("/proc", str(pid), "stat").read_text().split()[2] == "Z"
    except OSError:  # it may go between a look and the reading
        return True


@pytest.mark.parametrize("staging_bytes", [None, 128 * MIB])
def test_all_arrives_and_the_process_ends(made, staging_bytes):
    folder, contents = made
    manifest = manifest_of(folder)
    loader = load(folder, staging_bytes=staging_bytes)
    loaded = loader.loaded(manifest, manifest.ranks, QUIET)
    # The second rank takes nothing before the first one has all.
    assert [take_all(loaded[rank]) for rank in (0, 1)] == list(map(digests, contents))
    if staging_bytes is not None:
        assert all(each.staging.size_bytes <= staging_bytes // 2 for each in loaded.values())
    wait_until(lambda: ended(loader.pid))
    for each in loaded.values():
        each.staging.close()


def forks_of(pid):
    """Return the processes that a loader has made, once there are some."""
    children = Path("/proc", str(pid), "task", str(pid), "children")
    wait_until(lambda: children.read_text().split())
    return [int(child) for child in children.read_text().split()]


def test_a_process_of_it_that_ends_is_missed(folder):
    manifest = manifest_of(folder)
    loader = load(folder, staging_bytes=128 * MIB)
    loaded = loader.loaded(manifest, manifest.ranks, QUIET)
    for pid in forks_of(loader.pid):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(TorchmigError, match="GPU memory into staging has ended with -9"):
        take_all(loaded[0])
    loader.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_its_processes_end_with_it(folder, number):
    """Even those that nobody can tell anything any more, as staging would stay with them."""
    manifest = manifest_of(folder)
    loader = load(folder, staging_bytes=128 * MIB)
    loader.loaded(manifest, manifest.ranks, QUIET)
    pids = forks_of(loader.pid)
    os.kill(loader.pid, number)
    loader.close()
    wait_until(lambda: all(map(ended, pids)))


def test_a_rank_that_gives_up_does_not_hold_the_other_one_up(made):
    folder, contents = made
    manifest = manifest_of(folder)
    loaded = load(folder, staging_bytes=128 * MIB).loaded(manifest, manifest.ranks, QUIET)
    loaded[0].arrivals.close()
    assert take_all(loaded[1]) == digests(contents[1])
    for each in loaded.values():
        each.staging.close()


def test_another_snapshot_or_other_ranks_are_told_apart(folder):
    manifest = manifest_of(folder)
    for loader in (load(folder, job="two"), load(folder, ranks=[0])):
        with pytest.raises(LookupError):
            loader.loaded(manifest, manifest.ranks, QUIET)
        loader.close()
        wait_until(lambda pid=loader.pid: ended(pid))


def test_of_several_hosts_ones_own_ranks_are_loaded(folder):
    manifest = manifest_of(folder, "two")
    for host, rank in (("here", 0), ("there", 1)):
        loader = load(folder, job="two", host=host)
        assert set(loader.loaded(manifest, [manifest.ranks[rank]], QUIET)) == {rank}
        loader.close()
    with pytest.raises(LookupError):
        load(folder, job="two", host="elsewhere").loaded(manifest, manifest.ranks, QUIET)


def test_what_goes_wrong_there_is_raised_here(folder, tmp_path):
    manifest = manifest_of(folder)
    with pytest.raises(HostUnfitError, match=r"staging can have 16\.000 MiB"):
        load(folder, staging_bytes=32 * MIB).loaded(manifest, manifest.ranks, QUIET)
    with pytest.raises(TorchmigError, match="there is no snapshot 'none'"):
        load(folder, reference="none").loaded(manifest, manifest.ranks, QUIET)

    loader = load(folder, staging_bytes=128 * MIB)
    loaded = loader.loaded(manifest, manifest.ranks, QUIET)
    os.kill(loader.pid, signal.SIGKILL)
    with pytest.raises(TorchmigError, match="that brings the snapshot has ended with -9"):
        take_all(loaded[0])

    damaged = damage(folder, tmp_path / "repo", "rank-1/gpu/0")
    loader = load(damaged)
    loaded = loader.loaded(manifest, manifest.ranks, QUIET)
    with pytest.raises(IntegrityError, match=r"'rank-1/gpu/0' of snapshot .* is damaged"):
        take_all(loaded[1])
    loader.close()


def damage(folder, copy, stream):
    """Return a copy of a repository in which a stream of job "one" is damaged."""
    subprocess.run(["cp", "-a", folder, copy], check=True)
    for path in packs_of(copy, "one", stream):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    return copy


@pytest.fixture
def work(tmp_path):
    return workfolders.make(str(tmp_path / "work"))


@pytest.mark.criu
def test_images_come_and_go_with_their_folder(folder, work):
    manifest = manifest_of(folder)
    loader = load(folder, work=work)
    loaded = loader.loaded(manifest, manifest.ranks, QUIET)
    counts = []
    loader.wait_images(counts.append)
    for rank in (0, 1):
        assert (work.path / str(rank) / IMAGE).read_bytes() == image(rank)
    assert sum(counts) == 2 * 40 * MIB
    assert len(counts) < 10  # each is a system call here and there
    for each in loaded.values():
        each.arrivals.close()
        each.staging.close()
    wait_until(lambda: ended(loader.pid))
    assert not work.path.exists()


@pytest.mark.criu
def test_what_goes_wrong_with_images_is_raised_and_the_folder_removed(folder, tmp_path, work):
    manifest = manifest_of(folder)

    def fails(loader, message):
        loader.loaded(manifest, manifest.ranks, QUIET)
        with pytest.raises(TorchmigError, match=message):
            loader.wait_images(lambda size: None)
        loader.close()
        assert not work.path.exists()
        work.path.mkdir(mode=0o700)

    damaged = damage(folder, tmp_path / "repo", f"rank-1/images/{IMAGE}")
    fails(load(damaged, work=work), f"'rank-1/images/{IMAGE}' of snapshot .* is damaged")
    fails(load(folder, work=work, criu="/no/criu"), "cannot use CRIU: '/no/criu' does not start")
    (work.path / "0").write_text("in the way")
    fails(load(folder, work=work), "File exists")


@pytest.mark.criu
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_is_left_of_images_that_are_broken_off(folder, work, number):
    manifest = manifest_of(folder)
    loader = load(folder, work=work)
    loader.loaded(manifest, manifest.ranks, QUIET)
    os.kill(loader.pid, number)
    if number == signal.SIGKILL:
        wait_until(lambda: ended(loader.pid))
    loader.close()
    assert ended(loader.pid)
    assert not work.path.exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "is_loaded"),
    [
        (["--restore=latest", "--job=one", "--repo=repo"], {}, True),
        (["--nproc-per-node", "2", "--repo", "repo", "--restore", "latest", "--job=one"], {}, True),
        (["--restore=latest"], {"TORCHMIG_REPO": "repo", "TORCHMIG_JOB": "one"}, True),
        (["--repo=repo", "train.py"], {}, False),
    ],
)
def test_what_the_command_line_asks_for(
    folder, tmp_path, monkeypatch, arguments, environment, is_loaded
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    work = tmp_path / "work"
    loader = entry.start_loader([f"--work-dir={work}", *arguments])
    assert (loader is not None) is is_loaded
    assert work.exists() is is_loaded
    if loader is not None:
        manifest = manifest_of(folder)
        assert set(loader.loaded(manifest, manifest.ranks, QUIET)) == {0, 1}
        assert loader.work.path.parent == work
        loader.close()
        assert list(work.iterdir()) == []


def test_bad_arguments_are_the_programs_to_refuse(tmp_path):
    command = [PROGRAM, f"--work-dir={tmp_path}"]
    for bad in (["--restore"], ["--restore=x", "--staging=much"], ["--restore=x", "--repo="]):
        done = subprocess.run([*command, *bad], capture_output=True, text=True, check=False)
        assert done.returncode != ExitCode.OK
        assert "Traceback" not in done.stderr
        assert done.stderr.count("torchmig-run: ") == 1, done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_is_told_to_end_before_it_has_begun(folder, tmp_path, number):
    work = tmp_path / "work"
    command = [PROGRAM, f"--work-dir={work}", "--repo=repo", "--job=one", "--restore=latest"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: list(work.glob("*/0")))  # the images of rank 0 are on their way
        process.send_signal(number)
        assert process.wait(60) in (128 + number, -number)
    assert list(work.iterdir()) == []


def test_a_scripts_own_restore_option_is_not_ours(folder, tmp_path):
    """What was begun for it is over by the time the script runs."""
    work = tmp_path / "work"
    script = tmp_path / "script.py"
    script.write_text(f"import os; print(os.listdir({str(work)!r}))")
    options = [f"--work-dir={work}", f"--runtime-dir={tmp_path}/run", "--repo=repo", "--job=one"]
    command = [PROGRAM, *options, "--nproc-per-node=1", script, "--restore=latest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.OK, "[]\n"), done.stderr


def test_it_begins_without_torch_and_ends_with_its_agent(folder):
    code = (
        "import os, sys\n"
        "from torchmig.agent import entry\n"
        "loader = entry.start_loader(['--restore=latest', '--job=one', '--staging=128M',"
        " '--repo=repo'])\n"
        "header, fds = loader._next()\n"
        "print('torch' in sys.modules, 'libtorch' in open(f'/proc/{loader.pid}/maps').read())\n"
        "print(loader.pid, flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, pid = done.stdout.split("\n")[:2]
    assert loaded == "False False"
    wait_until(lambda: ended(pid))
