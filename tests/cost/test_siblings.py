"""Sums, and values that are turned over, that XLA for GPUs runs as one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost.kernels import Stored, stored_kernels
from autopar.cost.siblings import (
    Across,
    gone_across,
    summed_at_once,
    with_equals_across,
    with_sums_by_makers,
)
from autopar.cost.sizes import Sizes
from autopar.ir.listing import Block, LocalOp
from autopar.ir.sharding import MeshShape, Sharding
from tests.cost.test_memory import ONE, graph_of, listing
from tests.cost.test_memory_orders import made, stored

SUMS = Across((64, 64), (1,), sums=True, most=2)
TURNS = Across((64, 64), (1, 0), sums=False, most=8)

# Two layers: of scores, s and z, the highest, m and n, and what is turned over, W and V. All read
# the places of a mask, p; G is a gradient of the first layer, of which the second needs nothing.
LAYERS = stored(
    ("p", "", 16), ("s", "", 64), ("m", "sp", 1), ("W", "smp", 64), ("G", "W", 1),
    ("z", "", 64), ("n", "zp", 1), ("V", "znp", 64), ("H", "VG", 1), kept="H",
)  # fmt: skip


def joined(step: Stored, **across: Across) -> list[str]:
    """What each kernel makes, those joined that go across alike."""
    found = with_equals_across(step, [across.get(k.makes[0]) for k in step.kernels])
    assert sorted("".join(k.makes[0] for k in step.kernels)) == sorted(
        name for k in found.kernels for name in k.makes
    )
    ran: set[str] = set()
    for kernel in found.kernels:
        assert kernel.reads <= ran
        ran.update(kernel.makes)
    return ["".join(k.makes) for k in found.kernels]


@pytest.mark.smoke
def test_sums_that_share_an_operand_run_as_one() -> None:
    """So both layers' scores are there before the first is turned over."""
    assert joined(LAYERS, m=SUMS, n=SUMS) == ["p", "s", "z", "mn", "W", "G", "V", "H"]
    assert joined(LAYERS, m=SUMS, n=SUMS, W=TURNS, V=TURNS) == [
        "p", "s", "z", "mn", "WV", "G", "H",
    ]  # fmt: skip


# Two losses, p of x and q of y, the sum of both, s, and the gradients G and H that read one each.
LOSSES = stored(
    ("x", "", 64), ("p", "x", 64), ("G", "p", 64),
    ("y", "", 64), ("q", "y", 64), ("H", "q", 64), ("s", "pq", 1), kept="GHs",
)  # fmt: skip


def by_makers(step: Stored, makers: str, sums: str = "s") -> list[str]:
    """What each kernel makes, sums joined with such element-wise work."""
    shapes = [tuple(makers.count(k.makes[0]) * [64]) or None for k in step.kernels]
    summed = [(64,) if k.makes[0] in sums else None for k in step.kernels]
    found = with_sums_by_makers(step, shapes, summed)
    ran: set[str] = set()
    for kernel in found.kernels:
        assert kernel.reads <= ran
        ran.update(kernel.makes)
    return ["".join(k.makes) for k in found.kernels]


def test_a_sum_runs_with_what_makes_what_it_sums_up() -> None:
    """So the gradient of one loss waits for the other, of which it needs nothing."""
    assert by_makers(LOSSES, "pq") == ["x", "y", "pqs", "G", "H"]
    assert by_makers(LOSSES, "p") == ["x", "y", "q", "ps", "G", "H"]
    assert by_makers(LOSSES, "") == list(made(LOSSES))


def test_sums_that_wait_for_what_others_make_of_it_run_by_themselves() -> None:
    """Be it that a sum which was joined before waits."""
    mean = stored(("p", "", 64), ("d", "p", 64), ("s", "pd", 1), kept="s")
    assert by_makers(mean, "p") == ["p", "d", "s"]
    crossed = stored(
        ("p", "", 64), ("q", "", 64), ("d", "p", 1), ("e", "q", 1), ("s", "pe", 1), ("t", "qd", 1),
        kept="st",
    )  # fmt: skip
    assert by_makers(crossed, "pq", "st") == ["q", "e", "ps", "d", "t"]


@pytest.mark.parametrize(("rows", "at_once"), [(4096, True), (8192, False)])
def test_short_sums_are_one_kernel(rows: int, at_once: bool) -> None:
    graph = graph_of(
        "%s: f32[64] = reduce_sum(%x) forward {axes=(0,), out_sharding=None}",
        inputs=f'%x: f32[{rows},64] batch "x"', returns='%s "s"',
    )  # fmt: skip
    block, sizes = listing(graph).block, Sizes(graph, ONE, "gpu")
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    (kernel,) = stored_kernels(block, sizes, given, lambda *_: 0).kernels
    assert summed_at_once(block, sizes, kernel) == ((rows, 64) if at_once else None)
    (step,) = block.instructions
    assert isinstance(step, LocalOp)
    in_parts = replace(block, instructions=(replace(step, parts=(16,)),))
    assert summed_at_once(in_parts, sizes, kernel) is None


def test_what_shares_nothing_or_goes_otherwise_runs_by_itself() -> None:
    apart = replace(
        LAYERS, kernels=tuple(replace(k, reads=k.reads - {"p"}) for k in LAYERS.kernels)
    )
    assert joined(apart, m=SUMS, n=SUMS) == list(made(LAYERS))
    assert joined(LAYERS, m=SUMS, n=replace(SUMS, dims=(0,))) == list(made(LAYERS))
    assert joined(LAYERS, m=SUMS, n=replace(SUMS, sizes=(64, 32))) == list(made(LAYERS))


def test_what_waits_for_another_runs_after_it() -> None:
    """Be it that a third, which was joined to one of them, waits."""
    chain = stored(
        ("p", "", 16), ("a", "p", 1), ("b", "ap", 1), ("c", "p", 1), ("d", "cp", 1), kept="bd"
    )
    sums = dict.fromkeys("abcd", SUMS)
    assert joined(chain, **sums) == ["p", "ac", "bd"]
    other = Across((64, 64), (0,), sums=True, most=2)
    # b waits for a, and d for c: as b runs with c, a may not run with d.
    assert joined(chain, a=SUMS, b=other, c=other, d=SUMS) == ["p", "a", "bc", "d"]


def test_no_more_run_as_one_than_a_core_holds() -> None:
    step = stored(("p", "", 16), *((name, "p", 1) for name in "abcde"), kept="abcde")
    assert joined(step, **dict.fromkeys("abcde", SUMS)) == ["p", "ab", "cd", "e"]


def across(axes: str, scores: str) -> Across | None:
    """How a sum along some axes of the transpose of scores goes across them."""
    graph = graph_of(
        scores,
        "%e: f32[4,2,32,64] = transpose(%s) forward {permutation=(0, 3, 2, 1)}",
        f"%t: f32[4,2,32] = reduce_sum(%e) forward {{axes=({axes},), out_sharding=None}}",
        inputs='%k: f32[4,64,8] batch "k",\n%q: f32[4,32,2,8] batch "q",\n'
        '%r: f32[4,64,32,2] batch "r"',
        returns='%t "t"',
    )
    block, sizes = listing(graph).block, Sizes(graph, ONE)
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    last = stored_kernels(block, sizes, given, lambda *_: 0).kernels[-1]
    assert gone_across(block, sizes, replace(last, alone=True)) is None
    return gone_across(block, sizes, last)


def test_fewer_sums_over_columns_than_over_rows_run_as_one() -> None:
    """Scores lie as their product makes them, keys outermost: to sum them up goes over columns."""
    product = (
        "%s: f32[4,64,32,2] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((2,), (3,)), ((0,), (0,)))}"
    )
    assert across("3", product) == Across((4, 2, 32, 64), (3,), sums=True, most=2)
    assert across("3", "%s: f32[4,64,32,2] = abs(%r) forward") == Across(
        (4, 2, 32, 64), (3,), sums=True, most=8
    )


@pytest.mark.parametrize("shared", [True, False])
def test_places_in_a_dim_that_devices_share_are_stored_once(shared: bool) -> None:
    graph = graph_of(
        *(
            text
            for name in "ab"
            for text in (
                f"%{name}i: i32[64,32] = iota() forward {{dimension=0, dtype='i32', "
                "shape=(64, 32)}",
                f"%{name}e: i32[64,32] = max(%{name}i, %{name}) forward",
                f"%{name}s: i32[64] = reduce_sum(%{name}e) forward {{axes=(1,), "
                "out_sharding=None}",
            )
        ),
        inputs='%a: i32[64,32] batch "a",\n%b: i32[64,32] batch "b"',
        returns='%as "s", %bs "t"',
    )
    block, mesh = listing(graph).block, MeshShape(("data",), (4,))
    if shared:
        cut = Sharding((("data",), ()))
        steps = tuple(
            replace(s, result_shardings=(cut,)) if isinstance(s, LocalOp) and not s.operands else s
            for s in block.instructions
        )
        block = Block(block.inputs, steps, block.outputs)
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    found = stored_kernels(block, Sizes(graph, mesh), given, lambda *_: 0)
    places = [k.makes[0] for k in found.kernels if not k.reads]
    assert [found.nbytes[n] for n in places] == ([16 * 4] if shared else [])
    assert sum(set(places) <= k.reads for k in found.kernels) == 2


# -- on TPUs ---------------------------------------------------------------------------------------


def masked(name: str) -> tuple[str, ...]:
    """Scores of a layer, under a mask of its own, and their highest."""
    places = "{{dimension={}, dtype='i32', shape=(32, 32)}}"
    return (
        f"%{name}s: f32[4,32,32] = dot_general(%{name}, %{name}) forward {BATCHED}",
        f"%{name}r: i32[32,32] = iota() forward {places.format(0)}",
        f"%{name}c: i32[32,32] = iota() forward {places.format(1)}",
        f"%{name}g: bool[32,32] = ge(%{name}r, %{name}c) forward",
        f"%{name}b: bool[4,32,32] = broadcast_in_dim(%{name}g) forward "
        "{broadcast_dimensions=(1, 2), shape=(4, 32, 32), sharding=None}",
        f"%{name}k: f32[4,32,32] = select_n(%{name}b, %z, %{name}s) forward",
        f"%{name}m: f32[4,32] = reduce_max(%{name}k) forward {{axes=(2,), out_sharding=None}}",
    )


BATCHED = "{dimension_numbers=(((2,), (2,)), ((0,), (0,)))}"


MANY = 2**19  # of which scores in f32 take 2 GiB


@pytest.mark.parametrize("rows", [4, MANY])
def test_tpus_store_a_mask_once_and_run_sums_under_it_as_one(rows: int) -> None:
    """But for large ones, of which each runs by itself."""
    ops, inputs = (*masked("a"), *masked("d")), '%a: f32[4,32,8] batch "a",\n%d: f32[4,32,8] batch '
    inputs += '"d",\n%z: f32[4,32,32] batch "z"'
    graph = graph_of(
        *(with_rows(op, rows) for op in ops), inputs=with_rows(inputs, rows),
        returns='%am "m", %dm "n"',
    )  # fmt: skip
    block, sizes = listing(graph).block, Sizes(graph, ONE, "tpu")
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    found = stored_kernels(block, sizes, given, lambda *_: 0)
    (mask,) = (k.makes[0] for k in found.kernels if not k.reads)
    assert found.nbytes[mask] == 32 * 32  # of bool, not of each of the batch
    sums = [k for k in found.kernels if mask in k.reads]
    assert [k.makes for k in sums] == [("%am",), ("%dm",)]
    across = [gone_across(block, sizes, k) for k in found.kernels]
    as_run = with_equals_across(found, across)
    assert (("%am", "%dm") in [k.makes for k in as_run.kernels]) == (rows < MANY)


def with_rows(text: str, rows: int) -> str:
    """A text with another number of rows than 4."""
    return text.replace("[4,", f"[{rows},").replace("(4,", f"({rows},")


@pytest.mark.parametrize(("parts", "rows"), [(1, 4), (2, 4), (2, MANY)])
def test_tpus_compute_what_they_turn_over_of_both_products_behind_a_sum(
    parts: int, rows: int
) -> None:
    """Which are held until then; what one product makes, or is large, is read as it is stored."""
    ops = (
        f"%s: f32[4,32,32] = dot_general(%a, %d) forward {BATCHED}",
        f"%t: f32[4,32,32] = dot_general(%d, %e) forward {BATCHED}",
        f"%u: f32[4,32,32] = {'add(%s, %t)' if parts == 2 else 'mul(%s, 2.0:f32)'} forward",
        "%m: f32[4,32] = reduce_max(%u) forward {axes=(2,), out_sharding=None}",
        "%v: f32[4,32,32] = exp(%u) forward",
        "%w: f32[4,32,32] = tanh(%u) forward",
        "%n: f32[4,32] = reduce_sum(%w) forward {axes=(2,), out_sharding=None}",
        "%x: f32[4,32,32] = transpose(%v) forward {permutation=(0, 2, 1)}",
        f"%y: f32[4,32,8] = dot_general(%x, %f) forward {BATCHED}",
    )
    inputs = (
        '%a: f32[4,32,8] batch "a",\n%d: f32[4,32,8] batch "d",\n'
        '%e: f32[4,32,8] batch "e",\n%f: f32[4,8,32] batch "f"'
    )
    graph = graph_of(
        *(with_rows(op, rows) for op in ops), inputs=with_rows(inputs, rows),
        returns='%y "y", %m "m", %n "n", %u "u", %t "t"',
    )  # fmt: skip
    block = listing(graph).block
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    found = stored_kernels(block, Sizes(graph, ONE, "tpu"), given, lambda *_: 0)
    turned = [k.reads for k in found.kernels if k.makes == ("%x",)]
    assert turned == ([frozenset(("%s", "%t"))] if parts == 2 and rows < MANY else [])
