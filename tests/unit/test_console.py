import json
import os
import signal
import subprocess
import sys
from argparse import Namespace

import pytest

from torchmig.console import Output, run_program
from torchmig.errors import ExitCode, IntegrityError, TorchmigError


def outcome_of(body) -> int:
    return run_program(body, "torchmig", Namespace(json=False))


def raising(error: BaseException):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda: None, 0),
        (lambda: 85, 85),
        (raising(TorchmigError("no")), 1),
        (raising(IntegrityError("no")), 22),
        (raising(KeyboardInterrupt()), 130),
    ],
)
def test_outcome_becomes_exit_code(body, code):
    assert outcome_of(body) == code


def test_error_is_one_sentence_for_people(capsys):
    outcome_of(raising(IntegrityError("blob 'ab' is damaged")))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "torchmig: blob 'ab' is damaged\n")


def test_error_is_one_message_with_json(capsys):
    run_program(raising(IntegrityError("blob 'ab' is damaged")), "torchmig", Namespace(json=True))
    assert json.loads(capsys.readouterr().err) == {
        "message_type": "exit_error",
        "code": 22,
        "error": "IntegrityError",
        "message": "blob 'ab' is damaged",
    }


def test_sigterm_unwinds_and_ends_with_143(tmp_path):
    cleaned = tmp_path / "cleaned"
    script = f"""
import os, signal, sys
from argparse import Namespace
from torchmig.console import run_program
def body():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        open({str(cleaned)!r}, "w").close()
sys.exit(run_program(body, "torchmig", Namespace()))
"""
    answer = subprocess.run([sys.executable, "-c", script], check=False)
    assert answer.returncode == ExitCode.TERMINATED
    assert cleaned.exists()


def test_handler_of_sigterm_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    outcome_of(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_reader_that_goes_away_is_no_traceback():
    script = """
import sys
from argparse import Namespace
from torchmig.console import Output, run_program
def body():
    Output(False).document(None, (str(i) for i in range(10**6)))
sys.exit(run_program(body, "t", Namespace()))
"""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    os.close(read_end)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == ExitCode.FAILED
    assert stderr == ""


def test_table_is_aligned_or_one_document(capsys):
    rows = [("a", "1"), ("longer", "22")]
    Output(False).table(("name", "n"), rows, [{"n": 1}, {"n": 22}])
    assert capsys.readouterr().out == "name    n\na       1\nlonger  22\n"
    Output(True).table(("name", "n"), rows, [{"n": 1}, {"n": 22}])
    assert json.loads(capsys.readouterr().out) == [{"n": 1}, {"n": 22}]
