"""What docs/json.md tells programs that they get."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "json.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def documented(section):
    """Return the fields that the table of a section lists."""
    return set(re.findall(r"^\| `([a-z_]+)` \|", SECTIONS[section], re.MULTILINE))
