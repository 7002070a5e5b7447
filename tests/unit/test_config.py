import argparse
import signal
from pathlib import Path

import pytest

from torchmig import config
from torchmig.config import Group, Source, add_options, fill, resolve
from torchmig.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, Group.RUN)
    options = parser.parse_args(arguments)
    fill(options, [Group.RUN])
    return options


def setting(name: str, **keywords) -> config.Setting:
    return next(found for found in resolve(**keywords) if found.option.name == name)


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"

    def write(text: str) -> Path:
        monkeypatch.setenv("TORCHMIG_CONFIG", str(path))
        path.write_text(text)
        return path

    return write


def test_flag_beats_variable_beats_file_beats_default(config_file, monkeypatch):
    assert parse().deadline == 120.0
    path = config_file('deadline = "3m"\n')
    assert parse().deadline == 180.0
    assert setting("deadline").source is Source.FILE
    assert setting("deadline").origin == str(path)
    monkeypatch.setenv("TORCHMIG_DEADLINE", "90s")
    assert parse().deadline == 90.0
    assert setting("deadline").source is Source.ENVIRONMENT
    assert parse("--deadline", "5").deadline == 5.0
    assert setting("deadline", flags={"deadline": 5.0}).source is Source.FLAG


@pytest.mark.parametrize("flag", ["--checkpoint-every", "--checkpoint_every"])
def test_both_spellings_mean_the_same(flag):
    assert parse(flag, "1h30m").checkpoint_every == 5400.0


def test_signals_are_signals_whether_given_or_not():
    assert parse().suspend_signal is signal.SIGUSR2
    assert parse("--suspend-signal", "SIGTERM").suspend_signal is signal.SIGTERM


def test_file_takes_toml_values_and_dashed_keys(config_file):
    config_file('json = true\ndeadline = 7\ncheckpoint-signal = "USR2"\nstaging = "2GiB"\n')
    options = parse()
    assert (options.json, options.deadline, options.staging) == (True, 7.0, 2 * 1024**3)
    assert options.checkpoint_signal is signal.SIGUSR2


def test_unknown_key_names_the_nearest_one(config_file):
    path = config_file('dedline = "3m"\n')
    with pytest.raises(UsageError, match=f"unknown option 'dedline' in .*'{path}'.*'deadline'"):
        resolve()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("deadline = ", "cannot read the configuration file"),
        ('deadline = "soon"', "option 'deadline' in .*'soon' is not a duration"),
    ],
)
def test_bad_file_is_a_usage_error(config_file, text, complaint):
    config_file(text)
    with pytest.raises(UsageError, match=complaint):
        resolve()


def test_named_file_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHMIG_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(UsageError, match=r"absent\.toml': there is no such file"):
        resolve()


def test_bad_variable_is_named(monkeypatch):
    monkeypatch.setenv("TORCHMIG_STAGING", "lots")
    with pytest.raises(UsageError, match="'TORCHMIG_STAGING': 'lots' is not a size"):
        parse()


def test_empty_variable_counts_as_none(monkeypatch):
    monkeypatch.setenv("TORCHMIG_REPO", "")
    assert parse().repo == config.option("repo").default


def test_bad_flag_ends_with_usage_code(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--term-action", "die")
    assert caught.value.code == 2
    assert "'die' is none of torchrun, suspend" in capsys.readouterr().err


def test_options_fit_beside_torchruns_own():
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    add_options(parser, Group.RUN)
    options = parser.parse_args(
        ["--nproc-per-node", "2", "--repo", "/r", "train.py", "--repo", "mine", "-q"]
    )
    assert (options.nproc_per_node, options.repo) == ("2", "/r")
    assert options.training_script_args == ["--repo", "mine", "-q"]


def test_document_is_the_generated_one():
    assert (ROOT / "docs" / "options.md").read_text() == config.markdown()
