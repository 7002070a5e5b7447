"""The torchmig program: finds the verb, runs it, turns its outcome into an exit code."""

import argparse
import inspect
from collections.abc import Sequence

from torchmig import __version__
from torchmig.commands import Command, load_commands
from torchmig.config import Group, add_options, fill
from torchmig.console import configure_logging, run_program
from torchmig.exit_codes import help_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    options = argparse.Namespace()
    return run_program(lambda: _run(arguments, options), "torchmig", options)


def _run(arguments: Sequence[str] | None, options: argparse.Namespace) -> int | None:
    build_parser().parse_args(arguments, options)
    command: Command = options.command
    fill(options, (*command.groups, Group.OUTPUT))
    configure_logging(options.quiet, options.verbose)
    return command.run(options)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every verb."""
    parser = argparse.ArgumentParser(
        prog="torchmig",
        description="Checkpoint, suspend and migrate running PyTorch jobs.",
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchmig {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for command in load_commands():
        text = inspect.cleandoc(command.__doc__ or "")
        subparser = verbs.add_parser(
            command.verb(),
            help=text.split("\n", maxsplit=1)[0].rstrip("."),
            description=text,
            epilog=help_text(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        for group in (*command.groups, Group.OUTPUT):
            add_options(subparser, group)
        subparser.set_defaults(command=command)
    return parser
