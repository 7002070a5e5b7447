"""``torchmig config``: what the options are, and why."""

import argparse
from typing import Any

from torchmig import config
from torchmig.commands import Command
from torchmig.console import Output


class Config(Command):
    """Show every option with its value and where the value comes from.

    'show' prints the values that hold here; 'markdown' prints the table of docs/options.md.
    Flags given to this verb are shown as they would hold for torchmig-run.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the action and, for show, the options of torchmig-run."""
        parser.add_argument("action", choices=("show", "markdown"))
        given = {"json", "quiet", "verbose"}  # these steer this verb itself
        config.add_options(parser, config.Group.RUN, leave_out=given)

    def run(self, options: argparse.Namespace) -> int | None:
        """Print the table."""
        output = Output(options.json)
        if options.action == "markdown":
            output.document({"markdown": config.markdown()}, [config.markdown().rstrip()])
            return None
        names = {each.name for each in config.OPTIONS} - {"json", "quiet", "verbose"}
        flags = {name: value for name, value in vars(options).items() if name in names}
        settings = config.resolve(flags)
        output.table(
            ("option", "value", "source", "from"),
            [
                (each.option.name, config.display(each.value), each.source.value, each.origin)
                for each in settings
            ],
            [_as_json(each) for each in settings],
        )
        return None


def _as_json(setting: config.Setting) -> dict[str, Any]:
    value = setting.value
    return {
        "option": setting.option.name,
        "variable": setting.option.variable,
        "value": getattr(value, "name", value),
        "source": setting.source.value,
        "from": setting.origin,
    }
