"""Images of one release of CRIU for another."""

from pathlib import Path

import pytest

from torchmig.capture.process.images import PAGE_BYTES, _runs
from torchmig.criu import Criu


@pytest.mark.parametrize(
    ("here", "there", "reads"),
    [
        ("4.1.1", "4.1", True),
        ("4.1", "4.1.1", True),
        ("4.2.1", "4.1.1", True),
        ("4.1.1", "4.2", False),
        ("4.10", "4.9", True),
    ],
)
def test_a_release_reads_its_own_images_and_older_ones(here, there, reads):
    assert Criu(Path("criu"), here, Path("pycriu")).reads(there) is reads


@pytest.mark.parametrize(
    "count",
    [{"nr_pages": 3}, {"compat_nr_pages": 3}, {"compat_nr_pages": 0, "nr_pages": 3}],
    ids=["4.1", "4.1 as 4.2 reads it", "4.2"],
)
def test_pages_are_counted_in_either_field(count):
    entry = {"vaddr": 0x7000, "flags": "PE_PRESENT", **count}
    assert list(_runs([entry])) == [(0x7000, 3 * PAGE_BYTES)]
