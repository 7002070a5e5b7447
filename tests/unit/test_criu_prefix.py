"""Which mirror the private CRIU would come from: nothing is downloaded here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "criu_prefix.sh"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("apt-get") is None,
    reason="needs root, to mount other apt sources, and apt",
)


@pytest.fixture
def set_up(tmp_path):
    """Return a function that runs the script on a machine with certain apt sources."""
    etc = tmp_path / "apt"
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / "apt.conf").write_text('Acquire::Retries "0";\n')  # nothing is at these addresses

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        command = 'mount --bind "$1" /etc/apt && exec sh "$2" "$3"'
        prefix = tmp_path / "prefix"
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", command, "sh", etc, SCRIPT, prefix],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    run.etc = etc
    return run


UBUNTU = "Types: deb\nURIs: http://127.0.0.1:1/ubuntu/\nSuites: noble\nComponents: main\n"


def assert_asks(mirror, answer, source="trixie main", keyring="debian-archive-keyring"):
    """Check which mirror was to be read, or would have been with the keys that it needs."""
    assert answer.returncode == 20
    said = answer.stderr.splitlines()[-1]
    if Path(f"/usr/share/keyrings/{keyring}.gpg").exists():
        assert f"apt could not read '{mirror}" in said
        assert f"({source})" in said
    else:
        assert f"the keys that '{mirror}" in said
        assert said.endswith(f"apt-get install {keyring.replace('ubuntu-archive', 'ubuntu')}")


def test_ubuntu_takes_its_own_mirror(set_up):
    (set_up.etc / "sources.list.d" / "ubuntu.sources").write_text(UBUNTU)
    ours = ("resolute main universe", "ubuntu-archive-keyring")
    assert_asks("http://127.0.0.1:1/ubuntu/", set_up(), *ours)


def test_machine_without_a_mirror_gets_one_sentence(set_up):
    (set_up.etc / "sources.list").write_text("deb http://127.0.0.1:1/mint xia main\n")
    answer = set_up()
    assert answer.returncode == 20
    (line,) = answer.stderr.splitlines()
    assert "TORCHMIG_DEBIAN_MIRROR" in line
    assert "TORCHMIG_CRIU" in line


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "sources.list.d/debian.sources",
            "Types: deb\n# URIs: http://127.0.0.1:9/debian\nURIs: http://127.0.0.1:1/debian\n"
            "Suites: bookworm\nComponents: main\n",
        ),
        ("sources.list", "deb http://127.0.0.1:1/debian bookworm main\n"),
        (
            "sources.list",
            "# deb http://127.0.0.1:9/debian bookworm main\n"
            "deb http://127.0.0.1:9/debian-security bookworm-security main\n"
            "deb [arch=amd64 signed-by=/k.gpg] http://127.0.0.1:1/debian/ bookworm main\n",
        ),
        ("sources.list.d/mirror.list", "deb  http://127.0.0.1:1/debian\tbookworm main\n"),
    ],
)
def test_mirror_is_the_machines_own(set_up, file, text):
    (set_up.etc / "sources.list.d" / "ubuntu.sources").write_text(UBUNTU)
    (set_up.etc / file).write_text(text)
    answer = set_up()
    assert_asks("http://127.0.0.1:1/debian", answer)


def test_named_mirror_comes_first(set_up):
    (set_up.etc / "sources.list").write_text("deb http://127.0.0.1:9/debian bookworm main\n")
    answer = set_up(TORCHMIG_DEBIAN_MIRROR="http://127.0.0.1:1/other")
    assert_asks("http://127.0.0.1:1/other", answer)
