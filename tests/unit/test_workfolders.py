import os
import socket

import pytest

from torchmig.agent import workfolders


@pytest.fixture
def abandoned(tmp_path):
    """A folder as a killed agent leaves it."""
    folder = workfolders.make(str(tmp_path))
    folder._claim.release()
    (folder.path / "images").mkdir()
    (folder.path / "images" / "pages-1.img").write_bytes(b"memory")
    return folder.path


def test_a_folder_is_private_and_goes_when_it_is_removed(tmp_path):
    folder = workfolders.make(str(tmp_path / "new"))
    assert folder.path.parent == tmp_path / "new"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").write_bytes(b"")
    folder.remove()
    assert list((tmp_path / "new").iterdir()) == []


def test_sweeping_takes_what_nobody_holds(tmp_path, abandoned):
    held = workfolders.make(str(tmp_path))
    workfolders.sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == [held.path]
    held.remove()


def test_sweeping_leaves_what_is_not_its_own(tmp_path, abandoned):
    host = socket.gethostname()
    others = {
        f"torchmig-{host}x-1-abcdefgh",
        f"torchmig-{host}-0-1-abcdefgh",  # of the host that is called so with "-0" at its end
        f"torchmig-{host}-abcdefgh",
        f"{abandoned.name}-more",
    }
    for name in others:
        (tmp_path / name).mkdir()
    file = tmp_path / f"torchmig-{host}-1-file0000"
    file.write_text("")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    link = tmp_path / f"torchmig-{host}-1-link0000"
    link.symlink_to(elsewhere)
    workfolders.sweep(str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == others | {file.name, elsewhere.name, link.name}
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_sweeping_leaves_what_is_another_users(tmp_path, abandoned):
    os.chown(abandoned, 65534, 65534)
    workfolders.sweep(str(tmp_path))
    assert (abandoned / "images" / "pages-1.img").exists()


def test_sweeping_a_folder_that_is_not_there(tmp_path):
    workfolders.sweep(str(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()
