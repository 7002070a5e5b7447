"""Damage anywhere in a repository is found and named, and bad places are said to be so."""

import os
import random
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from torchmig.errors import IntegrityError, StoreError, TorchmigError
from torchmig.repo import JobName, Manifest, RankSection, Repository
from torchmig.repo.check import Checker, Subset

MIB = 1 << 20


def save(repo, seed=1):
    rng = random.Random(seed)
    with repo.writer() as writer:
        streams = []
        for name, kind, content in (
            ("pages", "host-pages", rng.randbytes(MIB) + b"words " * 100_000),
            ("gpu", "gpu-block", rng.randbytes(2 * MIB)),
            ("file", "file", b"a small file"),
        ):
            stream = writer.stream(name, kind)
            stream.write(0, content)
            streams.append(stream.close())
    return repo.commit(Manifest(JobName("j"), "suspend", ranks=[RankSection(0, "n", 1, streams)]))


def restore_all(folder):
    repo = Repository.open(str(folder))
    for snapshot_id in repo.snapshot_ids():
        snapshot = repo.load(snapshot_id)
        with repo.reader() as reader:
            reader.verify(snapshot.streams)


@pytest.fixture
def folder(tmp_path):
    save(Repository.open(str(tmp_path / "repo"), create=True))
    return tmp_path / "repo"


def objects(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_in_any_object_is_found(folder):
    """Every object, at its ends and at random places."""
    (snapshot_id,) = Repository.open(str(folder)).snapshot_ids()
    rng = random.Random(1)
    paths = objects(folder)
    assert {path.relative_to(folder).parts[0] for path in paths} == {
        *("config", "data", "index", "snapshots"),
    }
    for path in paths:
        good = path.read_bytes()
        places = {0, 1, len(good) - 1, len(good) - 5, len(good) - 13}
        places |= {rng.randrange(len(good)) for _ in range(12)}
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            name = path.relative_to(folder).as_posix()
            try:
                report = Checker(Repository.open(str(folder))).run(Subset())
                found = [str(problem) for problem in report.problems]
            except TorchmigError as error:  # the config: nothing can be opened
                assert name == "config"
                found = [str(error) + " 'config'"]
            assert any(path.name[:8] in text for text in found), (name, place)
            header = 42 * 100
            if "data" not in path.parts or place < len(good) - 12 - header:
                with pytest.raises(TorchmigError) as caught:
                    restore_all(folder)
                assert path.name[:8] in str(caught.value)
                if path.parent.name != "index" and name != "config":
                    assert snapshot_id[:8] in str(caught.value)
        path.write_bytes(good)
    restore_all(folder)


def test_mutated_packs_and_indexes_never_crash(folder):
    """Cut short, spliced, exchanged: a clear error each, in bounded memory."""
    rng = random.Random(2)
    paths = [p for p in objects(folder) if p.parent.name == "index" or "data" in p.parts]
    originals = {path: path.read_bytes() for path in paths}
    tracemalloc.start()
    found, messages = 0, []
    for number in range(400):
        path = rng.choice(paths)
        good = originals[path]
        how = number % 4
        if how == 0:
            bad = good[: rng.randrange(len(good))]
        elif how == 1:
            at = rng.randrange(len(good))
            bad = good[:at] + rng.randbytes(rng.randint(1, 100)) + good[at:]
        elif how == 2:
            bad = originals[rng.choice([p for p in paths if p != path])]
        else:
            bad = rng.randbytes(rng.randrange(1, 5000))
        path.write_bytes(bad)
        report = Checker(Repository.open(str(folder))).run(Subset())
        found += bool(report.problems)
        try:
            restore_all(folder)
        except IntegrityError as error:
            messages.append(str(error))
        path.write_bytes(good)
    assert tracemalloc.get_traced_memory()[1] < 400 << 20
    tracemalloc.stop()
    assert found == 400
    assert all("damaged" in message or "no index" in message for message in messages)
    restore_all(folder)


def test_a_missing_object_is_found(folder):
    for path in objects(folder):
        if path.name == "config" or path.parent.name == "snapshots":
            continue
        good = path.read_bytes()
        path.unlink()
        assert Checker(Repository.open(str(folder))).run().problems
        with pytest.raises(IntegrityError):
            restore_all(folder)
        path.write_bytes(good)
    restore_all(folder)


def test_files_that_are_not_ours_are_noted(folder):
    (folder / "notes.txt").write_text("hello")
    report = Checker(Repository.open(str(folder))).run(Subset())
    assert report.problems == []
    assert report.unused_objects == ["notes.txt"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(place)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(small_disk):
    """The upload fails with one sentence, and what was committed before is still whole."""
    repo = Repository.open(str(small_disk / "repo"), create=True)
    first = save(repo)

    def fill():
        for seed in range(2, 9):
            save(repo, seed)

    with pytest.raises(StoreError, match=r"no space left.*free space"):
        fill()
    after = Repository.open(str(small_disk / "repo"))
    assert first in after.snapshot_ids()
    assert Checker(after).run(Subset()).problems == []
    for snapshot_id in after.snapshot_ids()[1:]:
        after.forget(snapshot_id)
    shutil.rmtree(small_disk / "repo" / "tmp")  # a full disk leaves nothing here anyway
    restore_all(small_disk / "repo")


def test_a_read_only_place(small_disk):
    """Reading goes on; writing is refused with one sentence."""
    repo = Repository.open(str(small_disk / "repo"), create=True)
    snapshot_id = save(repo)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    fresh = Repository.open(str(small_disk / "repo"))
    assert [summary.id for summary in fresh.snapshots()] == [snapshot_id]
    restore_all(small_disk / "repo")
    assert Checker(fresh).run(Subset()).problems == []
    with pytest.raises(StoreError, match="read-only"):
        save(fresh, 2)
    with pytest.raises(StoreError, match="read-only"):
        Repository.open(str(small_disk / "other"), create=True)


def test_a_place_without_rights(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="may not write"):
        Repository.open(str(Path(tmp_path / "closed" / "repo")), create=True)
