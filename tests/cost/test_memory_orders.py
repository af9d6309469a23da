"""The orders that XLA's schedulers choose between, and what their kernels read otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster.chip import Platform
from autopar.cost.kernels import Kernel, Stored, stored_kernels
from autopar.cost.liveness import buffers, most_bytes
from autopar.cost.memory import SPARE_SHARE, held_bytes
from autopar.cost.ops import is_product, is_reduction
from autopar.cost.order import (
    COMBINED_BYTES,
    RowWork,
    ahead,
    along_rows,
    begun_by_makers,
    combined,
    depth_first,
    least_first,
    lightened,
    needed,
    post_order,
)
from autopar.cost.siblings import Iteration, with_siblings
from autopar.cost.sizes import Sizes
from autopar.ir.graph import Graph
from autopar.ir.listing import Fence, Listing, LocalOp
from tests.cost.test_memory import ONE, dot, element, graph_of, listing


def stored(*kernels: tuple[str, str, int], kept: str = "") -> Stored:
    """Kernels by what each makes, what it reads, and the bytes of what it makes."""
    made = [Kernel(k, (name,), frozenset(reads)) for k, (name, reads, _) in enumerate(kernels)]
    return Stored(tuple(made), {name: n for name, _, n in kernels}, frozenset(kept))


def made(order: Stored) -> str:
    """What an order makes, one after the other."""
    return "".join(kernel.makes[0] for kernel in order.kernels)


@pytest.mark.smoke
def test_what_frees_the_most_runs_first() -> None:
    # The gradients of weights, w and v, free what they read; depth first they come last.
    step = stored(
        ("a", "", 64), ("b", "a", 64), ("c", "b", 64), ("w", "bc", 1), ("d", "c", 64),
        ("v", "ad", 1), ("e", "d", 64), kept="ewv",
    )  # fmt: skip
    light, deep = least_first(step), depth_first(step, ("e", "w", "v"))
    assert made(light).index("w") < made(light).index("d")
    assert most_bytes(light, ()) <= most_bytes(deep, ())


@given(st.data())
def test_every_order_runs_each_kernel_once_and_after_what_it_reads(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    names = "abcdefghijkl"[:count]
    kernels = [
        (name, "".join(data.draw(st.sets(st.sampled_from(names[:k])) if k else st.just(""))),
         data.draw(st.integers(0, 1000)))
        for k, name in enumerate(names)
    ]  # fmt: skip
    step = stored(*kernels, kept=names[-1])
    ends = (names[-1],)
    for order in (least_first(step), depth_first(step, ends), post_order(step, ends), ahead(step)):
        assert sorted(made(order)) == sorted(names)
        place = {name: k for k, name in enumerate(made(order))}
        assert all(place[r] < place[k.makes[0]] for k in order.kernels for r in k.reads)


@pytest.mark.parametrize(("nbytes", "is_begun"), [(4, True), (16, False)])
def test_a_sum_is_begun_by_the_work_that_makes_what_it_reads(nbytes: int, is_begun: bool) -> None:
    step = stored(("x", "", 64), ("y", "x", 64), ("s", "y", nbytes), ("z", "y", 64), kept="sz")
    light = tuple(replace(kernel, is_light=kernel.makes != ("x",)) for kernel in step.kernels)
    _, maker, total, other = begun_by_makers(replace(step, kernels=light))
    assert len(maker.makes) == 1 + is_begun
    assert total.reads == {maker.makes[-1]}
    assert other.reads == {"y"}
    assert needed([light[0], maker, total, other]) == needed(light)


def test_xla_also_tries_the_order_in_which_it_visits_a_program() -> None:
    # The first operand of what is returned runs first, however small it is, and whole: the greedy
    # order has both large ones at once, and the depth-first one the larger branch before.
    step = stored(
        ("a", "", 1), ("b", "", 9), ("A", "a", 90), ("B", "b", 99), ("c", "A", 1), ("d", "B", 1),
        ("e", "cd", 1), kept="e",
    )  # fmt: skip
    step = replace(step, visits={name: k for k, name in enumerate("aAcbBde")})
    assert made(post_order(step, ("e",))) == "aAcbBde"
    assert made(depth_first(step, ("e",))) == "bBdaAce"


def test_a_gather_starts_three_collectives_before_its_reader() -> None:
    kernels = [
        Kernel(k, (name,), frozenset(reads), group=("all-gather", ("data",), "f32"), is_early=True)
        if name.isupper()
        else Kernel(k, (name,), frozenset(reads))
        for k, (name, reads) in enumerate(
            [("A", ""), ("a", "A"), ("B", ""), ("b", "aB"), ("C", ""), ("c", "bC"), ("D", ""),
             ("d", "cD"), ("E", ""), ("e", "dE")]
        )
    ]  # fmt: skip
    step = Stored(tuple(kernels), dict.fromkeys("aAbBcCdDeE", 1), frozenset("e"))
    assert made(ahead(step)) == "ABCDaEbcde"


def test_collectives_that_wait_for_each_other_in_turn_stay_apart() -> None:
    # A and B run as one, after R: were S, which reads A, one with R, each would wait for the other.
    gather, reduce = (("all-gather", ("data",), "f32"), ("reduce-scatter", ("data",), "f32"))
    kernels = [
        Kernel(k, (name,), frozenset(reads), group=group, moved_bytes=1)
        for k, (name, reads, group) in enumerate(
            [("A", "", gather), ("R", "", reduce), ("B", "R", gather), ("S", "A", reduce)]
        )
    ]
    step = Stored(tuple(kernels), dict.fromkeys("ARBS", 1), frozenset("BS"))
    assert [k.makes for k in combined(step).kernels] == [("A", "B"), ("R",), ("S",)]


def combining(*steps: tuple[str, str], visited: str = "", nbytes: int = 4) -> list[str]:
    """What is combined of steps by what each makes and reads; what capitals make are gradients.

    They are summed up, and two of them may run as one.
    """
    group = ("all-reduce", ("data",), "f32")
    kernels = [
        Kernel(k, (made,), frozenset(reads), group=group, moved_bytes=COMBINED_BYTES // 2)
        if made.isupper()
        else Kernel(k, (made,), frozenset(reads))
        for k, (made, reads) in enumerate(steps)
    ]
    sizes = {made: nbytes if made.isdigit() else 2**20 for made, _ in steps}
    visits = {name: at for at, name in enumerate(visited)}
    step = Stored(tuple(kernels), sizes, frozenset(), visits=visits)
    return ["".join(k.makes) for k in combined(step).kernels if k.makes[0].isupper()]


def test_collectives_are_combined_from_the_first_output_on() -> None:
    assert combining(("A", ""), ("C", ""), ("B", ""), visited="ABC") == ["AB", "C"]
    assert combining(("A", ""), ("C", ""), ("B", "")) == ["AC", "B"]  # in the listing's order


def test_of_a_sum_of_numbers_the_last_is_visited_first() -> None:
    """A global norm of three gradients, which each of the three updates reads before its own."""
    gradients = ("A", ""), ("B", ""), ("C", "")
    squares = ("1", "A"), ("2", "B"), ("3", "C")
    updates = ("a", "A9"), ("b", "B9"), ("c", "C9")
    visited = "A1B2C39abc"
    steps = *gradients, *squares, ("9", "123"), *updates
    assert combining(*steps, visited=visited) == ["A", "BC"]
    assert combining(*steps, visited=visited, nbytes=2**20) == ["AB", "C"]  # these are no numbers


def test_a_loss_is_summed_up_beside_what_reads_the_same_sums_of_rows() -> None:
    """Of rows that devices share: A and B, which gradients read, and C, which the loss alone does.

    Without the loss C would come last.
    """
    gradients = ("g", "AB"), ("D", "g")
    steps = ("A", ""), ("B", "A"), *gradients, ("C", ""), ("1", "ABC")
    assert combining(*steps, visited="ABgDC1") == ["A", "BC", "D"]
    assert combining(*steps[:-1], visited="ABgDC") == ["A", "B", "DC"]


def test_what_runs_as_one_has_all_its_operands_visited_before_the_rest() -> None:
    """Gather Q is visited with gather P, and before it the sum D that it reads: before C and E."""
    gather, reduce = ("all-gather", ("data",), "f32"), ("all-reduce", ("data",), "f32")
    kernels = [
        Kernel(
            k, (name,), frozenset(reads), group=gather if name in "PQ" else reduce,
            moved_bytes=COMBINED_BYTES // 2,
        )
        for k, (name, reads) in enumerate([("P", ""), ("C", ""), ("E", ""), ("D", ""), ("Q", "D")])
    ]  # fmt: skip
    visits = {name: at for at, name in enumerate("PCEDQ")}
    step = Stored(tuple(kernels), dict.fromkeys("PQCDE", 1), frozenset("PQCDE"), visits=visits)
    assert [k.makes for k in combined(step).kernels] == [("P", "Q"), ("C", "D"), ("E",)]


def test_a_collective_that_runs_alone_holds_what_it_held_beside_those_that_are_combined() -> None:
    gather, reduce = ("all-gather", ("data",), "f32"), ("all-reduce", ("data",), "f32")
    kernels = [
        Kernel(k, (name,), frozenset(), scratch, group=group, moved_bytes=8)
        for k, (name, group, scratch) in enumerate(
            [
                ("A", reduce, 0),
                ("B", reduce, 0),
                ("C", gather, 5),
                ("D", ("all-reduce", ("model",), "f32"), 0),
            ]
        )
    ]
    step = Stored(tuple(kernels), dict.fromkeys("ABCD", 8), frozenset("ABCD"))
    found = {k.makes: k.scratch_bytes for k in combined(step).kernels}
    assert found == {("A", "B"): 16, ("C",): 5, ("D",): 0}


def test_gathers_that_run_as_one_hold_what_each_makes_for_a_slice() -> None:
    group = ("all-gather", ("data",), "")
    kernels = [Kernel(k, (n,), frozenset(), 5, group=group) for k, n in enumerate("AB")]
    step = Stored(tuple(kernels), dict.fromkeys("AB", 2), frozenset("AB"))
    assert [k.scratch_bytes for k in combined(step).kernels] == [10]


def test_one_that_is_too_large_is_passed_over() -> None:
    group = ("all-gather", ("data",), "f32")
    sizes = {"A": 2, "B": COMBINED_BYTES + 1, "C": 2, "D": COMBINED_BYTES - 3, "E": 1}
    kernels = [
        Kernel(k, (name,), frozenset(), group=group, moved_bytes=n)
        for k, (name, n) in enumerate(sizes.items())
    ]
    step = Stored(tuple(kernels), sizes, frozenset(sizes))
    assert [k.makes for k in combined(step).kernels] == [("A", "C"), ("B",), ("D", "E")]


@given(st.data())
@settings(max_examples=300)
def test_combined_collectives_can_be_put_in_an_order_that_runs(data: st.DataObject) -> None:
    kinds = [None, None, *(("all-gather", (axis,), "f32") for axis in "xyz")]
    kernels = [
        Kernel(
            k,
            (f"k{k}",),
            frozenset(f"k{n}" for n in data.draw(st.sets(st.integers(0, k - 1), max_size=3)))
            if k
            else frozenset(),
            group=data.draw(st.sampled_from(kinds)),
            moved_bytes=data.draw(st.sampled_from([1, COMBINED_BYTES // 3])),
        )
        for k in range(data.draw(st.integers(1, 24)))
    ]
    step = Stored(tuple(kernels), {k.makes[0]: 1 for k in kernels}, frozenset())
    order = depth_first(combined(step), ())
    place = {name: at for at, kernel in enumerate(order.kernels) for name in kernel.makes}
    assert sorted(place) == sorted(k.makes[0] for k in kernels)
    for at, kernel in enumerate(order.kernels):
        assert all(place[r] < at for r in kernel.reads)


def kernels_of(
    graph: Graph, platform: Platform = "gpu", program: Listing | None = None
) -> list[tuple[str, ...]]:
    """What is written, in the listing's order."""
    sizes = Sizes(graph, ONE, platform)
    given_bytes = {i.value.name: i.value.nbytes for i in graph.inputs}
    found = stored_kernels((program or listing(graph)).block, sizes, given_bytes, lambda *_: 0)
    return [kernel.makes for kernel in found.kernels]


def test_a_tpu_computes_what_its_products_read() -> None:
    graph = graph_of(
        dot("%a", "%x", "%x"), element("%e", "neg", "%a"), dot("%b", "%e", "%x"),
        returns='%b "y"',
    )  # fmt: skip
    assert kernels_of(graph) == [("%a",), ("%e",), ("%b",)]
    assert kernels_of(graph, "tpu") == [("%a",), ("%b",)]
    whole = listing(graph)
    stored = held_bytes(graph, whole, Sizes(graph, ONE)).peak_bytes
    beside = stored - 64 * 64 * 4
    assert held_bytes(graph, whole, Sizes(graph, ONE, "tpu")).peak_bytes <= (
        stored + int(beside * SPARE_SHARE)
    )


SCATTER = (
    "{dimension_numbers=(('update_window_dims', (1,)), ('inserted_window_dims', (0,)), "
    "('scatter_dims_to_operand_dims', (0,)), ('operand_batching_dims', ()), "
    "('scatter_indices_batching_dims', ())), indices_are_sorted=False, unique_indices=False, "
    "mode='clip', update_consts=()}"
)


def test_a_scatter_into_zeros_that_is_added_to_something_is_done_there() -> None:
    graph = graph_of(
        dot("%a", "%x", "%x"),
        element("%g", "mul", "%a, %a"),
        "%z: f32[64,64] = broadcast_in_dim(0.0:f32) forward "
        "{shape=(64, 64), broadcast_dimensions=(), sharding=None}",
        f"%s: f32[64,64] = scatter-add(%z, %i, %u) forward {SCATTER}",
        element("%t", "add_any", "%g, %s"),
        dot("%y", "%t", "%x"),
        inputs='%x: f32[64,64] batch "x",\n%i: i32[1,1] batch "i",\n%u: f32[1,64] batch "u"',
        returns='%y "y"',
    )
    assert kernels_of(graph) == [("%a",), ("%g",), ("%t",), ("%y",)]


BATCHED = "{dimension_numbers=(((2,), (2,)), ((0,), (0,)))}"


# %s lies by rows of its second dim in %e, and %g by those of its first.
TWO_ORDERS = (
    f"%s: f32[4,8,16] = dot_general(%k, %q) forward {BATCHED}",
    "%e: f32[4,16,8] = transpose(%s) forward {permutation=(0, 2, 1)}",
    f"%g: f32[4,16,8] = dot_general(%q, %k) forward {BATCHED}",
    "%n: f32[4,16,8] = neg(%g) forward",
)
TWO_INPUTS = '%q: f32[4,16,32] batch "q",\n%k: f32[4,8,32] batch "k"'


def test_element_wise_work_reads_what_lies_in_another_order() -> None:
    graph = graph_of(
        *TWO_ORDERS, "%y: f32[4,16,8] = mul(%e, %n) forward", inputs=TWO_INPUTS, returns='%y "y"'
    )
    assert kernels_of(graph) == [("%s",), ("%g",), ("%y",)]


SUMMED = "%t: f32[4,16] = reduce_sum(%y) forward {axes=(2,), out_sharding=None}"


@pytest.mark.parametrize(("other", "written"), [("%n", [("%g",), ("%y",)]), ("%e", [])])
def test_a_sum_reads_what_was_computed_across(other: str, written: list[tuple[str, ...]]) -> None:
    graph = graph_of(
        *TWO_ORDERS, f"%y: f32[4,16,8] = mul(%e, {other}) forward", SUMMED,
        inputs=TWO_INPUTS, returns='%t "t"',
    )  # fmt: skip
    assert kernels_of(graph) == [("%s",), *written, ("%t",)]


def test_what_is_behind_a_fence_lies_as_it_did_before() -> None:
    graph = graph_of(
        *TWO_ORDERS, "%y: f32[4,16,8] = mul(%e, %n) forward", SUMMED,
        inputs=TWO_INPUTS, returns='%t "t"',
    )  # fmt: skip
    whole = listing(graph)
    first, turned, *rest = whole.block.instructions
    assert isinstance(turned, LocalOp)
    fenced = replace(turned, operands=("%s2",))
    steps = (first, Fence(("%s",), ("%s2",)), fenced, *rest)
    program = replace(whole, block=replace(whole.block, instructions=steps))
    assert kernels_of(graph, program=program) == [
        ("%s",), ("fence 1",), ("%g",), ("%y",), ("%t",)
    ]  # fmt: skip


def test_a_product_has_the_dims_that_it_keeps_side_by_side() -> None:
    # The sum over %p's last dim keeps two dims, which lie in %s the other way round.
    graph = graph_of(
        "%s: f32[4,16,8,3] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((2,), (3,)), ((0,), (0,)))}",
        "%p: f32[4,3,8,16] = transpose(%s) forward {permutation=(0, 3, 2, 1)}",
        "%y: f32[4,3,8,32] = dot_general(%p, %k) forward "
        "{dimension_numbers=(((3,), (1,)), ((0,), (0,)))}",
        inputs='%q: f32[4,8,3,32] batch "q",\n%k: f32[4,16,32] batch "k"',
        returns='%y "y"',
    )
    assert kernels_of(graph) == [("%s",), ("%p as 0,1,2,3",), ("%y",)]


def test_a_gpu_turns_short_dims_over_item_by_item() -> None:
    # Two groups of heads lie innermost in %s and outermost of a row of the batch in %g.
    graph = graph_of(
        f"%s: f32[4,64,32,2] = dot_general(%k, %q) forward {BATCHED_Q}",
        "%e: f32[4,2,32,64] = transpose(%s) forward {permutation=(0, 3, 2, 1)}",
        "%g: f32[4,2,32,64] = dot_general(%p, %k) forward "
        "{dimension_numbers=(((3,), (2,)), ((0,), (0,)))}",
        "%y: f32[4,2,32,64] = mul(%e, %g) forward",
        inputs='%k: f32[4,64,8] batch "k",\n%q: f32[4,32,2,8] batch "q",\n'
        '%p: f32[4,2,32,8] batch "p"',
        returns='%y "y"',
    )
    copy = "%g as 0,3,2,1"
    assert kernels_of(graph) == [("%s",), ("%g",), (copy,), ("%y",)]
    assert kernels_of(graph, "tpu") == [("%s",), ("%g",), ("%y",)]
    given_bytes = {i.value.name: i.value.nbytes for i in graph.inputs}
    found = stored_kernels(listing(graph).block, Sizes(graph, ONE), given_bytes, lambda *_: 0)
    wasted = {k.makes[0]: k.wasted_bytes for k in found.kernels if k.wasted_bytes}
    assert wasted == {copy: 4 * 2 * 32 * 64 * (64 - 4)}  # of a transaction's 64 bytes it wants 4


BATCHED_Q = "{dimension_numbers=(((2,), (3,)), ((0,), (0,)))}"


@pytest.mark.parametrize(("heads", "copy"), [(1, "%p as 0,2,3,4"), (3, "%p as 0,1,4,2,3")])
def test_a_product_with_one_dim_of_batch_takes_its_sums_first_or_last(
    heads: int, copy: str
) -> None:
    # Sums first, [s, g, t] of [s, t, g], would turn two short dims over.
    graph = graph_of(
        f"%s: f32[4,{heads},64,32,2] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((3,), (4,)), ((0, 1), (0, 1)))}",
        f"%p: f32[4,{heads},2,32,64] = transpose(%s) forward {{permutation=(0, 1, 4, 3, 2)}}",
        f"%y: f32[4,{heads},16,2,32] = dot_general(%v, %p) forward "
        "{dimension_numbers=(((2,), (4,)), ((0, 1), (0, 1)))}",
        inputs=f'%k: f32[4,{heads},64,8] batch "k",\n%q: f32[4,{heads},32,2,8] batch "q",\n'
        f'%v: f32[4,{heads},64,16] batch "v"',
        returns='%y "y"',
    )
    assert kernels_of(graph) == [("%s",), (copy,), ("%y",)]


@pytest.mark.parametrize(("rows", "terms", "reduces"), [(1, 16, True), (2, 16, False),
                                                        (1, 2**20, False)])  # fmt: skip
def test_a_product_with_vectors_computes_what_it_reads(
    rows: int, terms: int, reduces: bool
) -> None:
    """XLA makes a multiplication and a reduction of it, but of large matrices."""
    right = f"%b: f32[4,{rows},{terms}]" if rows > 1 else f"%b: f32[4,{terms}]"
    made = f"f32[4,{rows},16]" if rows > 1 else "f32[4,16]"
    graph = graph_of(
        f"%e: f32[4,{terms},16] = exp(%a) forward",
        f"%y: {made} = dot_general(%b, %e) forward "
        f"{{dimension_numbers=((({2 if rows > 1 else 1},), (1,)), ((0,), (0,)))}}",
        inputs=f'%a: f32[4,{terms},16] batch "a",\n{right} batch "b"',
        returns='%y "y"',
    )
    product = graph.ops[-1]
    assert is_reduction(product) is reduces
    assert is_product(product) is not reduces
    kernels = stored_kernels(
        listing(graph).block, Sizes(graph, ONE), {"%a": 1, "%b": 1}, lambda *_: 0
    ).kernels
    assert [k.makes for k in kernels] == ([("%y",)] if reduces else [("%e",), ("%y",)])


def test_an_outer_product_is_computed_in_its_readers() -> None:
    graph = graph_of(
        "%o: f32[64,16,8] = dot_general(%x, %y) forward "
        "{dimension_numbers=(((), ()), ((0,), (0,)))}",
        "%e: f32[64,16,8] = exp(%o) forward",
        "%t: f32[64,16] = reduce_sum(%e) forward {axes=(2,), out_sharding=None}",
        inputs='%x: f32[64,16] batch "x",\n%y: f32[64,8] batch "y"',
        returns='%t "t"',
    )
    assert kernels_of(graph) == kernels_of(graph, "tpu") == [("%t",)]


def test_work_takes_the_place_of_work_but_of_no_product() -> None:
    """A product comes in a tuple, with its scratch, and so does each of several results."""

    def work(k: int, makes: str, reads: str) -> Kernel:
        return Kernel(k, tuple(makes), frozenset(reads), in_place=True, is_light=True)

    product = Kernel(0, ("p",), frozenset())
    rest = ("a", "p"), ("b", "a"), ("cd", "b"), ("e", "cd")
    kernels = (product, *(work(k, *names) for k, names in enumerate(rest, 1)))
    nbytes = dict.fromkeys("pabcde", 256)

    def held_at(gives_tuples: bool) -> dict[str, tuple[int, int]]:
        stored = Stored(kernels, nbytes, frozenset("e"), gives_tuples=gives_tuples)
        return {name: span for name, _, span in buffers(stored, ())}

    assert held_at(False) == {"p": (0, 5), "d": (3, 4)}
    assert held_at(True) == {"p": (0, 1), "a": (1, 4), "d": (3, 4), "e": (4, 5)}


def test_what_triton_sums_up_on_its_way_is_no_kernel() -> None:
    # A softmax of x, and a norm whose statistics, s, another kernel reads much later.
    step = stored(
        ("x", "", 64), ("m", "x", 1), ("e", "xm", 1), ("y", "xme", 64), ("s", "y", 1),
        ("n", "ys", 64), ("p", "n", 64), ("g", "ysp", 64), kept="g",
    )  # fmt: skip
    shape = (8, 8)
    work = [
        RowWork(shape, sums=k.makes[0] in "mes") if k.makes[0] in "meysng" else None
        for k in step.kernels
    ]
    joined = along_rows(step, work)
    assert [(k.makes[0], "".join(sorted(k.reads))) for k in joined.kernels] == [
        ("x", ""), ("y", "x"), ("s", "y"), ("n", "sy"), ("p", "n"), ("g", "psy"),
    ]  # fmt: skip
    assert [k.makes[0] for k in joined.kernels if k.alone] == ["y", "n", "g"]
    assert along_rows(step, [None] * len(work)) == step


def test_what_triton_runs_is_joined_with_nothing_else() -> None:
    # A softmax and a mask read the same, and so does the sum of a bias, which waits for its turn.
    step = stored(
        ("x", "", 64), ("m", "x", 1), ("y", "mx", 64), ("k", "x", 64), ("o", "", 64),
        ("b", "y", 1), kept="ykob",
    )  # fmt: skip
    light = [replace(k, is_light=k.makes[0] not in "xo") for k in step.kernels]
    work = [RowWork((8, 8), sums=k.makes[0] == "m") if k.makes[0] in "my" else None for k in light]
    alone = along_rows(replace(step, kernels=tuple(light)), work)
    assert [k.makes[0] for k in alone.kernels] == ["x", "y", "k", "o", "b"]
    iterations = [None, Iteration((8, 8)), Iteration((8, 8)), None, None]
    assert with_siblings(alone, iterations) == alone
    assert made(lightened(alone)) == "xykob"
    plain = replace(alone, kernels=tuple(replace(k, alone=False) for k in alone.kernels))
    assert len(with_siblings(plain, iterations).kernels) == 4
    assert made(lightened(plain)) == "xybko"
