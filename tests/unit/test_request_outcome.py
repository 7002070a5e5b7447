"""What an agent is told of a request reads the same at the one that has asked."""

import json

import pytest

from torchmig.agent.request import Kind, Outcome


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("ab" * 32, Kind.SUSPEND, {"t_cut": 0.25}, {"read_bytes": 7}),
        Outcome("cd" * 32, Kind.CHECKPOINT, {"t_cut": 0.5}, {"read_bytes": 8}, "no server"),
        Outcome("", Kind.DRY_RUN, {"t_cut": 0.5}, {}, stand=({"rank": 0, "place": "boundary"},)),
    ],
    ids=lambda outcome: outcome.kind,
)
def test_an_outcome_comes_back_as_it_went(outcome):
    answer = json.loads(json.dumps(outcome.answer()))
    assert Outcome.from_answer(outcome.kind, answer) == outcome
