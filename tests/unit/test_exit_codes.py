import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchmig import errors
from torchmig.commands import load_commands
from torchmig.errors import ExitCode, TorchmigError
from torchmig.exit_codes import MEANINGS

ROOT = Path(__file__).resolve().parents[2]


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchmig", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_code_has_its_meaning():
    assert set(MEANINGS) == set(ExitCode)


def test_document_lists_the_codes_with_their_meanings():
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    assert {int(code): meaning.strip() for code, meaning in rows} == {
        int(code): meaning for code, meaning in MEANINGS.items()
    }


def test_document_names_the_errors_with_their_codes():
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE))
    tree = [
        found
        for found in vars(errors).values()
        if isinstance(found, type) and issubclass(found, TorchmigError)
    ]
    assert {name: int(code) for name, code in rows.items()} == {
        found.__name__: int(found.exit_code) for found in tree
    }


@pytest.mark.parametrize("verb", [None, *(command.verb() for command in load_commands())])
def test_every_help_lists_every_code(verb):
    arguments = ["--help"] if verb is None else [verb, "--help"]
    answer = run_program(*arguments)
    assert answer.returncode == 0
    for code, meaning in MEANINGS.items():
        assert f"{int(code):>3}  {meaning}" in answer.stdout


@pytest.mark.parametrize("verb", [command.verb() for command in load_commands()])
def test_every_verb_has_json_and_a_description(verb):
    answer = run_program(verb, "--help")
    assert "--json" in answer.stdout
    assert len(answer.stdout.splitlines()) > len(MEANINGS) + 5


@pytest.mark.parametrize("arguments", [[], ["no-such-verb"], ["version", "--no-such-flag"]])
def test_wrong_command_line_is_code_2(arguments):
    answer = run_program(*arguments)
    assert answer.returncode == ExitCode.USAGE
    assert "Traceback" not in answer.stderr
