"""Planned collectives beside compiled ones: what matches, and each way of not matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.compiled import CompiledCollective
from autopar.ir.listing import Collective, Move
from autopar.ir.sharding import replicated
from autopar.ir.values import Value
from autopar.verifying.figures import Change, Realised, compare_collectives

Planned = tuple[Move, Collective]
WHOLE = replicated(2)


def planned(
    kind: str = "all-gather", axes: str = "data", dtype: str = "bf16", items: int = 512,
    name: str = "%w", line: str = "model.py:7", runs: int = 1,
) -> Planned:  # fmt: skip
    value = Value(name, (items, 1), dtype)
    move = Move(value, name, f"{name}'", WHOLE, WHOLE, (), region="backward", line=line)
    return move, Collective(kind, (axes,), value.nbytes, 0.0, runs)


def as_planned(*plans: Planned, op: str = "{}/gather") -> list[CompiledCollective]:
    """What a compiler that did just what it was told would have."""
    return [
        CompiledCollective(
            c.kind, c.axes, m.value.dtype, c.nbytes, c.runs, op.format(m.value.name), f"/u/{m.line}"
        )
        for m, c in plans
    ]


def changes(found: Realised) -> list[tuple[Change, int]]:
    return [(d.change, d.runs) for d in found.differences]


PLAN = (
    planned(name="%1", line="model.py:1"),
    planned(name="%2", line="model.py:2", runs=4),
    planned("reduce-scatter", name="%3", dtype="f32"),
    planned("all-reduce", "model", name="%4", line=""),
)


def test_what_is_compiled_as_planned_differs_in_nothing() -> None:
    found = compare_collectives(PLAN, as_planned(*PLAN)[::-1])
    assert found.differences == ()
    assert [(r.kind, r.axes, r.planned_bytes, r.compiled_bytes) for r in found.rows] == [
        ("all-reduce", ("model",), 1024, 1024),
        ("reduce-scatter", ("data",), 2048, 2048),
        ("all-gather", ("data",), 5120, 5120),
    ]
    assert str(found).splitlines()[-1] == "all-gather      data   5.00 KiB  5.00 KiB  1.000"


def test_names_and_lines_are_not_needed_to_match() -> None:
    lost = [replace(c, op="", line="") for c in as_planned(*PLAN)]
    assert compare_collectives(PLAN, lost).differences == ()


def one_difference(plan: Sequence[Planned], compiled: Sequence[CompiledCollective]) -> str:
    (difference,) = compare_collectives(plan, compiled).differences
    return str(difference)


GATHER = as_planned(planned())[0]
SCATTER = as_planned(planned("reduce-scatter"))[0]


@pytest.mark.parametrize(
    ("plan", "compiled", "said"),
    [
        # The compiler moved a convert across the collective.
        (
            planned(),
            replace(GATHER, dtype="f32", nbytes=2048),
            "all-gather over data, 1.00 KiB of bf16 of %w: bf16[512,1] (backward, model.py:7): "
            "compiled in f32, planned in bf16 [%w/gather, /u/model.py:7]",
        ),
        # It lost a reduce-scatter.
        (
            planned("reduce-scatter"),
            replace(SCATTER, kind="all-reduce", op="", line=""),
            "reduce-scatter over data, 1.00 KiB of bf16 of %w: bf16[512,1] (backward, model.py:7): "
            "compiled as all-reduce",
        ),
        (
            planned("reduce-scatter"),
            replace(SCATTER, kind="all-reduce", dtype="f32", nbytes=2048, op="", line=""),
            "reduce-scatter over data, 1.00 KiB of bf16 of %w: bf16[512,1] (backward, model.py:7): "
            "compiled as all-reduce in f32",
        ),
        (
            planned(),
            replace(GATHER, axes=(), op="", line=""),
            "all-gather over data, 1.00 KiB of bf16 of %w: bf16[512,1] (backward, model.py:7): "
            "compiled over devices that are no axes of the mesh",
        ),
        # Padded.
        (
            planned(),
            replace(GATHER, nbytes=1280),
            "all-gather over data, 1.00 KiB of bf16 of %w: bf16[512,1] (backward, model.py:7): "
            "compiled with 1.25 KiB of bf16 [%w/gather, /u/model.py:7]",
        ),
        # Moved out of a loop, of whose runs it now serves all at once.
        (
            planned(runs=4),
            replace(GATHER, nbytes=4096, op="", line=""),
            "all-gather over data, 1.00 KiB of bf16 of %w: bf16[512,1] (backward, model.py:7): "
            "planned 4 times a step, compiled as 4.00 KiB once a step",
        ),
    ],
)  # fmt: skip
def test_one_that_is_compiled_otherwise(
    plan: Planned, compiled: CompiledCollective, said: str
) -> None:
    # Beside others that are as planned.
    assert one_difference([*PLAN, plan], [compiled, *as_planned(*PLAN)]) == said


def test_one_that_is_dropped_or_added() -> None:
    extra = planned("all-to-all", name="%x")
    said = "all-to-all over data, 1.00 KiB of bf16 of %x: bf16[512,1] (backward, model.py:7): "
    assert one_difference([*PLAN, extra], as_planned(*PLAN)) == f"{said}not compiled"
    assert one_difference(PLAN, as_planned(*PLAN, extra)) == (
        "all-to-all over data, 1.00 KiB of bf16, once a step: not planned "
        "[%x/gather, /u/model.py:7]"
    )


def test_one_that_is_merged_or_repeated() -> None:
    thrice = planned(runs=3)
    assert one_difference([thrice], [GATHER]).endswith(
        "2 of 3 runs merged with an equal one, done once for all"
    )
    sums = [planned("reduce-scatter", name=name) for name in ("%a", "%b")]
    assert one_difference(sums, as_planned(sums[1])).startswith(
        "reduce-scatter over data, 1.00 KiB of bf16 of %a: "
    )
    assert one_difference([planned()], [GATHER, GATHER]).startswith(
        "all-gather over data, 1.00 KiB of bf16, once a step: more often than planned"
    )


def test_a_scatter_never_passes_for_a_gather() -> None:
    found = compare_collectives([planned("reduce-scatter")], [GATHER])
    assert changes(found) == [(Change.DROPPED, 1), (Change.ADDED, 1)]


KINDS = st.sampled_from(["all-reduce", "reduce-scatter", "all-gather"])
PLANS = st.lists(
    st.builds(
        planned, KINDS, st.sampled_from(["data", "model"]), st.sampled_from(["bf16", "f32"]),
        st.sampled_from([4, 8]), st.sampled_from(["%a", "%b"]), st.just("model.py:7"),
        st.integers(1, 3),
    ),
    max_size=6,
)  # fmt: skip


@given(PLANS, PLANS)
def test_differences_account_for_every_byte_that_the_rows_do_not(
    plan: list[Planned], other: list[Planned]
) -> None:
    found = compare_collectives(plan, as_planned(*other))
    gap = sum(r.compiled_bytes - r.planned_bytes for r in found.rows)
    told = 0
    for d in found.differences:
        whole = d.change is Change.LOOP  # the same bytes
        told += 0 if whole or not d.compiled else d.runs * d.compiled.nbytes
        told -= 0 if whole or not d.planned else d.runs * d.planned.nbytes
    assert told == gap


@given(PLANS)
def test_order_does_not_matter(plan: list[Planned]) -> None:
    assert compare_collectives(plan, as_planned(*plan)[::-1]).differences == ()
