"""Jobs that are suspended and restored print what they would have printed without it."""

import json
import os
import random
import signal

import pytest
import running
from running import JOBS, by_rank, snapshots, torchmig, unbroken
from running import ForkedRun as Run

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]


def suspend_and_restore(folder, ranks, step, script, *arguments):
    first = Run(folder, f"--nproc-per-node={ranks}", JOBS / script, *arguments)
    first.wait_for_step(step).suspend()
    second = Run(folder, "--restore", "latest").finish()
    assert by_rank(first.text, second.text) == unbroken(ranks, script, *arguments)
    return first, second


@pytest.mark.parametrize(
    ("ranks", "step", "script", "arguments"),
    [
        (2, 7, "ddp.py", ("120",)),
        (4, 5, "ddp.py", ("25",)),
        (2, 10, "fsdp.py", ("40",)),
        (4, 12, "mesh.py", ("40",)),
        (1, 12, "split.py", ("40",)),
        (3, 10, "ring.py", ("40",)),
        (1, 20, "single.py", ("60", "training")),
        (1, 20, "single.py", ("60", "inference")),
        (2, 10, "compiled.py", ("30",)),
        (2, 15, "threads.py", ("40",)),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_prints_what_the_unbroken_run_prints(tmp_path, ranks, step, script, arguments):
    suspend_and_restore(tmp_path, ranks, step, script, *arguments)


def test_images_are_on_their_way_before_torch_is_there(tmp_path):
    arguments = ("ddp.py", "40")
    first = Run(tmp_path, "--nproc-per-node=2", JOBS / arguments[0], *arguments[1:])
    first.wait_for_step(5).suspend()
    # A program of its own, which imports torch.
    second = running.Run(tmp_path, "--json", "--work-dir=work", "--restore=latest").finish()
    assert by_rank(first.text, second.text) == unbroken(2, *arguments)
    messages = [json.loads(line) for line in second.errors.splitlines() if line.startswith("{")]
    ages = {each["phase"]: each["seconds"] for each in messages if each.get("state") == "begun"}
    assert ages["fetch"] > 0.2 > ages["restore"]
    assert list((tmp_path / "work").iterdir()) == []


def test_ten_cycles_at_random_moments(tmp_path):
    steps = 120
    moments = sorted(random.Random(os.urandom(8)).sample(range(3, steps - 8), 10))
    texts = []
    run = Run(tmp_path, "--nproc-per-node=2", JOBS / "ddp.py", steps, "0.01")
    for moment in moments:
        # A restored run goes on from wherever the last one stood, perhaps beyond this moment.
        run.wait_for(rf"^rank \d+ step ({'|'.join(str(s) for s in range(moment, steps))}) ")
        texts.append(run.suspend().text)
        run = Run(tmp_path, "--restore=latest")
    texts.append(run.finish().text)
    assert by_rank(*texts) == unbroken(2, "ddp.py", str(steps)), moments


def test_many_checkpoints_between_receives_that_are_posted_ahead(tmp_path):
    """Their works keep gloo's sockets, and its threads, over the end of what they belong to."""
    run = Run(tmp_path, "--nproc-per-node=4", JOBS / "ring.py", "100000").wait_for_step(5)
    for count in range(1, 41):
        run.signal(signal.SIGUSR1)
        run.wait_for_count("checkpointed into snapshot", count)
    run.suspend()


def test_five_checkpoints_of_one_run_and_a_restore_from_the_middle(tmp_path):
    may_end = tmp_path / "may-end"
    run = Run(tmp_path, "--nproc-per-node=2", JOBS / "plain.py", "120", "0.05", may_end)
    run.wait_for_step(8)
    for count in range(1, 6):
        run.signal(signal.SIGUSR1)
        run.wait_for_count("checkpointed into snapshot", count)
    run.suspend()
    may_end.touch()
    reference = unbroken(2, "plain.py", "120")
    last = Run(tmp_path, "--restore=latest").finish()
    assert by_rank(run.text, last.text) == reference

    summaries = snapshots(tmp_path)
    assert [summary["kind"] for summary in summaries] == ["checkpoint"] * 5 + ["suspend"]
    again = Run(tmp_path, f"--restore={summaries[2]['id'][:12]}").finish()
    for rank, lines in by_rank(again.text).items():
        assert 1 < len(lines) < len(reference[rank])
        assert lines == reference[rank][-len(lines) :]

    first, *later = (manifest["report"] for manifest in manifests(tmp_path))
    host_bytes = first["read_bytes"] - first["zero_bytes"]
    for number, report in enumerate(later, 2):
        assert report["new_bytes"] <= 0.15 * host_bytes, f"snapshot {number} stores much again"


def manifests(folder):
    repo = folder / "torchmig-repo"
    return [
        json.loads(torchmig("show", "--json", summary["id"], "--repo", repo).stdout)
        for summary in snapshots(folder)
    ]
