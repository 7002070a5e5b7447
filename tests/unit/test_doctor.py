import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchmig.errors import ExitCode, HostUnfitError
from torchmig.host import LONGEST_SOCKET_PATH, State, Where, examine, require_fit


def doctor(*arguments: str, **keywords) -> tuple[int, dict[str, dict[str, str]]]:
    answer = subprocess.run(
        [sys.executable, "-m", "torchmig", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **keywords,
    )
    return answer.returncode, {row["what"]: row for row in json.loads(answer.stdout)}


@pytest.mark.criu
def test_fit_host_has_no_failed_line():
    code, rows = doctor()
    assert [row for row in rows.values() if row["state"] == "failed"] == []
    assert code == ExitCode.OK


def test_missing_criu_ends_with_20_and_names_the_cure():
    code, rows = doctor("--criu", "/nonexistent/criu")
    assert code == ExitCode.HOST_UNFIT
    assert rows["criu"]["state"] == "failed"
    assert "TORCHMIG_CRIU" in rows["criu"]["cure"]


def test_old_criu_is_named_with_its_release(tmp_path):
    old = tmp_path / "criu"
    old.write_text("#!/bin/sh\necho 'Version: 3.17.1'\n")
    old.chmod(0o755)
    code, rows = doctor("--criu", str(old))
    assert code == ExitCode.HOST_UNFIT
    assert "3.17.1, older than 4.1" in rows["criu"]["found"]


def test_criu_without_its_pycriu_is_no_use(tmp_path):
    newer = tmp_path / "criu"
    newer.write_text("#!/bin/sh\necho 'Version: 99.0'\n")
    newer.chmod(0o755)
    _, rows = doctor("--criu", str(newer))
    assert "no pycriu of that release" in rows["criu"]["found"]


def test_autoload_that_is_switched_off_is_found():
    code, rows = doctor(env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert code == ExitCode.HOST_UNFIT
    assert rows["autoload"]["state"] == "failed"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to give up a right",
)
def test_root_without_its_rights_is_unfit():
    command = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-m", "torchmig"]
    answer = subprocess.run([*command, "doctor"], capture_output=True, text=True, check=False)
    assert answer.returncode == ExitCode.HOST_UNFIT
    assert "root without CAP_SYS_ADMIN" in answer.stdout


def states(where: Where) -> dict[str, State]:
    return {check.name: check.state for check in examine(where)}


def test_folders_are_looked_at(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    found = states(Where(None, str(blocked / "below"), str(tmp_path / "new" / "folder")))
    assert found["work folder"] is State.FAILED
    assert found["runtime folder"] is State.OK


def test_runtime_folder_must_be_short_enough_for_a_socket():
    long = "/tmp/" + "x" * LONGEST_SOCKET_PATH
    assert states(Where(None, None, long))["runtime folder"] is State.FAILED


def test_preflight_names_what_failed_and_the_cure():
    with pytest.raises(HostUnfitError, match=r"cannot checkpoint: criu: .*; run 'make setup'"):
        require_fit(Where("/nonexistent/criu", None, str(Path.cwd())))
