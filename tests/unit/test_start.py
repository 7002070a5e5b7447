"""Ranks that cannot be started leave nothing behind."""

from pathlib import Path

import pytest

from torchmig.agent.claims import claim
from torchmig.agent.ranks import RankFolder
from torchmig.agent.start import RankPlan, ScriptStarter, SnapshotStarter
from torchmig.errors import RepositoryLockedError
from torchmig.progress import make_progress
from torchmig.repo import Depot, JobName, Manifest, RankSection


def plan(rank):
    return RankPlan(rank, rank, ["true"], {}, "", "", "")


def is_free(folder):
    taken = claim(folder)
    if taken is not None:
        taken.release()
    return taken is not None


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.criu
def test_a_rank_whose_socket_has_no_room_gives_its_folder_up(tmp_path):
    folder = tmp_path / ("x" * 120)
    starter = ScriptStarter(folder, lambda report: None, lambda rank: None)
    before = open_descriptors()
    with pytest.raises(OSError, match="path too long"):
        starter.start([plan(0)])
    assert is_free(folder / "rank-0")
    assert open_descriptors() == before


def test_a_rank_folder_that_is_taken_leaves_the_others_free(tmp_path):
    sections = [
        RankSection(rank, "here", 10000, [], {"folder": str(tmp_path / f"rank-{rank}")})
        for rank in range(3)
    ]
    manifest = Manifest(JobName("job", "1"), "suspend", ranks=sections)
    taken = RankFolder(tmp_path / "rank-2").claim()
    starter = SnapshotStarter(
        Depot(str(tmp_path / "repo")),
        manifest,
        None,
        None,
        make_progress(False, True),
        lambda report: None,
        lambda rank: None,
    )
    before = open_descriptors()
    with pytest.raises(RepositoryLockedError, match="runs here already"):
        starter.start([plan(rank) for rank in range(3)])
    assert is_free(tmp_path / "rank-0")
    assert is_free(tmp_path / "rank-1")
    assert open_descriptors() == before
    taken.release()
