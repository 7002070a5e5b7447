import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_layers.py"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHECK, root], capture_output=True, text=True, check=False
    )


def test_this_tree_points_one_way():
    answer = check(ROOT)
    assert (answer.returncode, answer.stdout) == (0, "")


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("store/folder.py", "import torch", "'store' must not import 'torch'"),
        ("store/folder.py", "from torchmig.repo import blob", "must not import 'torchmig.repo'"),
        ("store/folder.py", "from ..agent import main", "must not import 'torchmig.agent'"),
        ("repo/blob.py", "from torchmig import capture", "must not import 'torchmig.capture'"),
        ("cut/planner.py", "import torch.distributed", "'cut' must not import 'torch'"),
        ("worker/gate.py", "def f():\n    import rich", "'worker' must not import 'rich'"),
        ("worker/gate.py", "import torchmig.config", "must not import 'torchmig.config'"),
        ("capture/files.py", "import minio", "'capture' must not import 'minio'"),
        (
            "agent/main.py",
            "from torchmig.commands import ps",
            "must not import 'torchmig.commands'",
        ),
        ("novel.py", "", "'novel' is in no layer"),
    ],
)
def test_wrong_way_is_found(tmp_path, module, line, fault):
    path = tmp_path / "torchmig" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    answer = check(tmp_path)
    assert answer.returncode == 1
    assert fault in answer.stdout


def test_right_way_passes(tmp_path):
    path = tmp_path / "torchmig" / "worker" / "gate.py"
    path.parent.mkdir(parents=True)
    path.write_text("import os\nimport torch\nimport torchmig._C\nfrom . import control\n")
    assert check(tmp_path).returncode == 0


@pytest.mark.parametrize(
    "module", ["torchmig", "torchmig.commands._main", "torchmig.config", "torchmig.host"]
)
def test_import_stays_clear_of_torch(module):
    script = (
        f"import sys, {module}\n"
        "from torchmig.commands import load_commands\n"
        "load_commands()\n"
        "assert not {'torch', 'minio', 'pycriu', 'rich'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
