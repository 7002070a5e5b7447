"""What the documents name exists."""

import re
from pathlib import Path

import pytest

from torchmig.commands import load_commands
from torchmig.config import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "launchers/*.md")
    for path in ROOT.glob(pattern)
)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def code(document: Path) -> str:
    """Return what stands in fences, in indented blocks and between backticks."""
    text = (ROOT / document).read_text()
    fences = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fences, *re.findall(r"^ {4}.*$|`[^`\n]+`", text, re.MULTILINE)])


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text()):
        if link.startswith(("http:", "https:")):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / document).parent / file if file else ROOT / document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_verbs_exist(document):
    known = {command.verb() for command in load_commands()}
    named = set(re.findall(r"(?:^\s*|`)torchmig ([a-z-]+)", code(document), re.MULTILINE))
    assert named - known == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_variables_exist(document):
    others = {
        "TORCHMIG_CONFIG",
        "TORCHMIG_CUT_PROGRAMS",
        "TORCHMIG_DEBIAN_MIRROR",
        "TORCHMIG_PYTHON",
        "TORCHMIG_RANK_PID",
        "TORCHMIG_RANK_SOCKET",
        "TORCHMIG_REQUIRE",
        "TORCHMIG_TEST_GRID_REQUESTS",
    }
    known = {option.variable for option in OPTIONS} | others
    assert set(re.findall(r"TORCHMIG_[A-Z_]+", (ROOT / document).read_text())) - known == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_make_targets_exist(document):
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / document).read_text()
    named = re.findall(
        r"(?:^|`|\s{4})make (?:[A-Z]+=\S+ )?([a-z-]+)$|`make ([a-z-]+)`", text, re.MULTILINE
    )
    assert {first or second for first, second in named} <= known


def test_contributing_stays_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 120
