"""``torchmig forget``: let snapshots go."""

import argparse
from typing import TYPE_CHECKING

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.errors import UsageError
from torchmig.units import parse_duration

if TYPE_CHECKING:
    from torchmig.repo import Repository
    from torchmig.repo.retention import Decision, KeepRules


class Forget(Command):
    """Forget snapshots: those named, or those that no --keep rule keeps, job by job.

    A rule such as --keep-daily 7 keeps the newest snapshot of each of the last 7 days that have
    one; rules add up. Space is freed by 'prune', or at once with --prune.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the snapshots and the rules."""
        from torchmig.commands._repository import add_job

        parser.add_argument("snapshots", nargs="*", metavar="ID", help="forget these")
        add_job(parser)
        for rule in ("last", "hourly", "daily", "weekly", "monthly", "yearly"):
            parser.add_argument(
                f"--keep-{rule}", type=int, default=0, metavar="N", help=f"keep the {rule} N"
            )
        parser.add_argument(
            "--keep-within",
            type=parse_duration,
            metavar="TIME",
            help="keep what is younger than this, counted from the newest, such as 7d",
        )
        parser.add_argument(
            "--keep-tag", action="append", default=[], metavar="TAG", help="keep those with the tag"
        )
        parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
        parser.add_argument("--prune", action="store_true", help="free the space as well")

    def run(self, options: argparse.Namespace) -> int | None:
        """Forget and print what stays and what goes."""
        from torchmig.commands._repository import opened

        with opened(options) as repo:
            decisions = _decide(repo, options)
            for decision in decisions:
                if not decision.is_kept and not options.dry_run:
                    repo.forget(decision.summary.id)
            _print(Output(options.json), decisions)
            if options.prune:
                from torchmig.commands.prune import prune_and_print

                prune_and_print(repo, options, max_unused=0.05)
        return None


def _decide(repo: "Repository", options: argparse.Namespace) -> list["Decision"]:
    from torchmig.commands._repository import chosen
    from torchmig.repo.retention import Decision, decide

    rules = _rules(options)
    if options.snapshots:
        if not rules.keeps_nothing:
            raise UsageError("cannot use ids together with --keep rules: name one of the two")
        ids = [repo.resolve(reference, options.job) for reference in options.snapshots]
        return [Decision(repo.summary(snapshot_id), ()) for snapshot_id in dict.fromkeys(ids)]
    if rules.keeps_nothing:
        raise UsageError("nothing says what to keep: name snapshots, or give a --keep rule")
    return decide(chosen(repo, [], options.job), rules)


def _rules(options: argparse.Namespace) -> "KeepRules":
    from torchmig.repo.retention import KeepRules

    counts = {
        rule: getattr(options, f"keep_{rule}")
        for rule in ("last", "hourly", "daily", "weekly", "monthly", "yearly")
    }
    if any(number < 0 for number in counts.values()):
        raise UsageError("a --keep rule cannot keep less than 0 snapshots")
    return KeepRules(**counts, within_seconds=options.keep_within, tags=tuple(options.keep_tag))


def _print(output: Output, decisions: list["Decision"]) -> None:
    from torchmig.commands._repository import printable, summary_document, when

    output.table(
        ("id", "time (UTC)", "job", "", "because of"),
        [
            (
                each.summary.id[:8],
                when(each.summary.created),
                printable(each.summary.job.name),
                "kept" if each.is_kept else "forgotten",
                ", ".join(each.reasons),
            )
            for each in decisions
        ],
        [
            {
                **summary_document(each.summary),
                "kept": each.is_kept,
                "reasons": list(each.reasons),
            }
            for each in decisions
        ],
    )
