"""torchelastic's process context over ranks in namespaces."""

import signal
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from torchmig.agent.node import Rank
from torchmig.agent.start import RankPlan, Starter
from torchmig.agent.stdio import StdioTail


class RankHandler:
    """One rank with the interface of torch's SubprocessHandler."""

    def __init__(self, rank: Rank) -> None:
        self.local_rank_id = rank.local_rank
        self.proc = rank.process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the rank; SIGKILL ends its whole namespace."""
        if death_sig == signal.SIGKILL:
            self.proc.kill()
            return
        self.proc.signal_group(death_sig or signal.SIGTERM)
        if self.proc.stopped:  # for a dump: it must hear the signal now
            self.proc.signal_group(signal.SIGCONT)


class RankContext(SubprocessContext):
    """Starts ranks through a starter and passes their output on."""

    def __init__(
        self,
        starter: Starter,
        on_started: Callable[[list[Rank], StdioTail], None],
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: Any,
        log_line_prefixes: dict[int, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            **options,
        )
        self._starter = starter
        self._on_started = on_started
        self._prefixes = log_line_prefixes or {}
        self.stdio = StdioTail()
        # The first two are torch's own tails of standard output and error for --tee. They begin at
        # the start of a file, which after a restore would print old lines again.
        self._teed = [set(tail._log_files) for tail in self._tail_logs[:2]]
        self._tail_logs[:2] = [self.stdio]  # type: ignore[list-item]

    def _start(self) -> None:
        plans = []
        for local_rank in range(self.nprocs):
            env = self.envs[local_rank]
            plans.append(
                RankPlan(
                    rank=int(env.get("RANK", local_rank)),
                    local_rank=local_rank,
                    argv=self._argv(local_rank),
                    env=env,
                    stdout=self.stdouts[local_rank],
                    stderr=self.stderrs[local_rank],
                    error_file=self.error_files[local_rank],
                )
            )
        ranks = self._starter.start(plans)
        for rank in ranks:
            self._tail(rank)
            self.error_files[rank.local_rank] = rank.error_file
        handlers: dict[int, Any] = {rank.local_rank: RankHandler(rank) for rank in ranks}
        self.subprocess_handlers = handlers
        self._on_started(ranks, self.stdio)

    def _argv(self, local_rank: int) -> list[str]:
        argv = (str(self.entrypoint), *map(str, self.args[local_rank]))
        if self._numa_options is not None:
            from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

            argv = _maybe_wrap_command_args_with_numa_binding(
                argv, gpu_index=local_rank, numa_options=self._numa_options
            )
        return list(argv)

    def _tail(self, rank: Rank) -> None:
        streams = (
            (rank.stdout, rank.folder.stdout, False),
            (rank.stderr, rank.folder.stderr, True),
        )
        for path, own, error in streams:
            if path == str(own):
                prefix = ""
            elif rank.local_rank in self._teed[int(error)]:
                prefix = self._prefixes.get(rank.local_rank, f"[{self.name}{rank.local_rank}]:")
            else:
                continue
            self.stdio.add(
                path,
                error=error,
                prefix=prefix,
                offset=rank.passed_on[path],
                forget=path == str(own),
            )
