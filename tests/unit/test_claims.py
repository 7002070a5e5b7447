import subprocess
import sys

import pytest

from torchmig.agent.claims import claim, remove_unclaimed


def test_a_folder_is_claimed_once_until_it_is_released(tmp_path):
    first = claim(tmp_path)
    assert first is not None
    assert claim(tmp_path) is None
    first.release()
    first.release()
    assert first.released
    again = claim(tmp_path)
    assert again is not None
    again.release()


def test_a_claim_ends_with_the_process_that_holds_it(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from torchmig.agent.claims import claim
held = claim(Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        remove_unclaimed(tmp_path)
        assert tmp_path.exists()
        process.kill()
    remove_unclaimed(tmp_path)
    assert not tmp_path.exists()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        claim(tmp_path / "gone")
    remove_unclaimed(tmp_path / "gone")


def test_links_are_not_followed(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    remove_unclaimed(link)
    assert list(real.iterdir()) == []
    assert link.is_symlink()
    (real / "lock").symlink_to(tmp_path / "made")
    remove_unclaimed(real)
    assert not (tmp_path / "made").exists()
    assert (real / "lock").is_symlink()
