"""The planner against random programs; TORCHMIG_CUT_PROGRAMS says how many.

Each request must end. A stand must be a cut, the first one that can be reached where the job
leaves only one choice, and nobody may move in it. A request may only come to nothing when a rank
had nothing left that could be held, when its user thinks better of it, or when the job waits for
what no counter shows. Afterwards each program must give what it gives when nobody asks anything of
it.
"""

import os
from random import Random

import pytest
from cutsim.broken import ALSO_CAUGHT, MUST_BE_CAUGHT
from cutsim.machine import run_alone
from cutsim.programs import draw_program
from cutsim.simulator import BrokenCutError, Simulation, draw_scenario
from cutsim.soak import run_seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchmig.cut import Stand

PROGRAMS = int(os.environ.get("TORCHMIG_CUT_PROGRAMS", "4000"))
CHUNKS = 40


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_come_to_a_cut(chunk):
    size = -(-PROGRAMS // CHUNKS)
    tally = run_seeds(range(chunk * size, (chunk + 1) * size))
    assert tally.failures == []
    stands = sum(count for name, count in tally.counts.items() if name.startswith("stands"))
    # Most requests must come to something, or nothing above is tested.
    assert stands > 0.5 * tally.counts["requests"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False))
def test_a_failing_program_would_be_shrunk(random):
    Simulation(draw_scenario(random, max_events=16, sizes=(1, 2, 3, 4))).run()


@pytest.mark.parametrize(
    ("broken", "programs"),
    [(broken, 1000) for broken in MUST_BE_CAUGHT] + [(broken, 5000) for broken in ALSO_CAUGHT],
)
def test_broken_planner_is_caught(broken, programs):
    for seed in range(programs):
        try:
            Simulation(draw_scenario(Random(seed)), broken).run()
        except BrokenCutError:
            return
    pytest.fail(f"{broken.__name__} got through")


def test_a_second_thread_that_waits_in_the_store_in_a_stand_goes_on_after_it():
    # One in a million: what it waits for is there, and only the stand holds it.
    Simulation(draw_scenario(Random(762338))).run()


def test_program_does_not_hang_by_itself_and_gives_the_same_twice():
    for seed in range(200):
        program = draw_program(Random(seed))
        assert run_alone(program) == run_alone(program)


def test_larger_jobs_come_to_a_cut():
    stands = 0
    for seed in range(40):
        scenario = draw_scenario(Random(f"large {seed}"), max_events=150, sizes=(16, 24, 32))
        stands += any(isinstance(o.verdict, Stand) for o in Simulation(scenario).run())
    assert stands > 20
