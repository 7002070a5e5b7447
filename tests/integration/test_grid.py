"""Eight ranks in a 2x2x2 grid are stopped again and again, at random moments, and notice nothing.

First the ranks show no step boundaries and are stopped at their gates, later at boundaries.

TORCHMIG_TEST_GRID_REQUESTS is the number of requests; CI makes 200, which take some minutes.
"""

import json
import os
import random
import time

import pytest
from job_processes import job_of
from json_page import SECTIONS, documented
from running import JOBS, Run, by_rank, torchmig, unbroken

from torchmig.agent.control import ask, find_job

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("TORCHMIG_TEST_GRID_REQUESTS", "12"))
RANKS = 8
MOST_STEPS = 100_000
PAUSE_SECONDS = 0.1  # the longest; a step takes a third of it
# Steps that a rank may go on after the next step boundary of the slowest one.
FURTHER_STEPS = 2


def try_to_stop(folder, count, moments):
    """Bring the job to a stand and let it go, `count` times."""
    agent = find_job(folder / "r", job_of(folder))
    for _ in range(count):
        time.sleep(moments.uniform(0, PAUSE_SECONDS))
        stand = ask(agent, {"do": "dry-run"})["stand"]
        assert [rank["rank"] for rank in stand] == list(range(RANKS))
        asked, stood = ([rank[name] for rank in stand] for name in ("asked_at_step", "step"))
        if not any(stood):  # all gates were shut at once, and nothing else had to be tried
            assert {rank["place"] for rank in stand} == {"gate"}, stand
            continue
        assert max(stood) <= min(asked) + 1 + FURTHER_STEPS, stand


def try_from_the_command_line(folder):
    """Check one request as people and programs make it."""
    env = {"TORCHMIG_RUNTIME_DIR": str(folder / "r")}
    answer = json.loads(
        torchmig("checkpoint", job_of(folder), "--dry-run", "--json", env=env).stdout
    )
    assert set(answer) == documented("checkpoint --dry-run")
    section = SECTIONS["checkpoint --dry-run"]
    for name in (*answer["times"], *answer["stand"][0]):
        assert f"`{name}`" in section or f'"{name}"' in section
    assert answer["times"]["t_cut"] <= answer["times"]["t_quiet"]


def show_steps(folder, orders):
    """Make the ranks use an optimizer, and wait until all have."""
    (orders / "optimizer").touch()
    agent = find_job(folder / "r", job_of(folder))
    while not all(rank["step"] for rank in ask(agent, {"do": "dry-run"})["stand"]):
        pass  # each answer takes the job a little further


def test_grid_notices_nothing(tmp_path):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")  # shown if the test fails
    moments = random.Random(seed)
    options = (f"--runtime-dir={tmp_path / 'r'}", f"--job={job_of(tmp_path)}")
    orders = tmp_path / "orders"
    orders.mkdir()
    run = Run(tmp_path, "--nproc-per-node=8", *options, JOBS / "grid.py", MOST_STEPS, orders)
    run.wait_for_step(1)
    try_to_stop(tmp_path, REQUESTS - 2 * (REQUESTS // 3), moments)
    try_from_the_command_line(tmp_path)
    assert not (tmp_path / "torchmig-repo").exists()
    assert "snapshot" not in run.errors
    texts = []
    for _ in range(2):
        texts.append(run.suspend().text)
        run = Run(tmp_path, "--restore=latest", *options).wait_for("restored from snapshot")
        show_steps(tmp_path, orders)
        try_to_stop(tmp_path, REQUESTS // 3, moments)
    (orders / "end").touch()
    texts.append(run.finish().text)
    lines = by_rank(*texts)
    steps = len(lines[0]) - 1
    assert lines == unbroken(RANKS, "grid.py", str(steps))
