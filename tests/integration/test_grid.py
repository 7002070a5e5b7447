"""Eight ranks in a 2x2x2 grid are stopped again and again, at random moments, and notice nothing.

TORCHMIG_TEST_GRID_REQUESTS is the number of requests; 200 take some minutes on two cores.
"""

import json
import os
import random
import re
import time
from pathlib import Path

import pytest
from job_processes import job_of
from running import JOBS, Run, by_rank, torchmig, unbroken

from torchmig.agent.control import ask, find_job

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("TORCHMIG_TEST_GRID_REQUESTS", "30"))
RANKS = 8
MOST_STEPS = 100_000
PAUSE_SECONDS = 0.1  # the longest; a step takes a third of it
# Steps that a rank may go on after the next step boundary of the slowest one.
FURTHER_STEPS = 2


def try_to_stop(run, folder, count, moments):
    """Bring the job to a stand and let it go, `count` times."""
    agent = find_job(folder / "run", job_of(folder))
    for _ in range(count):
        time.sleep(moments.uniform(0, PAUSE_SECONDS))
        printed = {rank: len(lines) for rank, lines in by_rank(complete(run.text)).items()}
        answer = ask(agent, {"do": "dry-run"})
        stand = answer["stand"]
        assert [rank["rank"] for rank in stand] == list(range(RANKS))
        asked, stood = ([rank[name] for rank in stand] for name in ("asked_at_step", "step"))
        assert max(stood) <= min(asked) + 1 + FURTHER_STEPS, answer
        for rank in stand:
            # The first step only begins what the first optimizer step needs.
            assert printed.get(rank["rank"], 0) - 1 <= rank["asked_at_step"] <= rank["step"], answer


def complete(text):
    return text[: text.rfind("\n") + 1]


def try_from_the_command_line(folder):
    """Check one request as people and programs make it."""
    env = {"TORCHMIG_RUNTIME_DIR": str(folder / "run")}
    answer = json.loads(
        torchmig("checkpoint", job_of(folder), "--dry-run", "--json", env=env).stdout
    )
    page = (Path(__file__).resolve().parents[2] / "docs" / "json.md").read_text()
    section = re.search(r"^## checkpoint --dry-run\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)[1]
    assert set(answer) == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    for name in (*answer["times"], *answer["stand"][0]):
        assert f"`{name}`" in section or f'"{name}"' in section
    assert answer["times"]["t_cut"] <= answer["times"]["t_quiet"]


def test_requests_at_random_moments_of_a_grid(tmp_path):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")  # shown if the test fails
    moments = random.Random(seed)
    may_end = tmp_path / "may-end"
    options = (f"--runtime-dir={tmp_path / 'run'}", f"--job={job_of(tmp_path)}")
    run = Run(tmp_path, "--nproc-per-node=8", *options, JOBS / "grid.py", MOST_STEPS, may_end)
    run.wait_for_step(1)
    try_to_stop(run, tmp_path, REQUESTS - 2 * (REQUESTS // 3), moments)
    try_from_the_command_line(tmp_path)
    assert not (tmp_path / "torchmig-repo").exists()
    assert "snapshot" not in run.errors
    texts = []
    for _ in range(2):
        texts.append(run.suspend().text)
        run = Run(tmp_path, "--restore=latest", *options).wait_for("restored from snapshot")
        try_to_stop(run, tmp_path, REQUESTS // 3, moments)
    may_end.touch()
    texts.append(run.finish().text)
    lines = by_rank(*texts)
    steps = len(lines[0]) - 1
    assert lines == unbroken(RANKS, "grid.py", str(steps))
