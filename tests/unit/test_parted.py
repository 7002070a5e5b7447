"""Which groups are not built anew, and when that would not do."""

import pytest

from torchmig.agent.parted import without_peers
from torchmig.errors import RequestWithdrawnError


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([], []),
        ([("0", 0, 1)], []),
        ([("0", 0, 2)] * 2 + [("1", 0, 2)], [("1", 0)]),
        ([("s", 0, 2)] * 2 + [("s", 2, 2)], [("s", 2)]),  # of one name, and of other ranks
    ],
    ids=["none", "alone", "the last one", "two of one name"],
)
def test_groups_that_only_one_rank_still_has(held, found):
    assert without_peers(held) == found


def test_ranks_that_may_still_talk_to_each_other():
    with pytest.raises(RequestWithdrawnError, match="'7' has been destroyed by 2 of its 4 ranks"):
        without_peers([("0", 0, 4)] * 4 + [("7", 0, 4)] * 2)
