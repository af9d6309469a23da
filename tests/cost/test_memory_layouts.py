"""What XLA for GPUs stores where values lie in other orders than their readers want."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autopar.cluster.chip import Platform
from autopar.cost.kernels import Kernel, Stored, stored_kernels
from autopar.cost.layouts import Layouts, Order
from autopar.cost.order import lightened
from autopar.cost.sizes import Sizes
from autopar.ir.graph import Graph
from autopar.ir.listing import Block, Collective, Fence, ListingStep, LocalOp, Move, MoveStep
from autopar.ir.sharding import MeshShape, Sharding, replicated
from autopar.ir.values import Value
from tests.cost.test_memory import ONE, dot, graph_of, listing


def kernels_of(
    graph: Graph, platform: Platform = "gpu", steps: tuple[ListingStep, ...] = ()
) -> list[Kernel]:
    """The kernels of a graph, in its order, or of its own steps."""
    block = listing(graph).block
    block = Block(block.inputs, steps or block.instructions, block.outputs)
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    return list(stored_kernels(block, Sizes(graph, ONE, platform), given, lambda *_: 0).kernels)


def made(kernels: list[Kernel]) -> list[tuple[str, ...]]:
    """What each kernel makes."""
    return [kernel.makes for kernel in kernels]


# -- look-ups --------------------------------------------------------------------------------------

# Rows of a table that three products read, each computed in another way.
LOOK_UP = (
    "%t: f32[512,64] = neg(%w) forward",
    "%r: f32[64,64] = gather(%t, %i) forward {dimension_numbers=(('offset_dims', (1,)), "
    "('collapsed_slice_dims', (0,)), ('start_index_map', (0,)), ('operand_batching_dims', ()), "
    "('start_indices_batching_dims', ())), fill_value=None, indices_are_sorted=False, "
    "mode='clip', slice_sizes=(1, 64), unique_indices=False}",
)
INPUTS = '%w: f32[512,64] batch "w",\n%i: i32[64,1] batch "i",\n%x: f32[64,64] batch "x"'


def read_thrice(name: str) -> tuple[str, ...]:
    """Three sums that read a value."""
    return tuple(
        f"%s{k}: f32[64] = reduce_sum(%e{k}) forward {{axes=(1,), out_sharding=None}}"
        if kind == "sum"
        else f"%e{k}: f32[64,64] = {kind}({name}) forward"
        for k, work in enumerate(("abs", "neg", "sign"))
        for kind in (work, "sum")
    )


SUMS = '%s0 "a", %s1 "b", %s2 "c"'


def test_what_is_looked_up_is_looked_up_again_by_each_reader() -> None:
    """A reader loads but the rows, so that the whole table is held until the last of them."""
    graph = graph_of(*LOOK_UP, *read_thrice("%r"), inputs=INPUTS, returns=SUMS)
    kernels = kernels_of(graph)
    assert made(kernels) == [("%s0",), ("%s1",), ("%s2",)]
    assert all("%w" in kernel.reads for kernel in kernels)


def test_what_is_added_to_a_look_up_is_stored_with_it() -> None:
    """A token's embedding with that of its position."""
    graph = graph_of(
        *LOOK_UP, "%y: f32[64,64] = add(%r, %x) forward", *read_thrice("%y"),
        inputs=INPUTS, returns=SUMS,
    )  # fmt: skip
    assert made(kernels_of(graph))[0] == ("%y",)


def test_a_look_up_that_only_a_collective_reads_runs_by_itself() -> None:
    """The logit of a target, which the loss alone needs, holds all logits until then."""

    def order(reader: str) -> list[str]:
        group = ("reduce-scatter", ("data",), "f32") if reader == "collective" else None
        kernels = (
            Kernel(0, ("logits",), frozenset(), is_light=False),
            Kernel(1, ("more",), frozenset(("logits",))),
            Kernel(2, ("target",), frozenset(("logits",)), is_light=True, picks=True),
            Kernel(3, ("loss",), frozenset(("target",)), group=group),
        )
        nbytes = {"logits": 4096, "more": 4096, "target": 4, "loss": 4}
        return [k.makes[0] for k in lightened(Stored(kernels, nbytes, frozenset())).kernels]

    assert order("collective") == ["logits", "more", "target", "loss"]
    assert order("work") == ["logits", "target", "more", "loss"]


# -- products --------------------------------------------------------------------------------------


def turned_pair(*readers: str, returns: str) -> Graph:
    """Two dims of batch, and %p [b, h, s, t, g] that is computed of %s in the order of its dims."""
    return graph_of(
        "%s: f32[4,3,16,32,2] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((3,), (4,)), ((0, 1), (0, 1)))}",
        "%p: f32[4,3,16,32,2] = exp(%s) forward",
        *readers,
        inputs='%k: f32[4,3,16,8] batch "k",\n%q: f32[4,3,32,2,8] batch "q"',
        returns=returns,
    )


# Keeps t and g of [s, t, g], and sums s up: XLA makes one dim of t and g, and wants it first.
KEEPS_TWO = (
    "%y: f32[4,3,32,2,8] = dot_general(%p, %k) forward "
    "{dimension_numbers=(((2,), (2,)), ((0, 1), (0, 1)))}"
)
# Keeps s, and sums t and g up: they lie so.
SUMS_TWO = (
    "%z: f32[4,3,16,8] = dot_general(%p, %q) forward "
    "{dimension_numbers=(((3, 4), (2, 3)), ((0, 1), (0, 1)))}"
)


def test_a_product_with_dims_of_batch_wants_several_kept_dims_before_its_sum() -> None:
    graph = turned_pair(KEEPS_TWO, returns='%y "y"')
    assert made(kernels_of(graph)) == [("%s",), ("%p as 0,1,3,4,2",), ("%y",)]


@pytest.mark.parametrize(("summed", "copies"), [(16, {"%s": "%s as 0,1,2,4,3"}), (1, {})])
def test_a_dim_that_is_one_long_on_a_device_has_no_order(
    summed: int, copies: Mapping[str, str]
) -> None:
    """What is summed lies between two dims that are kept, but for where a device has one of it."""
    graph = graph_of(
        "%s: f32[4,3,32,16,2] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((3,), (4,)), ((0, 1), (0, 1)))}",
        "%y: f32[4,3,32,2,8] = dot_general(%s, %v) forward "
        "{dimension_numbers=(((3,), (2,)), ((0, 1), (0, 1)))}",
        inputs='%k: f32[4,3,32,8] batch "k",\n%q: f32[4,3,16,2,8] batch "q",\n'
        '%v: f32[4,3,16,8] batch "v"',
        returns='%y "y"',
    )
    scores, mixed = graph.ops
    layouts = Layouts({}, "gpu")
    assert not layouts.product(scores, ("%k", "%q"), "%s", (4, 3, 32, summed, 2))
    assert layouts.product(mixed, ("%s", "%v"), "%y", (4, 3, 32, 2, 8)) == copies


@pytest.mark.parametrize(("is_turned", "wanted"), [(False, "2,0,1"), (True, "0,1,2")])
def test_a_product_that_is_turned_over_takes_its_operands_the_other_way_round(
    is_turned: bool, wanted: str
) -> None:
    """The gradient of a weight: XLA puts what stood on the first side on the second."""
    graph = graph_of(
        "%w: f32[64,32] = dot_general(%g, %x) forward "
        "{dimension_numbers=(((0, 1), (0, 1)), ((), ()))}",
        inputs='%g: f32[8,16,64] batch "g",\n%x: f32[8,16,32] batch "x"', returns='%w "w"',
    )  # fmt: skip
    layouts = Layouts({}, "gpu", {"%w"} if is_turned else frozenset())
    layouts.orders.gathered("%g", 1, (8, 16, 64))
    copies = layouts.product(graph.ops[0], ("%g", "%x"), "%w", (64, 32))
    assert copies == {"%g": f"%g as {wanted}"}


# -- padded products -------------------------------------------------------------------------------


def scores_of(rows: int, dtype: str, platform: Platform = "gpu") -> dict[str, int]:
    """The items that are stored for a product of queries and keys, and for one that reads those."""
    graph = graph_of(
        f"%s: {dtype}[4,{rows},{rows}] = dot_general(%q, %k) forward "
        "{dimension_numbers=(((2,), (2,)), ((0,), (0,)))}",
        f"%y: {dtype}[4,{rows},32] = dot_general(%s, %k) forward "
        "{dimension_numbers=(((2,), (1,)), ((0,), (0,)))}",
        inputs=f'%q: {dtype}[4,{rows},32] batch "q",\n%k: {dtype}[4,{rows},32] batch "k"',
        returns='%s "s", %y "y"',
    )
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    found = stored_kernels(listing(graph).block, Sizes(graph, ONE, platform), given, lambda *_: 0)
    item = 2 if dtype == "bf16" else 4
    return {name: found.nbytes[name] // item for k in found.kernels for name in k.makes}


def test_matrices_of_two_byte_numbers_are_padded_for_tensor_cores() -> None:
    """Two products have one copy of the keys, which both take as they lie."""
    whole, cut = 4 * 56 * 56, 4 * 56 * 32
    assert scores_of(49, "bf16") == {
        "%q padded as 0,1,2": cut, "%k padded as 0,1,2": cut, "%s": whole,
        "%s padded as 0,1,2": whole, "%y": cut,
    }  # fmt: skip
    for plain in (scores_of(48, "bf16"), scores_of(49, "f32"), scores_of(49, "bf16", "tpu")):
        assert plain.keys() == {"%s", "%y"}


@pytest.mark.parametrize(("axis", "is_stored"), [(2, True), (1, False)])
def test_what_is_made_of_rows_and_their_sums_is_padded_by_a_kernel_of_its_own(
    axis: int, is_stored: bool
) -> None:
    """Triton, which goes along rows, pads nothing. Of sums of columns all is made padded."""
    spread = (0, 1) if axis == 2 else (0, 2)
    graph = graph_of(
        "%s: bf16[4,49,49] = dot_general(%q, %q) forward "
        "{dimension_numbers=(((2,), (2,)), ((0,), (0,)))}",
        f"%m: bf16[4,49] = reduce_max(%s) forward {{axes=({axis},), out_sharding=None}}",
        "%w: bf16[4,49,49] = broadcast_in_dim(%m) forward "
        f"{{shape=(4, 49, 49), broadcast_dimensions={spread}, sharding=None}}",
        "%p: bf16[4,49,49] = sub(%s, %w) forward",
        "%y: bf16[4,49,32] = dot_general(%p, %q) forward "
        "{dimension_numbers=(((2,), (1,)), ((0,), (0,)))}",
        inputs='%q: bf16[4,49,32] batch "q"',
        returns='%y "y"',
    )
    pieces = {name for names in made(kernels_of(graph)) for name in names}
    assert "%p padded as 0,1,2" in pieces
    assert ("%p" in pieces) == is_stored


def test_one_kernel_writes_a_value_as_it_lies_and_turned_over() -> None:
    graph = turned_pair(KEEPS_TWO, SUMS_TWO, returns='%y "y", %z "z"')
    assert made(kernels_of(graph)) == [("%s",), ("%p", "%p as 0,1,3,4,2"), ("%y",), ("%z",)]


def test_products_with_one_dim_of_batch_read_one_copy() -> None:
    """Queries and group lie side by side in the order of the dims, keys and queries as they lie."""
    graph = graph_of(
        "%s: f32[4,64,32,16] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((2,), (3,)), ((0,), (0,)))}",
        "%e: f32[4,16,32,64] = transpose(%s) forward {permutation=(0, 3, 2, 1)}",
        "%w: f32[4,16,32,64] = exp(%e) forward",
        "%y: f32[4,8,16,32] = dot_general(%k, %w) forward "
        "{dimension_numbers=(((1,), (3,)), ((0,), (0,)))}",
        "%z: f32[4,8,64] = dot_general(%g, %w) forward "
        "{dimension_numbers=(((1, 2), (1, 2)), ((0,), (0,)))}",
        inputs='%k: f32[4,64,8] batch "k",\n%q: f32[4,32,16,8] batch "q",\n'
        '%g: f32[4,16,32,8] batch "g"',
        returns='%y "y", %z "z"',
    )
    assert made(kernels_of(graph)) == [("%s",), ("%w as 0,1,2,3",), ("%y",), ("%z",)]


BATCHED = "{dimension_numbers=(((3,), (2,)), ((0,), (0,)))}"


def test_the_product_that_is_visited_first_gives_the_order() -> None:
    """Scores that a backward pass computes once more, after the gradient that it reads with them.

    What is given back first leads to the scores without the gradient.
    """
    ops = (
        f"%g: f32[4,2,32,64] = dot_general(%p, %k) forward {BATCHED}",
        "%s: f32[4,64,32,2] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((2,), (3,)), ((0,), (0,)))}",
        "%e: f32[4,2,32,64] = transpose(%s) forward {permutation=(0, 3, 2, 1)}",
        "%t: f32[4,2,32] = reduce_sum(%e) forward {axes=(3,), out_sharding=None}",
        "%y: f32[4,2,32,64] = mul(%e, %g) forward",
    )
    inputs = '%k: f32[4,64,8] batch "k",\n%q: f32[4,32,2,8] batch "q",\n%p: f32[4,2,32,8] batch "p"'
    scores_first = kernels_of(graph_of(*ops, inputs=inputs, returns='%t "t", %y "y"'))
    assert ("%g as 0,3,2,1",) in made(scores_first)
    gradient_first = [*ops[:-1], "%y: f32[4,2,32,64] = mul(%g, %e) forward"]
    other = kernels_of(graph_of(*gradient_first, inputs=inputs, returns='%y "y", %t "t"'))
    assert made(other) == [("%g",), ("%s",), ("%t",), ("%y",)]  # %s is turned over in tiles


@pytest.mark.parametrize(("group", "is_tiled"), [(2, True), (3, False), (4, True), (9, True)])
def test_tiles_take_short_dims_that_are_powers_of_two(group: int, is_tiled: bool) -> None:
    """Of queries in groups of three XLA loads each score by itself, as its H100 timeline has it."""
    scores = Order((0, 4, 3, 2), (4, 64, 32, group), 0, "%s")  # [batch, key, query, group]
    assert scores.is_tiled((0, 2, 3, 4)) is is_tiled
    assert scores.is_tiled((0, 3, 2, 4))  # which turns [query, group] over as one


def test_what_is_computed_of_a_copy_waits_for_all_else_that_it_is_computed_of() -> None:
    graph = graph_of(
        "%s: f32[4,64,32,2] = dot_general(%k, %q) forward "
        "{dimension_numbers=(((2,), (3,)), ((0,), (0,)))}",
        "%e: f32[4,2,32,64] = transpose(%s) forward {permutation=(0, 3, 2, 1)}",
        f"%g: f32[4,2,32,64] = dot_general(%p, %k) forward {BATCHED}",
        "%h: f32[4,2,32,64] = add(%g, %b) forward",
        "%y: f32[4,2,32,64] = mul(%e, %h) forward",
        inputs='%k: f32[4,64,8] batch "k",\n%q: f32[4,32,2,8] batch "q",\n'
        '%p: f32[4,2,32,8] batch "p",\n%b: f32[4,2,32,64] batch "b"',
        returns='%y "y"',
    )
    reads = {kernel.makes[0]: kernel.reads for kernel in kernels_of(graph)}
    assert reads["%g as 0,3,2,1"] == {"%g"}
    assert reads["%y"] == {"%s", "%g as 0,3,2,1", "%b"}


# -- collectives -----------------------------------------------------------------------------------


def exchanged(graph: Graph, dim: int, to_dim: int, platform: Platform = "gpu") -> list[Kernel]:
    """The kernels where an all-to-all takes what the first op makes, and splits it anew."""
    block = listing(graph).block
    first, *rest = block.instructions
    assert isinstance(first, LocalOp)
    (result,), (value,) = first.results, graph.ops[0].results
    axes, dims = ("data",), range(len(value.shape))
    before, after = (Sharding(tuple(axes * (d == at) for d in dims)) for at in (dim, to_dim))
    move = Move(
        value, "%raw", result, before, after, (MoveStep("all-to-all", axes, dim, to_dim),),
        collectives=(Collective("all-to-all", axes, value.nbytes, 0.0),),
    )  # fmt: skip
    own = LocalOp(first.equation, first.operands, ("%raw",), *_lies(first))
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    sizes = Sizes(graph, MeshShape(axes, (1,)), platform)
    found = stored_kernels(
        Block(block.inputs, (own, move, *rest), block.outputs), sizes, given, lambda *_: 0
    )
    return list(found.kernels)


def joined(
    dim: int, *work: str, summed: int = 1, platform: Platform = "gpu"
) -> list[tuple[str, ...]]:
    """What is written of exp(b) and its sum, where an all-to-all has joined a dim of `a`."""
    graph = graph_of(
        "%a: f32[64,64] = tanh(%x) forward",
        *work,
        "%e: f32[64,64] = exp(%b) forward",
        f"%t: f32[64] = reduce_sum(%e) forward {{axes=({summed},), out_sharding=None}}",
        "%m: f32[64] = reduce_max(%a) forward {axes=(1,), out_sharding=None}",
        inputs='%x: f32[64,64] batch "x",\n%w: f32[64,64] batch "w",\n%v: f32[64] batch "v"',
        returns='%t "t", %m "m"',
    )
    return made(exchanged(graph, dim, 1 - dim, platform))


def _lies(run: LocalOp) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    return run.operand_shardings, run.result_shardings


WITH_ANOTHER = ("%b: f32[64,64] = sub(%a, %w) forward",)


def test_what_is_computed_of_a_dim_that_was_joined_is_stored_for_a_sum() -> None:
    """It lies in parts, which a sum by itself reads as they lie: the highest of all logits."""
    assert joined(1, *WITH_ANOTHER) == [("%raw",), ("%a",), ("%e",), ("%t",), ("%m",)]
    assert joined(0, *WITH_ANOTHER) == [("%raw",), ("%a",), ("%t",), ("%m",)]
    tpu = [joined(dim, *WITH_ANOTHER, platform="tpu") for dim in (0, 1)]
    assert tpu[0] == tpu[1]


@pytest.mark.parametrize("spread", ["%n", "%r"])
def test_a_sum_takes_what_is_spread_over_parts_but_along_the_joined_dim(spread: str) -> None:
    """Scores joined along heads are summed over keys as they lie; logits over words are not."""
    work = (
        "%n: f32[64,1] = broadcast_in_dim(%v) forward "
        "{broadcast_dimensions=(0,), shape=(64, 1), sharding=None}",
        "%r: f32[64,64] = broadcast_in_dim(%v) forward "
        "{broadcast_dimensions=(0,), shape=(64, 64), sharding=None}",
        f"%b: f32[64,64] = sub(%a, {spread}) forward",
    )
    assert joined(1, *work, summed=0) == [("%raw",), ("%a",), ("%t",), ("%m",)]
    assert joined(1, *work) == [("%raw",), ("%a",), ("%e",), ("%t",), ("%m",)]


# [batch, heads, keys, queries, group], of which an all-to-all splits groups, or queries.
@pytest.mark.parametrize(
    ("to_dim", "copy", "one_by_one"), [(4, "4,0,1,2,3", True), (3, "3,0,1,2,4", False)]
)
def test_an_all_to_all_sends_what_lies_with_the_dim_that_it_splits_outermost(
    to_dim: int, copy: str, one_by_one: bool
) -> None:
    """A group of two is too short for tiles: XLA loads each score by itself."""
    graph = turned_pair(SUMS_TWO, returns='%z "z"')
    found = {kernel.makes: kernel for kernel in exchanged(graph, 1, to_dim)}
    copied = found[f"%raw as {copy}",]
    assert copied.reads == {"%raw"}
    assert found["%s",].reads == set(copied.makes)
    assert (copied.wasted_bytes > 0) == one_by_one


def gathered_group(dtype: str) -> tuple[str, tuple[str, ...], str] | None:
    """With what a gather of a dtype may be combined."""
    graph = graph_of(dot("%a", "%x", "%x"), returns='%a "a"')
    cut = Sharding((("data",), ()))
    move = Move(
        Value("%x", (64, 64), dtype), "%x", "%x2", cut, replicated(2),
        (MoveStep("all-gather", ("data",), 0),),
        collectives=(Collective("all-gather", ("data",), 64 * 64 * 4, 0.0),),
    )  # fmt: skip
    (product,) = listing(graph).block.instructions
    assert isinstance(product, LocalOp)
    own = LocalOp(product.equation, ("%x2", "%x2"), product.results, *_lies(product))
    block = Block(("%x",), (move, own), ("%a",))
    sizes = Sizes(graph, MeshShape(("data",), (8,)))
    return stored_kernels(block, sizes, {"%x": 64 * 8 * 4}, lambda *_: 0).kernels[0].group


def test_what_only_a_product_makes_and_reads_is_held_for_a_sum_of_it() -> None:
    """XLA fuses the sum of a bias' gradient with element-wise work alone, and else runs it late."""

    def order(is_light: bool) -> list[str]:
        kernels = (
            Kernel(0, ("gradient",), frozenset()),
            Kernel(1, ("before",), frozenset(("gradient",)), is_light=is_light),
            Kernel(2, ("bias",), frozenset(("gradient",)), is_light=True),
        )
        nbytes = {"gradient": 4096, "before": 4096, "bias": 64}
        return [k.makes[0] for k in lightened(Stored(kernels, nbytes, frozenset())).kernels]

    assert order(is_light=True) == ["gradient", "bias", "before"]
    assert order(is_light=False) == ["gradient", "before", "bias"]


def test_a_gather_may_be_combined_with_those_of_other_dtypes() -> None:
    assert gathered_group("f32") == gathered_group("bf16")


# -- fences ----------------------------------------------------------------------------------------


def fenced(reads_again: bool) -> dict[str, frozenset[str]]:
    """What kernels read where a fence has a product's result, reshaped, that another one reads."""
    graph = graph_of(
        dot("%a", "%x", "%x"),
        "%r: f32[64,64] = reshape(%a) forward {new_sizes=(64, 64), dimensions=None, sharding=None}",
        dot("%b", "%r", "%x"),
        "%c: f32[64,64] = neg(%w) forward",
        dot("%d", "%c", "%r"),
        inputs='%x: f32[64,64] batch "x",\n%w: f32[64,64] batch "w"',
        returns='%b "b", %d "d"',
    )
    a, r, b, c, d = listing(graph).block.instructions
    assert isinstance(c, LocalOp)
    assert isinstance(d, LocalOp)
    fence = Fence(("%w", "%r"), ("%w2", "%r2"))
    c = LocalOp(c.equation, ("%w2",), c.results, *_lies(c))
    if reads_again:
        d = LocalOp(d.equation, ("%c", "%r2"), d.results, *_lies(d))
    return {k.makes[0]: k.reads for k in kernels_of(graph, steps=(a, r, b, fence, c, d))}


def test_a_fence_waits_for_no_reshaped_value_that_nobody_has_from_it() -> None:
    assert fenced(reads_again=False)["fence 3"] == {"%w"}
    assert fenced(reads_again=True)["fence 3"] == {"%w", "%a"}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("dim", "copied"), [(0, False), (1, True), (2, False)])
def test_a_product_has_a_gathered_dim_put_back_between_those_on_its_side(
    dim: int, copied: bool, named: bool
) -> None:
    """What is gathered lies with that dim outermost: b, a, d is not a matrix of (a b) rows.

    It does so under the other name, too, that a constraint gives it.
    """
    mesh = MeshShape(("data",), (8,))
    graph = graph_of(
        "%h: f32[8,16,64] = sharding_constraint(%x) forward",
        "%y: f32[8,16,64] = dot_general(%h, %w) forward "
        "{dimension_numbers=(((2,), (0,)), ((), ()))}",
        inputs='%x: f32[8,16,64] batch "x",\n%w: f32[64,64] state "w"', returns='%y "y"',
    )  # fmt: skip
    cut = Sharding(tuple(("data",) if d == dim else () for d in range(3)))
    gather = Move(
        Value("%x", (8, 16, 64), "f32"), "%x", "%g", cut, replicated(3),
        (MoveStep("all-gather", ("data",), dim),),
        collectives=(Collective("all-gather", ("data",), 8 * 16 * 64 * 4, 0.0),),
    )  # fmt: skip
    whole = replicated(3)
    name = LocalOp((0,), ("%g",), ("%h",), (whole,), (whole,))
    read = "%h" if named else "%g"
    product = LocalOp((1,), (read, "%w"), ("%y",), (whole, replicated(2)), (whole,))
    steps = (gather, name, product) if named else (gather, product)
    block = Block(("%x", "%w"), steps, ("%y",))
    given = {"%x": 8 * 2 * 64 * 4, "%w": 64 * 64 * 4}
    found = stored_kernels(block, Sizes(graph, mesh), given, lambda *_: 0).kernels
    between = [(f"{read} as 0,1,2",)] if copied else [("%h",)] if named else []
    assert made(list(found)) == [("%g",), *between, ("%y",)]


@pytest.mark.parametrize(("rows", "dim", "copied"), [(8, 0, False), (8, 1, True), (8, 2, False),
                                                     (1, 1, False)])  # fmt: skip
def test_a_product_is_written_once_more_to_be_scattered_along_a_dim_between_others(
    rows: int, dim: int, copied: bool
) -> None:
    """It is sent with that dim outermost: no product of rows (a b) makes b, a, d."""
    mesh = MeshShape(("data",), (8,))
    graph = graph_of(
        f"%y: f32[{rows},16,64] = dot_general(%x, %w) forward "
        "{dimension_numbers=(((2,), (0,)), ((), ()))}",
        inputs=f'%x: f32[{rows},16,64] batch "x",\n%w: f32[64,64] state "w"', returns='%y "y"',
    )  # fmt: skip
    cut = Sharding(tuple(("data",) if d == dim else () for d in range(3)))
    whole, nbytes = replicated(3), rows * 16 * 64 * 4
    scatter = Move(
        Value("%y", (rows, 16, 64), "f32"), "%raw", "%y", whole, cut,
        (MoveStep("reduce-scatter", ("data",), dim),),
        collectives=(Collective("reduce-scatter", ("data",), nbytes, 0.0),),
    )  # fmt: skip
    product = LocalOp((0,), ("%x", "%w"), ("%raw",), (whole, replicated(2)), (whole,))
    block = Block(("%x", "%w"), (product, scatter), ("%y",))
    given = {"%x": nbytes, "%w": 64 * 64 * 4}
    found = stored_kernels(block, Sizes(graph, mesh), given, lambda *_: 0).kernels
    between = [("%raw as 1,0,2",)] if copied else []
    assert made(list(found)) == [("%raw",), *between, ("%y",)]


@pytest.mark.parametrize(("batch", "copied"), [((8,), False), ((2, 4), True), ((1, 8), False)])
def test_one_batch_of_a_product_lies_between_its_rows_to_be_scattered_along_those(
    batch: tuple[int, ...], copied: bool
) -> None:
    """As the gradients of experts, of which BLAS writes one beside the other."""
    mesh, n = MeshShape(("data",), (8,)), len(batch)
    shape = ",".join(map(str, batch))
    dims = ", ".join(map(str, range(n))) + ","
    graph = graph_of(
        f"%y: f32[{shape},16,64] = dot_general(%x, %w) forward "
        f"{{dimension_numbers=((({n},), ({n},)), (({dims}), ({dims})))}}",
        inputs=f'%x: f32[{shape},32,16] batch "x",\n%w: f32[{shape},32,64] state "w"',
        returns='%y "y"',
    )
    whole = replicated(n + 2)
    cut = Sharding(tuple(("data",) if d == n else () for d in range(n + 2)))
    scatter = Move(
        Value("%y", (*batch, 16, 64), "f32"), "%raw", "%y", whole, cut,
        (MoveStep("reduce-scatter", ("data",), n),),
        collectives=(Collective("reduce-scatter", ("data",), 8 * 16 * 64 * 4, 0.0),),
    )  # fmt: skip
    product = LocalOp((0,), ("%x", "%w"), ("%raw",), (whole, whole), (whole,))
    block = Block(("%x", "%w"), (product, scatter), ("%y",))
    given = {"%x": 8 * 32 * 16 * 4, "%w": 8 * 32 * 64 * 4}
    found = stored_kernels(block, Sizes(graph, mesh), given, lambda *_: 0).kernels
    assert len(found) == 2 + copied


# -- what products take in two orders --------------------------------------------------------------


@pytest.mark.parametrize(("experts", "is_stored"), [(32, True), (1, False)])
def test_what_is_spread_out_and_turned_over_for_a_product_is_stored(
    experts: int, is_stored: bool
) -> None:
    """Slots of tokens sort these out to experts and bring them back, as in GShard's layers.

    One product sums over tokens, the other over experts and slots, which it wants last. One dim of
    them it takes either way: then nobody turns the slots over.
    """
    shape, kept = f"4,64,{experts},64", f"4,64,{experts}"
    graph = graph_of(
        f"%k: f32[{shape}] = broadcast_in_dim(%kept) forward {{broadcast_dimensions=(0, 1, 2), "
        f"shape=(4, 64, {experts}, 64), sharding=None}}",
        f"%s: f32[{shape}] = broadcast_in_dim(%slot) forward {{broadcast_dimensions=(0, 1, 3), "
        f"shape=(4, 64, {experts}, 64), sharding=None}}",
        f"%w: f32[{shape}] = mul(%k, %s) forward",
        f"%there: f32[{shape}] = neg(%w) forward", f"%back: f32[{shape}] = sign(%w) forward",
        f"%y: f32[4,{experts},64,32] = dot_general(%there, %x) forward "
        "{dimension_numbers=(((1,), (1,)), ((0,), (0,)))}",
        "%z: f32[4,64,32] = dot_general(%back, %y) forward "
        "{dimension_numbers=(((2, 3), (1, 2)), ((0,), (0,)))}",
        inputs=f'%kept: f32[{kept}] batch "kept",\n%slot: f32[4,64,64] batch "slot",\n'
        '%x: f32[4,64,32] batch "x"',
        returns='%z "z"',
    )  # fmt: skip
    written = made(kernels_of(graph))
    assert written[-4:] == [("%there",), ("%back",), ("%y",), ("%z",)]
    assert (("%w",) in written) == is_stored


# -- other dims of the same items ------------------------------------------------------------------


def reshaped(returns: str) -> list[tuple[str, ...]]:
    """What is stored of a value that a product reads with other dims, by two reshapes."""
    dims = "{dimension_numbers=(((1,), (0,)), ((), ()))}"
    graph = graph_of(
        "%t: f32[8,8,4,16] = reshape(%x) forward {new_sizes=(8, 8, 4, 16), dimensions=None}",
        "%r: f32[64,64] = reshape(%t) forward {new_sizes=(64, 64), dimensions=None}",
        f"%y: f32[64,64] = dot_general(%r, %w) forward {dims}",
        inputs='%x: f32[8,8,64] batch "x",\n%w: f32[64,64] state "w"',
        returns=returns,
    )
    return made(kernels_of(graph))


def test_a_reshaped_value_is_read_where_it_lies() -> None:
    assert reshaped('%y "y"') == [("%y",)]


def test_one_that_is_given_back_has_a_buffer_of_its_own() -> None:
    assert reshaped('%y "y",\n%r "r"') == [("%r",), ("%y",)]
