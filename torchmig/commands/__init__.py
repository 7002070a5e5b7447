"""The verbs of the torchmig program, one module each.

A module here that does not start with an underscore holds one subclass of Command: the class name
is the verb, the docstring its help. Modules import what is heavy (torch, CRIU, S3) inside ``run``,
because all of them are imported to print the list of verbs.
"""

import argparse
import importlib
import inspect
import pkgutil
import re
from abc import ABC, abstractmethod

from torchmig.config import Group


class Command(ABC):
    """One verb.

    Attributes:
        groups: The option groups that the verb takes besides the output options.
    """

    groups: tuple[Group, ...] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - may be left out
        """Add the verb's own arguments; called once, before parsing."""

    @abstractmethod
    def run(self, options: argparse.Namespace) -> int | None:
        """Do it and return the exit code, None for 0; raises TorchmigError for what it cannot do.

        Results go to standard output, everything else to standard error.
        """

    @classmethod
    def verb(cls) -> str:
        """Return the verb: the class name in lower case, words joined by dashes."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


def load_commands() -> list[Command]:
    """Return one instance of each verb, by name."""
    commands: list[Command] = []
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        commands.extend(
            found()
            for _, found in inspect.getmembers(module, inspect.isclass)
            if issubclass(found, Command) and found.__module__ == module.__name__
        )
    return sorted(commands, key=lambda command: command.verb())
