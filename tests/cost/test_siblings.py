"""Element-wise work, sums, and values that are turned over, that XLA runs as one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.kernels import Stored, stored_kernels
from autopar.cost.siblings import Iteration, iteration_of, with_siblings
from autopar.cost.sizes import Sizes
from autopar.ir.listing import Block, LocalOp
from autopar.ir.sharding import MeshShape, Sharding
from tests.cost.test_memory import ONE, graph_of, listing
from tests.cost.test_memory_orders import made, stored

ITEMS = Iteration((64, 64))
SUMS = Iteration((64, 64), "sum", (1,), 2)
TURNS = Iteration((64, 64), "turn", (1, 0), 8)

# Two layers: of scores, s and z, the highest, m and n, and what is turned over, W and V. All read
# the places of a mask, p; G is a gradient of the first layer, of which the second needs nothing.
LAYERS = stored(
    ("p", "", 16), ("s", "", 64), ("m", "sp", 1), ("W", "smp", 64), ("G", "W", 1),
    ("z", "", 64), ("n", "zp", 1), ("V", "znp", 64), ("H", "VG", 1), kept="H",
)  # fmt: skip


def joined(step: Stored, **iterations: Iteration) -> list[str]:
    """What each kernel makes, those joined that go over the same alike."""
    found = with_siblings(step, [iterations.get(k.makes[0]) for k in step.kernels])
    assert sorted(name for k in step.kernels for name in k.makes) == sorted(
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


# Of two trips side by side each turns its own product over, and both read the bias.
TRIPS = stored(
    ("b", "", 64), ("p", "", 64), ("t", "pb", 64), ("q", "", 64), ("u", "qb", 64), ("y", "t", 1),
    ("z", "u", 1), kept="yz",
)  # fmt: skip


def test_element_wise_work_that_reads_the_same_runs_as_one() -> None:
    assert joined(TRIPS, t=ITEMS, u=ITEMS) == ["b", "p", "q", "tu", "y", "z"]
    assert joined(TRIPS) == list(made(TRIPS))
    # One number, such as the rate at which both are updated, does not join them.
    rate = replace(TRIPS, nbytes={**TRIPS.nbytes, "b": 4})
    assert joined(rate, t=ITEMS, u=ITEMS) == list(made(TRIPS))
    # A look-up that only a collective reads runs by itself.
    reduced = [
        replace(k, group=("all-reduce", ("data",), "float32")) if k.makes == ("z",)
        else replace(k, picks=k.makes == ("u",), is_light=True)
        for k in TRIPS.kernels
    ]  # fmt: skip
    looked_up = replace(TRIPS, kernels=tuple(reduced))
    assert joined(looked_up, t=ITEMS, u=ITEMS) == list(made(TRIPS))


def test_element_wise_work_is_joined_across_other_work_that_does_not_wait_for_it() -> None:
    # What is made of s waits for t or not; u, made of the first of it, cannot run before that.
    step = stored(
        ("s", "", 64), ("x", "", 64), ("a", "s", 64), ("t", "x", 64), ("p", "a", 64),
        ("g", "st", 64), ("u", "sp", 64), kept="gu",
    )  # fmt: skip
    iterations = dict.fromkeys("atgu", ITEMS)
    assert joined(step, **iterations) == ["s", "x", "t", "ag", "p", "u"]


def test_what_begins_to_wait_when_it_is_joined_waits_for_all_that_comes_later() -> None:
    # a waits for b once c has joined it, and so for t once d has joined b: t and w cannot be one.
    step = stored(
        ("p", "", 64), ("q", "", 64), ("r", "", 64), ("a", "p", 64), ("b", "q", 64),
        ("c", "pb", 64), ("t", "r", 64), ("d", "qt", 64), ("z", "a", 64), ("w", "rz", 64),
        kept="cdw",
    )  # fmt: skip
    assert {"ac", "bd", "t", "w"} <= set(joined(step, **dict.fromkeys("abctdw", ITEMS)))


# Two losses, p of x and q of y, the sum of both, s, and the gradients G and H that read one each.
LOSSES = stored(
    ("x", "", 64), ("p", "x", 64), ("G", "p", 64),
    ("y", "", 64), ("q", "y", 64), ("H", "q", 64), ("s", "pq", 1), kept="GHs",
)  # fmt: skip


def test_a_sum_runs_with_what_makes_what_it_sums_up() -> None:
    """So the gradient of one loss waits for the other, of which it needs nothing."""
    assert joined(LOSSES, p=ITEMS, s=SUMS) == ["x", "y", "q", "ps", "G", "H"]
    assert joined(LOSSES, p=replace(ITEMS, sizes=(64,)), s=SUMS) == list(made(LOSSES))
    # The mean is of what is made, and so is the spread: it waits for the mean.
    mean = stored(("p", "", 64), ("d", "p", 64), ("s", "pd", 1), kept="s")
    assert joined(mean, p=ITEMS, s=SUMS) == ["p", "d", "s"]


def test_a_sum_runs_with_what_reads_the_same_and_does_not_wait_for_it() -> None:
    """As that for a norm's scale does with the gradient of what went into the norm."""
    norm = stored(
        ("x", "", 64), ("y", "", 64), ("m", "xy", 1), ("d", "xym", 64), ("g", "xy", 1), kept="dg"
    )
    other = replace(SUMS, dims=(0,))
    assert joined(norm, m=SUMS, d=ITEMS, g=SUMS) == ["x", "y", "mg", "d"]
    assert joined(norm, m=other, d=ITEMS, g=SUMS) == ["x", "y", "m", "dg"]
    assert joined(norm, m=SUMS, d=ITEMS, g=replace(SUMS, sizes=(64, 32))) == list("xymdg")


@given(st.data())
def test_no_two_that_are_joined_wait_for_each_other(data: st.DataObject) -> None:
    names = "abcdefghijklmnopqrst"[: data.draw(st.integers(1, 20))]
    kernels: list[tuple[str, str, int]] = []
    for k, name in enumerate(names):
        reads = data.draw(st.sets(st.sampled_from(names[:k]), max_size=3)) if k else set[str]()
        kernels.append((name, "".join(sorted(reads)), data.draw(st.sampled_from([4, 64]))))
    kinds = [ITEMS, ITEMS, SUMS, replace(SUMS, dims=(0,)), TURNS, replace(ITEMS, sizes=(4,))]
    iterations = {
        name: data.draw(st.sampled_from(kinds))
        for name in sorted(data.draw(st.sets(st.sampled_from(names))))
    }
    step = stored(*kernels, kept=names[-1])
    read_by = {k.makes[0]: k.reads for k in step.kernels}
    for group in joined(step, **iterations):
        for name in group if len(group) > 1 else "":
            read = read_by[name].intersection(group)
            assert all(iterations[r].kind == "items" for r in read), (
                "a sum is read where it is made"
            )
        sums = [
            iterations[name]
            for name in group
            if len(group) > 1 and iterations[name].kind != "items"
        ]
        assert len(set(sums)) <= 1
        assert len(sums) <= max((p.most for p in sums), default=0)


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
    other = replace(SUMS, dims=(0,))
    # b waits for a, and d for c: as b runs with c, a may not run with d.
    assert joined(chain, a=SUMS, b=other, c=other, d=SUMS) == ["p", "a", "bc", "d"]


def test_no_more_run_as_one_than_a_core_holds() -> None:
    step = stored(("p", "", 16), *((name, "p", 1) for name in "abcde"), kept="abcde")
    assert joined(step, **dict.fromkeys("abcde", SUMS)) == ["p", "ab", "cd", "e"]


def across(axes: str, scores: str) -> Iteration | None:
    """How a sum along some axes of the transpose of scores goes over them."""
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
    assert iteration_of(block, sizes, replace(last, alone=True)) is None
    return iteration_of(block, sizes, last)


def test_fewer_sums_over_columns_than_over_rows_run_as_one() -> None:
    """Scores lie as their product makes them, keys outermost: to sum them up goes over columns."""
    product = (
        "%s: f32[4,64,32,2] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((2,), (3,)), ((0,), (0,)))}"
    )
    assert across("3", product) == Iteration((4, 2, 32, 64), "sum", (3,), 2)
    by_row = across("3", "%s: f32[4,64,32,2] = abs(%r) forward")
    assert by_row == Iteration((4, 2, 32, 64), "sum", (3,), 8)


def test_what_is_summed_in_windows_is_no_sum_of_all() -> None:
    """It makes about as much as it reads."""
    graph = graph_of(
        "%p: f32[2,8,8,4] = reduce_window_sum(%x) forward {base_dilation=(1, 1, 1, 1), "
        "padding=((0, 0), (1, 1), (1, 1), (0, 0)), window_dilation=(1, 1, 1, 1), "
        "window_dimensions=(1, 3, 3, 1), window_strides=(1, 1, 1, 1)}",
        inputs='%x: f32[2,8,8,4] batch "x"', returns='%p "p"',
    )  # fmt: skip
    block, sizes = listing(graph).block, Sizes(graph, ONE)
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    (kernel,) = stored_kernels(block, sizes, given, lambda *_: 0).kernels
    found = iteration_of(block, sizes, kernel)
    assert found is None or found.kind == "items"


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
    as_run = with_siblings(found, [iteration_of(block, sizes, k) for k in found.kernels])
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
