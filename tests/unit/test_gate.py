"""The gate sees every operation of torch.distributed, whoever issues it, exactly once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).resolve().parents[1] / "jobs" / "gate_counts.py"


@pytest.fixture(scope="module")
def found():
    # In a process of its own: kernels on torch's dispatcher cannot be taken back.
    done = subprocess.run(
        [sys.executable, JOB], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_operation_with_a_group_goes_through_a_typed_kernel(found):
    import torch

    with_group = {
        schema.name.removeprefix("c10d::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::")
        and any(argument.name == "process_group" for argument in schema.arguments)
    }
    # A name here that is new in torch has to be added to csrc/gate_ops.cpp.
    assert found["boxed"] == []
    assert set(found["typed"]) == with_group


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("all_reduce", {"collective/0": 1}),
        ("async", {"collective/1": 1}),
        ("broadcast", {"collective/0": 1}),
        ("reduce", {"collective/0": 1}),
        ("all_gather", {"collective/0": 1}),
        ("all_gather_into", {"collective/0": 1}),
        ("reduce_scatter", {"collective/0": 1}),
        ("all_to_all", {"collective/0": 1}),
        ("barrier", {"collective/0": 1}),
        ("send", {"send/0/2/0/0": 1}),
        ("recv", {"recv/2/0/7/0": 1}),
        ("group_send", {"send/0/2/0/1": 1}),
        ("functional", {"collective/0": 1}),
        ("new_group", {"collective/group creation": 1}),
        ("new_local_group", {"collective/group creation": 1}),  # no agent: no ranks are known
        ("others_group", {}),
        ("inference", {"collective/0": 1}),
        ("thread", {"collective/0": 1}),
    ],
)
def test_an_operation_is_counted_once_under_its_key(found, name, counts):
    assert found["counts"][name] == counts


def test_an_operation_that_is_held_is_not_taken_for_one_that_was_issued(tmp_path):
    done = subprocess.run(
        [sys.executable, JOB.with_name("held.py"), tmp_path / "ctl"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    assert held["report"]["waiting"] == ["collective/0"]
    # It is counted first, and taken back when it is held. A report in between shows it as issued;
    # that it is not has to look like news.
    assert held["growth"] > 1
