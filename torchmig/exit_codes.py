"""What each exit code says, for every ``--help`` and for docs/exit-codes.md."""

from torchmig.errors import ExitCode

MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "failed; for torchmig-run also: a worker failed, as under torchrun",
    ExitCode.USAGE: "the command line or the configuration is wrong",
    ExitCode.NO_REPOSITORY: "there is no repository at the address",
    ExitCode.LOCKED: "the repository is locked by somebody else",
    ExitCode.NO_SNAPSHOT: "no such snapshot, or several share the prefix",
    ExitCode.HOST_UNFIT: "this host cannot checkpoint",
    ExitCode.SNAPSHOT_UNFIT: "the snapshot does not fit this host",
    ExitCode.INTEGRITY: "stored bytes are damaged or missing",
    ExitCode.DEADLINE: "the deadline was missed; the request is withdrawn",
    ExitCode.SUSPENDED: "the job is suspended: restore it to go on",
    ExitCode.INTERRUPTED: "interrupted (SIGINT)",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}


def help_text() -> str:
    """Return the list that stands below every help text."""
    rows = [f"  {int(code):>3}  {meaning}" for code, meaning in MEANINGS.items()]
    return "\n".join(["exit codes:", *rows])
