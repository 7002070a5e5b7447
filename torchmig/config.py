"""Every option of the programs in one table.

The table generates the argparse options, the names in the environment and in the configuration
file, ``torchmig config show`` and docs/options.md, so that none of them can drift from another.
A value comes from the flag, else the environment, else the configuration file, else the default.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torchmig.errors import UsageError
from torchmig.units import parse_bool, parse_duration, parse_signal, parse_size

ENVIRONMENT_PREFIX = "TORCHMIG_"
CONFIG_FILE_VARIABLE = "TORCHMIG_CONFIG"


class Group(Enum):
    """Where an option belongs; an option may belong to several groups."""

    RUN = "torchmig"  # torchmig-run
    REPOSITORY = "repository"  # verbs that open a repository
    JOB = "job"  # verbs that talk to a running job
    HOST = "host"  # verbs that look at this host
    OUTPUT = "output"  # every verb


class Source(Enum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: As in the namespace; the flag and the variable are made from it.
        parse: Turns the text of a flag or a variable into the value; raises ValueError.
        default: The value (not text) that holds when nobody says otherwise.
        groups: Where the option is offered.
        help: One sentence for people, lower-case start.
        metavar: What stands for the value in help; None for a switch.
        short: One-letter flag for the verbs; torchmig-run leaves the letters to torchrun.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    groups: tuple[Group, ...]
    help: str
    metavar: str | None = None
    short: str | None = None

    @property
    def variable(self) -> str:
        """Name in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flags(self) -> list[str]:
        """Long flags in both spellings, as torchrun has them."""
        return list(dict.fromkeys((f"--{self.name.replace('_', '-')}", f"--{self.name}")))


@dataclass(frozen=True)
class Setting:
    """A value with the place that it came from."""

    option: Option
    value: Any
    source: Source
    origin: str  # the flag, the variable, the file, or "built in"


def _one_of(*allowed: str) -> Callable[[str], str]:
    def choice(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"'{text}' is none of {', '.join(allowed)}")
        return text

    return choice


def _text(text: str) -> str:
    if not text:
        raise ValueError("the value is empty")
    return text


_RUN_AND_REPOSITORY = (Group.RUN, Group.REPOSITORY)

OPTIONS: tuple[Option, ...] = (
    Option(
        "job",
        _text,
        None,
        (Group.RUN,),
        "name of the job; made from the script's name and a short id when left out",
        "NAME",
    ),
    Option(
        "repo",
        _text,
        "torchmig-repo",
        _RUN_AND_REPOSITORY,
        "repository: a folder, file:///FOLDER or s3://BUCKET/PREFIX "
        "(endpoint and keys from AWS_* variables)",
        "URL",
    ),
    Option(
        "local_cache",
        _text,
        None,
        (Group.RUN,),
        "folder on each node in front of the repository: snapshots are durable there first and "
        "uploaded afterwards, and a restore takes from it what is at hand",
        "DIR",
    ),
    Option(
        "local_cache_size",
        parse_size,
        None,
        (Group.RUN,),
        "size beyond which the folder forgets its oldest snapshots that the repository has, "
        "such as 500GiB; without limit when left out",
        "SIZE",
    ),
    Option(
        "restore",
        _text,
        None,
        (Group.RUN,),
        "start from this snapshot; 'latest' is the newest one of the job, "
        "or of the repository where no job is named",
        "ID",
    ),
    Option(
        "checkpoint_every",
        parse_duration,
        None,
        (Group.RUN,),
        "checkpoint and go on at this interval, such as 30m",
        "TIME",
    ),
    Option(
        "checkpoint_signal",
        parse_signal,
        parse_signal("USR1"),
        (Group.RUN,),
        "signal that asks for a checkpoint after which the job goes on",
        "SIGNAL",
    ),
    Option(
        "suspend_signal",
        parse_signal,
        parse_signal("USR2"),
        (Group.RUN,),
        "signal that asks for a checkpoint after which the job ends with exit code 85",
        "SIGNAL",
    ),
    Option(
        "gpus",
        _text,
        None,
        (Group.RUN,),
        "with --restore: the GPUs to restore onto, by index or UUID in the order of the ranks; "
        "the same ones as before when left out, or the first ones on another host",
        "LIST",
    ),
    Option(
        "no_arena",
        parse_bool,
        False,
        (Group.RUN,),
        "leave GPU memory where CUDA puts it: checkpoints are slower, and CUDA tensors can be "
        "shared with other processes",
    ),
    Option(
        "no_cupti",
        parse_bool,
        False,
        (Group.RUN,),
        "keep CUPTI from profilers, after which no process can be checkpointed: they record what "
        "happens on the CPU alone",
    ),
    Option(
        "close_connections",
        parse_bool,
        False,
        (Group.RUN,),
        "checkpoint a script that has TCP connections of its own, as to a dashboard or an object "
        "store; after a restore they are closed, and it has to open new ones",
    ),
    Option(
        "staging",
        parse_size,
        None,
        (Group.RUN,),
        "host memory for GPU bytes on their way out and back, such as 64GiB; "
        "sized from the job's GPU memory when left out",
        "SIZE",
    ),
    Option(
        "term_action",
        _one_of("torchrun", "suspend"),
        "torchrun",
        (Group.RUN,),
        "what SIGTERM does: end the job as torchrun does, or suspend it",
        "torchrun|suspend",
    ),
    Option(
        "grace",
        parse_duration,
        None,
        (Group.RUN,),
        "time from SIGTERM to the SIGKILL that the scheduler sends; "
        "a suspend that cannot be done in it is not begun",
        "TIME",
    ),
    Option(
        "deadline",
        parse_duration,
        120.0,
        (Group.RUN,),
        "time a request may take until all ranks stand at the cut, "
        "after which it is withdrawn and the job goes on",
        "TIME",
    ),
    Option(
        "criu",
        _text,
        None,
        (Group.RUN, Group.HOST),
        "the criu program, 4.1 or newer; searched on PATH and beside the package when left out",
        "PATH",
    ),
    Option(
        "work_dir",
        _text,
        None,
        (Group.RUN, Group.HOST),
        "folder for images on their way into the repository; "
        "a private folder in the system's temporary folder when left out",
        "DIR",
    ),
    Option(
        "runtime_dir",
        _text,
        "/run/torchmig",
        (Group.RUN, Group.JOB, Group.HOST),
        "folder where running jobs have their sockets",
        "DIR",
    ),
    Option(
        "json",
        parse_bool,
        False,
        (Group.RUN, Group.OUTPUT),
        "print JSON: one document, or one line a message for what takes long",
    ),
    Option(
        "quiet",
        parse_bool,
        False,
        (Group.RUN, Group.OUTPUT),
        "print errors and results, no progress",
        short="q",
    ),
    Option(
        "verbose",
        parse_bool,
        False,
        (Group.RUN, Group.OUTPUT),
        "print what is done in detail",
        short="v",
    ),
)


def option(name: str) -> Option:
    """Return the option of that name."""
    return next(found for found in OPTIONS if found.name == name)


def add_options(
    parser: argparse.ArgumentParser,
    group: Group,
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Add the options of a group to a parser, torchrun's own included.

    The namespace lacks those that are not on the command line: `fill` brings their values.

    Args:
        parser: Gets an argument group of the group's name.
        group: Which options.
        leave_out: Names of options that the parser has from elsewhere.
    """
    arguments = parser.add_argument_group(group.value)
    for each in OPTIONS:
        if group not in each.groups or each.name in leave_out:
            continue
        flags = each.flags
        if each.short is not None and group is not Group.RUN:
            flags = [f"-{each.short}", *flags]
        keywords: dict[str, Any] = {
            "dest": each.name,
            "default": argparse.SUPPRESS,
            "help": f"{each.help} [{each.variable}]".replace("%", "%%"),
        }
        if each.metavar is None:
            keywords["action"] = "store_true"
        else:
            keywords.update(type=_argparse_type(each), metavar=each.metavar)
        arguments.add_argument(*flags, **keywords)


def fill(arguments: argparse.Namespace, groups: Collection[Group]) -> None:
    """Give the options of some groups that are not on the command line their values.

    Raises:
        UsageError: A variable or the configuration file holds a value that does not parse.
    """
    for setting in resolve(vars(arguments)):
        if not set(groups).isdisjoint(setting.option.groups):
            setattr(arguments, setting.option.name, setting.value)


def resolve(
    flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> list[Setting]:
    """Return every option with its value and where the value comes from.

    Args:
        flags: Values given on the command line, by option name.
        environment: Read instead of the process's environment.

    Raises:
        UsageError: A variable or the configuration file holds a value that does not parse.
    """
    flags = flags or {}
    environment = os.environ if environment is None else environment
    path = config_file(environment)
    from_file = _read_file(path) if path is not None else {}
    settings = []
    for each in OPTIONS:
        if each.name in flags:
            setting = Setting(each, flags[each.name], Source.FLAG, each.flags[0])
        elif environment.get(each.variable):  # an empty variable counts as none
            value = _parse(each, environment[each.variable], f"variable '{each.variable}'")
            setting = Setting(each, value, Source.ENVIRONMENT, each.variable)
        elif each.name in from_file:
            setting = Setting(each, from_file[each.name], Source.FILE, str(path))
        else:
            setting = Setting(each, each.default, Source.DEFAULT, "built in")
        settings.append(setting)
    return settings


def config_file(environment: Mapping[str, str]) -> Path | None:
    """Return the one configuration file that counts, if there is any.

    Raises:
        UsageError: The file named in TORCHMIG_CONFIG does not exist.
    """
    named = environment.get(CONFIG_FILE_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise UsageError(
                f"cannot read the configuration file '{named}': there is no such file; "
                f"correct or unset {CONFIG_FILE_VARIABLE}"
            )
        return Path(named)
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    for candidate in (Path(home) / "torchmig" / "config.toml", Path("/etc/torchmig/config.toml")):
        # access() says no, where stat() would raise, for a home of somebody else's.
        if os.access(candidate, os.R_OK):
            return candidate
    return None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the configuration file '{path}': {error}") from error
    known = {each.name: each for each in OPTIONS}
    values = {}
    for key, raw in content.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'" if near else "see 'torchmig config show'"
            raise UsageError(f"unknown option '{key}' in the configuration file '{path}'; {hint}")
        text = str(raw).lower() if isinstance(raw, bool) else str(raw)
        values[name] = _parse(known[name], text, f"option '{key}' in '{path}'")
    return values


def _parse(each: Option, text: str, where: str) -> Any:
    try:
        return each.parse(text)
    except ValueError as error:
        raise UsageError(f"cannot use {where}: {error}") from error


def _argparse_type(each: Option) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return each.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def markdown() -> str:
    """Return docs/options.md."""
    lines = [
        "# Options",
        "",
        "A value comes from the flag, else the variable, else the configuration file, else the",
        f"default. The file is the one named in `{CONFIG_FILE_VARIABLE}`, else",
        "`$XDG_CONFIG_HOME/torchmig/config.toml`, else `/etc/torchmig/config.toml`. It is TOML;",
        "its keys are the flags without dashes in front. `torchmig config show` prints what holds",
        "here and where it comes from.",
        "",
        "| flag | variable | default | meaning |",
        "|---|---|---|---|",
    ]
    for each in OPTIONS:
        flag = each.flags[0] if each.metavar is None else f"{each.flags[0]} {each.metavar}"
        cells = (f"`{flag}`", f"`{each.variable}`", display(each.default), each.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def display(value: Any) -> str:
    """Return a value as people write it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g} s"
    name = getattr(value, "name", None)
    return str(name) if name is not None else str(value)
