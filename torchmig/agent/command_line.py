"""The command line of torchmig-run: torchrun's, with our options, and what a restore adds to it."""

import argparse
import os
import uuid
from pathlib import Path

from torch.distributed import run as torchrun

from torchmig.agent import workfolders
from torchmig.agent.elastic import describe_launch
from torchmig.agent.entry import depot_of
from torchmig.agent.ranks import RankProcess, sweep
from torchmig.agent.session import Settings
from torchmig.config import Group, add_options, fill
from torchmig.criu import Criu, find_criu, load_pycriu
from torchmig.errors import HostUnfitError, SnapshotUnfitError, UsageError
from torchmig.exit_codes import help_text
from torchmig.repo import JobName, Manifest

PROGRAM = "torchmig-run"
NO_ARENA = "TORCHMIG_NO_ARENA"
NO_CUPTI = "TORCHMIG_NO_CUPTI"
LONGEST_SOCKET_PATH = 107
LONGEST_NAME = 48  # the name is part of a socket's path, which the kernel limits


def parse(argv: list[str], arguments: argparse.Namespace) -> None:
    """Fill in torchrun's options and ours; end the program with 2 where they are wrong."""
    parser = torchrun.get_args_parser()
    parser.prog = PROGRAM
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text()
    add_options(parser, Group.RUN)
    # Whether a restore is asked for, and so whether these may be left out, is known only after
    # parsing: a `--restore` behind the script is the script's own.
    defaults = {}
    for action in parser._actions:
        if action.dest == "training_script":
            action.nargs = "?"
            action.required = False
        if action.dest in ("nproc_per_node", "nnodes"):
            defaults[action.dest] = action.default
            action.default = os.environ.get(f"PET_{action.dest.upper()}")
    parser.parse_args(argv, arguments)
    fill(arguments, [Group.RUN])
    if arguments.restore is None:
        if arguments.training_script is None:
            parser.error(
                "the following arguments are required: training_script, training_script_args"
            )
        for name, default in defaults.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, default)


def load(arguments: argparse.Namespace) -> Manifest:
    """Return the snapshot that is to be restored."""
    manifest = depot_of(arguments).load(arguments.restore, arguments.job)
    arguments.restored_id = manifest.id
    return manifest


def take_over(arguments: argparse.Namespace, manifest: Manifest) -> None:
    """Fill what the command line leaves out from the snapshot; refuse what contradicts it."""
    launch = manifest.launch
    script = arguments.training_script
    if script is not None:
        given = [script, *arguments.training_script_args]
        taken = [launch["script"], *launch["script_args"]]
        if given != taken:
            raise UsageError(
                f"cannot restore snapshot {manifest.id[:8]} with the script '{' '.join(given)}': "
                f"it was taken of '{' '.join(taken)}'; leave the script out, or give the same one"
            )
    script_file = Path(launch["cwd"], launch["script"])
    if not (launch["module"] or launch["no_python"] or script_file.is_file()):
        raise SnapshotUnfitError(
            f"cannot restore snapshot {manifest.id[:8]} on this host: its script '{script_file}' "
            "is missing; put it in the same place"
        )
    arguments.training_script = launch["script"]
    arguments.training_script_args = launch["script_args"]
    arguments.module = launch["module"]
    arguments.no_python = launch["no_python"]
    if arguments.nnodes is None:
        arguments.nnodes = str(launch["nnodes"])
    if arguments.nproc_per_node is None:
        # Counted, because the job may have been started with 'auto', or on other nodes.
        _, nodes = torchrun.parse_min_max_nnodes(str(arguments.nnodes))
        each, left = divmod(len(manifest.ranks), nodes)
        if left:
            raise UsageError(
                f"cannot spread the {len(manifest.ranks)} ranks of snapshot {manifest.id[:8]} over "
                f"{nodes} nodes: say with '--nproc-per-node' how many run on this one"
            )
        arguments.nproc_per_node = str(each)


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Return what the agent needs to know, the state of this host included."""
    criu: Criu | None = None
    unfit, plain = "", False
    try:
        _require_own_ranks(arguments)
    except HostUnfitError as error:
        unfit, plain = str(error), True
    else:
        try:
            criu = find_criu(arguments.criu)
            load_pycriu(criu)  # here, because threads that import side by side see it half loaded
        except HostUnfitError as error:
            unfit = str(error)
    name = _job_name(arguments)
    _require_room_for_sockets(Path(arguments.runtime_dir), name)
    _, nodes = torchrun.parse_min_max_nnodes(str(arguments.nnodes))
    for variable, wanted in ((NO_ARENA, arguments.no_arena), (NO_CUPTI, arguments.no_cupti)):
        os.environ.pop(variable, None)
        if wanted:
            os.environ[variable] = "1"  # for the library in the ranks
    return Settings(
        job=JobName(name, uuid.uuid4().hex[:12]),
        depot=depot_of(arguments),
        runtime_dir=Path(arguments.runtime_dir),
        work_dir=arguments.work_dir,
        deadline_seconds=arguments.deadline,
        launch=describe_launch(arguments, nodes),
        criu=criu,
        unfit=unfit,
        plain=plain,
        gpus=arguments.gpus,
        staging_bytes=arguments.staging,
        grace_seconds=arguments.grace,
        close_connections=arguments.close_connections,
    )


def _require_own_ranks(arguments: argparse.Namespace) -> None:
    """Refuse where ranks cannot have namespaces and folders of their own.

    Raises:
        HostUnfitError: They have to be started by torch itself, and cannot be checkpointed.
    """
    if arguments.run_path:
        raise HostUnfitError(
            "cannot checkpoint a script started with '--run-path': leave '--run-path' out"
        )
    if os.geteuid() != 0:
        raise HostUnfitError(
            "cannot make namespaces for ranks: this is not root; run as root, "
            "or see 'torchmig doctor'"
        )
    folder = Path(arguments.runtime_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise HostUnfitError(
            f"cannot make the folder '{folder}' for ranks: {error.strerror}; "
            "name another with '--runtime-dir'"
        ) from error
    RankProcess().kill()  # tried, because what a kernel or a container allows is written nowhere
    sweep(folder)
    workfolders.sweep(arguments.work_dir)


def _job_name(arguments: argparse.Namespace) -> str:
    name = arguments.job
    if name is None:
        stem = Path(arguments.training_script).stem or "job"
        return f"{stem[: LONGEST_NAME - 7]}-{uuid.uuid4().hex[:6]}"
    # It names a folder, in which a socket lies.
    if "/" in name or name.startswith(".") or len(os.fsencode(name)) > LONGEST_NAME:
        raise UsageError(
            f"'{name}' cannot be the name of a job: write one without '/', not beginning with '.', "
            f"of at most {LONGEST_NAME} bytes"
        )
    return str(name)


def _require_room_for_sockets(runtime_dir: Path, job: str) -> None:
    longest = runtime_dir.absolute() / job / "agent-4194304.sock"
    if len(os.fsencode(longest)) > LONGEST_SOCKET_PATH:
        raise UsageError(
            f"'{longest}' is too long for a socket by "
            f"{len(os.fsencode(longest)) - LONGEST_SOCKET_PATH} bytes: name a shorter folder with "
            "'--runtime-dir', or the job with '--job'"
        )
