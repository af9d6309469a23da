"""Seconds of listings, by hand."""

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost.few_blocks import columns_outermost
from autopar.cost.prices import Prices, elementwise_seconds, product_seconds
from autopar.cost.reshard import Resharder
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import Seconds, timed_listing
from autopar.ir.listing import Block, Fence, LocalOp, Move, MoveStep
from autopar.ir.record import parse_graph
from autopar.ir.sharding import MeshShape, replicated
from autopar.passes.base import Setting
from autopar.passes.shard.optimal import Optimal
from autopar.rules import attach_rules
from tests.lowering import lower_checked

DOT = """
graph step(%x: f32[64,512] batch "x", %w: f32[512,256] state "w") {
  %y: f32[64,256] = dot_general(%x, %w)
    flops=16777216 {dimension_numbers=(((1,), (0,)), ((), ()))}
  %z: f32[64,256] = tanh(%y) flops=16384
  %s: f32[] = reduce_sum(%z) flops=16384 {axes=(0, 1)}
  return %s
}
"""
ROWS = (("x", (("data",), ())), ("w", ((), ())))


def priced(count: int) -> tuple[Seconds, Prices]:
    """The step with its rows over so many devices."""
    graph = attach_rules(parse_graph(DOT))
    cluster, mesh = Cluster.parse("8xh100"), MeshShape.of((count,))
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=ROWS))
    prices = Prices(cluster, mesh)
    program = lower_checked(graph, sharding, Resharder(prices))
    return timed_listing(graph, program, prices).seconds, prices


def test_a_dot_and_a_fused_reduction() -> None:
    """On 8 devices the dot has an eighth of the work; tanh runs within the sum that reads it.

    An item of tanh takes an H100 as long as 9.9 bytes do.
    """
    seconds, prices = priced(8)
    x, w, y = 64 * 512 * 4 / 8, 512 * 256 * 4, 64 * 256 * 4 / 8
    dot = product_seconds(prices.cluster.chip, (1, 8, 256, 512), x + w + y, "f32")
    total = prices.elementwise(9.9 * 64 * 256 / 8)
    assert seconds.compute == pytest.approx(dot + total)
    assert seconds.communication == prices.collective("all-reduce", 4, ("data",))


def test_seconds_add_up() -> None:
    once = Seconds(1.0, 2.0, 0.5)
    assert once + once.times(2) == Seconds(3.0, 6.0, 1.5)
    assert once.times(3).total == 4.5  # what is hidden takes no time


@pytest.mark.parametrize("region", ["update", "backward"])
def test_work_of_one_shape_loads_each_piece_once(region: str) -> None:
    """One kernel makes the moments and the parameter of Adam: m, v, g and p in, three out."""
    piece = "f32[1024,1024]"
    text = f"""graph step(%p: {piece} state "p", %m: {piece} state "m", %v: {piece} state "v",
                          %g: {piece} batch "g") {{
      %m1: {piece} = add(%m, %g) {region}
      %v1: {piece} = mul(%v, %g) {region}
      %u: {piece} = div(%m1, %v1) {region}
      %p1: {piece} = sub(%p, %u) {region}
      return %p1 "p", %m1 "m", %v1 "v"
    }}"""
    seconds, prices = taken(text, *"pmvg")
    assert seconds == pytest.approx(prices.elementwise(7 * 1024 * 1024 * 4 / 8))


def test_work_that_other_work_lies_between_runs_apart() -> None:
    """The last product of items waits for one of matrices, of what the first work makes."""
    piece = "f32[1024,1024]"
    product = "flops=2147483648 {dimension_numbers=(((1,), (0,)), ((), ()))}"
    text = f"""graph step(%a: {piece} batch "a", %w: {piece} state "w") {{
      %x: {piece} = neg(%a)
      %y: {piece} = dot_general(%x, %w) {product}
      %z: {piece} = mul(%a, %y)
      return %x, %z
    }}"""
    seconds, prices = taken(text, "a")
    part = 1024 * 1024 * 4 / 8
    dot = product_seconds(prices.cluster.chip, (1, 128, 1024, 1024), 10 * part, "f32")
    assert seconds == pytest.approx(dot + sum(prices.elementwise(n * part) for n in (2, 3)))


@pytest.mark.parametrize(("width", "ends"), [(2048, "%y"), (2048, "%y, %m"), (16384, "%y")])
def test_a_softmax_loads_its_rows_once(width: int, ends: str) -> None:
    """Where its maxima are read elsewhere they are a kernel of their own, and so is all where rows
    are too long for a tile.
    """
    rows, piece = "f32[64]", f"f32[64,{width}]"
    along = f"{{broadcast_dimensions=(0,), shape=(64, {width})}}"
    text = f"""graph step(%x: {piece} batch "x") {{
      %m: {rows} = reduce_max(%x) {{axes=(1,)}}
      %b: {piece} = broadcast_in_dim(%m) {along}
      %d: {piece} = sub(%x, %b)
      %e: {piece} = exp(%d)
      %s: {rows} = reduce_sum(%e) {{axes=(1,)}}
      %c: {piece} = broadcast_in_dim(%s) {along}
      %y: {piece} = div(%e, %c)
      return {ends}
    }}"""
    graph, cluster = attach_rules(parse_graph(text)), Cluster.parse("8xh100")
    mesh = MeshShape.of((8,))
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=(("x", (("data",), ())),)))
    prices = Prices(cluster, mesh)
    seconds = timed_listing(
        graph, lower_checked(graph, sharding, Resharder(prices)), prices
    ).seconds
    x, row = 8 * width * 4, 8 * 4
    moved = {
        (2048, "%y"): (2 * x,),
        (2048, "%y, %m"): (x + row, 2 * x + row),
        (16384, "%y"): (x + row, 4.5 * x / 4, 2 * x + 2 * row),  # exp takes longer than its bytes
    }[width, ends]
    assert seconds.compute == pytest.approx(sum(prices.elementwise(n) for n in moved))


def taken(text: str, *pins: str, whole: bool = False) -> tuple[float, Prices]:
    """Seconds of a graph's work on 8 devices, the arguments named cut along their first dim.

    Sums of rows are made in parts where the listing says so, but not if they are `whole`.
    """
    graph, cluster, mesh = (
        attach_rules(parse_graph(text)),
        Cluster.parse("8xh100"),
        MeshShape.of((8,)),
    )
    lies = tuple((name, (("data",), ())) for name in pins)
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=lies))
    prices = Prices(cluster, mesh)
    listing = lower_checked(graph, sharding, Resharder(prices))
    if whole:
        steps = (
            replace(s, parts=()) if isinstance(s, LocalOp) else s
            for s in listing.block.instructions
        )
        listing = replace(listing, block=replace(listing.block, instructions=tuple(steps)))
    return timed_listing(graph, listing, prices).seconds.compute, prices


@pytest.mark.parametrize("ends", ["%y", "%y, %m"])
def test_a_norm_of_a_sum_is_one_kernel(ends: str) -> None:
    """It loads both terms and stores its result, as XLA's by Triton does.

    Where its means are read elsewhere, they and the sum of both are stored.
    """
    rows, piece = "f32[64]", "f32[64,2048]"
    along = "{broadcast_dimensions=(0,), shape=(64, 2048)}"
    text = f"""graph step(%a: {piece} batch "a", %b: {piece} batch "b") {{
      %x: {piece} = add(%a, %b)
      %m: {rows} = reduce_sum(%x) {{axes=(1,)}}
      %c: {piece} = broadcast_in_dim(%m) {along}
      %d: {piece} = sub(%x, %c)
      %q: {piece} = mul(%d, %d)
      %v: {rows} = reduce_sum(%q) {{axes=(1,)}}
      %w: {piece} = broadcast_in_dim(%v) {along}
      %y: {piece} = div(%d, %w)
      return {ends}
    }}"""
    seconds, prices = taken(text, "a", "b")
    x, row = 8 * 2048 * 4, 8 * 4
    moved = {"%y": (3 * x,), "%y, %m": (3 * x, x + row, 2 * x + row)}[ends]
    assert seconds == pytest.approx(sum(prices.elementwise(n) for n in moved))


def test_two_kernels_of_the_same_rows_each_compute_their_sum() -> None:
    """A softmax and its gradient load the scores; the sum of exponentials is stored by neither."""
    rows, piece = "f32[64]", "f32[64,2048]"
    along = "{broadcast_dimensions=(0,), shape=(64, 2048)}"
    text = f"""graph step(%x: {piece} batch "x", %g: {piece} batch "g") {{
      %e: {piece} = exp(%x)
      %s: {rows} = reduce_sum(%e) {{axes=(1,)}}
      %c: {piece} = broadcast_in_dim(%s) {along}
      %y: {piece} = div(%e, %c)
      %z: {piece} = mul(%g, %c)
      return %y, %z
    }}"""
    seconds, prices = taken(text, "x", "g")
    x = 8 * 2048 * 4
    assert seconds == pytest.approx(prices.elementwise(2 * x) + prices.elementwise(3 * x))


GELU = """
      %c: {kept} = integer_pow({h}) {{y=3}}
      %d: {kept} = mul(%c, 0.044715:f32[])
      %e: {kept} = add({h}, %d)
      %f: {kept} = mul(%e, 0.797884:f32[])
      %t: {kept} = tanh(%f)
      %u: {kept} = add(%t, 1.0:f32[])
      %v: {kept} = mul(%u, 0.5:f32[])
      %y: {kept} = mul({h}, %v)
"""


def with_bias(work: str, ends: str, inputs: str = "") -> str:
    """A product %p, the same with a bias %h, and work on them."""
    kept, wide = "f32[1024,2048]", "{broadcast_dimensions=(1,), shape=(1024, 2048)}"
    product = "flops=4294967296 {dimension_numbers=(((1,), (0,)), ((), ()))}"
    return f"""graph step(%x: f32[1024,1024] batch "x", %w: f32[1024,2048] state "w",
                          %b: f32[2048] state "b"{inputs}) {{
      %p: {kept} = dot_general(%x, %w) {product}
      %a: {kept} = broadcast_in_dim(%b) {wide}
      %h: {kept} = add(%p, %a)
      {work.format(kept=kept, h="%h")}
      return {ends}
    }}"""


@pytest.mark.parametrize(
    ("ends", "act", "fused"),
    [
        ("%y", GELU, True),
        ("%y, %p", GELU, False),  # the product's result is wanted itself
        ("%y", "%y: {kept} = tanh({h})\n", False),  # cuBLAS has no such epilogue
    ],
)
def test_gelu_behind_a_product_is_computed_before_that_stores(
    ends: str, act: str, fused: bool
) -> None:
    seconds, prices = taken(with_bias(act, ends), "x")
    x, w, y = 128 * 1024 * 4, 1024 * 2048 * 4, 128 * 2048 * 4
    nbytes = x + w + y + fused * 2048 * 4
    dot = product_seconds(prices.cluster.chip, (1, 128, 2048, 1024), nbytes, "f32")
    alone = prices.elementwise(max(2 * y + 2048 * 4, 9.9 * y / 4))
    assert seconds == pytest.approx(dot if fused else dot + alone)


@pytest.mark.parametrize(
    ("ends", "sums", "fused"),
    [
        ("%y", "%y: {kept} = add(%p, %c)", True),
        ("%y", "%y: {kept} = add(%c, %h)", True),
        ("%y, %p", "%y: {kept} = add(%p, %c)", False),  # the product's result is wanted itself
        ("%y", "%y: {kept} = mul(%p, %c)", False),
    ],
)
def test_a_product_adds_what_its_result_alone_is_added_to(
    ends: str, sums: str, fused: bool
) -> None:
    """As a residual stream is, with a bias before or without."""
    added = ', %c: f32[1024,2048] batch "c"'
    seconds, prices = taken(with_bias(sums, ends, added), "x", "c")
    x, w, y = 128 * 1024 * 4, 1024 * 2048 * 4, 128 * 2048 * 4
    nbytes = x + w + y + fused * y + ("%h" in sums) * 2048 * 4
    dot = product_seconds(prices.cluster.chip, (1, 128, 2048, 1024), nbytes, "f32")
    assert seconds == pytest.approx(dot if fused else dot + prices.elementwise(3 * y))


def test_a_product_adds_what_its_transpose_alone_is_added_to() -> None:
    """As a weight's gradient is, in a loop over microbatches: it is written in that order."""
    work = """%t: f32[2048,1024] = transpose(%p) {{permutation=(1, 0)}}
      %y: f32[2048,1024] = add(%c, %t)"""
    seconds, prices = taken(with_bias(work, "%y", ', %c: f32[2048,1024] state "c"'), "x")
    x, w, y = 128 * 1024 * 4, 1024 * 2048 * 4, 128 * 2048 * 4
    dims = (1, 128, 2048, 1024)
    assert seconds == product_seconds(prices.cluster.chip, dims, x + w + 2 * y, "f32")


@pytest.mark.parametrize(("rows", "faster"), [(262144, 20), (1048576, 2.5)])
def test_sums_over_rows_are_read_for_each_item(rows: int, faster: float) -> None:
    """XLA's model of H100s has 4 bytes an item come from a cache 2.5 times as fast as memory.

    Of a piece that takes less than 2 KiB of each of the 132 cores, from one 8 times as fast again.
    """
    sums, piece = f"f32[{rows}]", f"f32[{rows},64]"
    text = f"""graph step(%x: {piece} batch "x") {{
      %m: {sums} = reduce_max(%x) {{axes=(1,)}}
      %c: {piece} = broadcast_in_dim(%m) {{broadcast_dimensions=(0,), shape=({rows}, 64)}}
      %y: {piece} = sub(%x, %c)
      return %y, %m
    }}"""
    seconds, prices = taken(text, "x")
    x, m = rows * 64 * 4 / 8, rows * 4 / 8
    moved = (x + m, 2 * x + m + x / faster)
    assert seconds == pytest.approx(sum(map(prices.elementwise, moved)), rel=1e-6)


def test_a_sum_over_dims_of_one_is_no_kernel() -> None:
    text = """graph step(%x: f32[64,2048] batch "x") {
      %r: f32[64,2048,1] = reshape(%x) {new_sizes=(64, 2048, 1)}
      %s: f32[64,2048] = reduce_sum(%r) {axes=(2,)}
      %y: f32[64,2048] = neg(%s)
      return %y
    }"""
    seconds, prices = taken(text, "x")
    assert seconds == pytest.approx(prices.elementwise(2 * 8 * 2048 * 4))


def test_a_constraint_of_a_stored_value_is_no_kernel() -> None:
    text = """graph step(%x: f32[64,2048] batch "x") {
      %y: f32[64,2048] = neg(%x)
      %z: f32[64,2048] = sharding_constraint(%y)
      return %y, %z
    }"""
    seconds, prices = taken(text, "x")
    assert seconds == pytest.approx(prices.elementwise(2 * 8 * 2048 * 4))


def test_a_slice_is_all_that_is_loaded() -> None:
    text = """graph step(%x: f32[64,2048] batch "x", %y: f32[64,16] batch "y") {
      %s: f32[64,16] = slice(%x) {limit_indices=(64, 16), start_indices=(0, 0), strides=None}
      %z: f32[64,16] = add(%s, %y)
      return %z
    }"""
    seconds, prices = taken(text, "x", "y")
    assert seconds == pytest.approx(prices.elementwise(3 * 8 * 16 * 4))


# XLA's own microseconds of products of bf16 on an H100, from its timelines of the compared plans.
KNOWN = [
    ((1, 1024, 1024, 4096), 18.2), ((1, 4096, 1024, 1024), 17.3), ((1, 4096, 4096, 1024), 50.1),
    ((1, 1024, 768, 32768), 131.4), ((1, 1024, 32768, 768), 122.4), ((1, 2560, 3072, 768), 24.1),
    ((1, 2048, 4096, 4096), 91.3), ((1, 4096, 16032, 16384), 2758.0), ((1, 768, 768, 1024), 7.8),
    ((2, 512, 768, 1280), 9.3), ((8, 512, 320, 768), 13.9), ((16, 768, 160, 512), 18.1),
    ((32, 512, 48, 512), 10.1), ((64, 1024, 1024, 64), 39.6), ((8, 2048, 8192, 128), 74.7),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "microseconds"), KNOWN, ids=str)
def test_a_product_takes_what_it_takes_by_xlas_table(
    dims: tuple[int, ...], microseconds: float
) -> None:
    chip = Cluster.parse("8xh100").chip
    assert 1e6 * product_seconds(chip, dims, 0, "bf16") == pytest.approx(microseconds, rel=0.15)


@pytest.mark.parametrize(
    ("dims", "same", "parts"),
    [
        ((1, 16384, 1024, 2048), (1, 4096, 1024, 2048), 4.0),  # rows beyond XLA's longest
        ((1, 8192, 128, 8192), (1, 8192, 256, 8192), 0.5),  # half the columns of its smallest
        ((64, 512, 512, 512), (4, 512, 512, 512), 16.0),  # more batches than it has
    ],
)
def test_a_product_beyond_the_table_takes_so_many_of_its_parts(
    dims: tuple[int, ...], same: tuple[int, ...], parts: float
) -> None:
    chip = Cluster.parse("8xh100").chip
    busy, part = (product_seconds(chip, d, 0, "bf16") - chip.launch_seconds for d in (dims, same))
    assert busy == pytest.approx(parts * part)


def test_many_small_products_are_bound_by_memory() -> None:
    """Attention over 256 tokens, as `hlo.clock` has it."""
    chip, nbytes = Cluster.parse("8xh100").chip, 2 * 1024 * (256 * 256 + 2 * 256 * 64)
    taken = product_seconds(chip, (1024, 256, 256, 64), nbytes, "bf16")
    assert taken == pytest.approx(elementwise_seconds(chip, nbytes))


# -- few blocks ------------------------------------------------------------------------------------

# A bias's gradient, and the work that reads the same rows with a number of each column.
GRADIENTS = """graph step(%g: bf16[{rows},1024] batch "g", %b: bf16[1024] state "b") {{
  %s: bf16[1024] = reduce_sum(%g) {{axes=(0,)}}
  %c: bf16[{rows},1024] = broadcast_in_dim(%b) {{broadcast_dimensions=(1,), shape=({rows}, 1024)}}
  %h: bf16[{rows},1024] = {work}(%g, %c)
  return %s, %h
}}"""


@pytest.mark.parametrize("spread", ["whole", "by the work"])
def test_work_that_reads_what_is_summed_over_rows_runs_in_its_blocks(spread: str) -> None:
    """A block of an H100 loads 32 bytes in each of 1.98e9 cycles, and takes 128 columns of bf16."""
    text = GRADIENTS.format(rows=32768, work="mul")
    if spread == "by the work":  # lax.mul takes an operand whose dims are of one item
        text = text.replace("%c: bf16[32768,1024]", "%c: bf16[1,1024]")
        text = text.replace("shape=(32768, 1024)", "shape=(1, 1024)")
    seconds, prices = taken(text, "g", whole=True)
    g = 4096 * 1024 * 2
    loaded = 2 * g + 4 * 4096 * 1024  # for the sum, for the product, and a number for each item
    together = loaded / (8 * 32 * 1.98e9) + prices.elementwise(g)
    assert seconds == pytest.approx(together)
    # In 16 parts of 256 rows the sum has 128 blocks. It still runs with the work beside it, and a
    # kernel more sums the parts up.
    in_parts, _ = taken(text, "g")
    numbers = 0 if spread == "whole" else 1024 * 2
    beside = prices.elementwise(2 * g + numbers)
    assert in_parts == pytest.approx(beside + prices.elementwise(17 * 1024 * 2), rel=0.02)
    assert in_parts < 0.5 * together


@pytest.mark.parametrize("summed", ["g", "q"])
def test_work_that_joins_rows_with_their_own_sums_runs_without_a_sum_of_columns(
    summed: str,
) -> None:
    """Triton runs it; a sum of other rows XLA does not take for a softmax or a norm."""
    text = f"""graph step(%g: bf16[32768,1024] batch "g") {{
      %s: bf16[1024] = reduce_sum(%g) {{axes=(0,), out_sharding=None}}
      %q: bf16[32768,1024] = square(%g)
      %m: bf16[32768] = reduce_sum(%{summed}) {{axes=(1,), out_sharding=None}}
      %b: bf16[32768,1024] = broadcast_in_dim(%m) {{broadcast_dimensions=(0,), shape=(32768, 1024)}}
      %h: bf16[32768,1024] = sub(%g, %b)
      return %s, %h
    }}"""
    seconds, prices = taken(text, "g", whole=True)
    g = 4096 * 1024 * 2
    alone = g / (8 * 32 * 1.98e9) + prices.elementwise(2 * g)
    together = 2 * g / (8 * 32 * 1.98e9) + prices.elementwise(g)
    assert alone < 0.7 * together
    assert (seconds == pytest.approx(alone, rel=0.02)) == (summed == "g")
    assert summed == "g" or seconds >= together


def test_long_columns_are_split() -> None:
    seconds, prices = taken(GRADIENTS.format(rows=65536, work="mul"), "g")
    g, row = 8192 * 1024 * 2, 1024 * 2
    moved = (g + row, 2 * g + row)
    assert seconds == pytest.approx(sum(map(prices.elementwise, moved)))


SCATTER = (
    "{dimension_numbers=(('update_window_dims', (1,)), ('inserted_window_dims', (0,)), "
    "('scatter_dims_to_operand_dims', (0,)), ('operand_batching_dims', ()), "
    "('scatter_indices_batching_dims', ())), indices_are_sorted=False, unique_indices=False, "
    "mode='clip', update_consts=()}"
)


def test_a_scatter_has_a_thread_for_each_item() -> None:
    """It puts 4 rows of 64 items: two blocks of 128 threads, which load all that is there."""
    graph = attach_rules(
        parse_graph(f"""graph step(%a: f32[4096,64] batch "a", %i: i32[4,1] batch "i",
                                   %u: f32[4,64] batch "u") {{
          %y: f32[4096,64] = scatter-add(%a, %i, %u) {SCATTER}
          return %y
        }}""")
    )
    cluster, mesh = Cluster.parse("1xh100"), MeshShape.of((1,))
    prices = Prices(cluster, mesh)
    listing = lower_checked(
        graph, Optimal().run(graph, Setting(cluster, mesh, 2**60)), Resharder(prices)
    )
    nbytes = 4096 * 64 * 4
    assert timed_listing(graph, listing, prices).seconds.compute == pytest.approx(
        nbytes / (2 * 32 * 1.98e9) + prices.elementwise(nbytes)
    )


TANH = """graph step(%x: f32[64,512] batch "x") {
  %y: f32[64,512] = tanh(%x)
  return %y
}"""


@pytest.mark.parametrize(
    ("steps", "outermost"),
    [
        ((MoveStep("all-gather", ("data",), 1),), True),
        ((MoveStep("all-gather", ("data",), 0),), False),
        ((MoveStep("all-to-all", ("data",), 0, 1),), True),
        ((MoveStep("all-to-all", ("data",), 1, 0), MoveStep("all-gather", ("data",), 0)), False),
    ],
)
def test_what_collectives_go_along_lies_outermost(
    steps: tuple[MoveStep, ...], outermost: bool
) -> None:
    """What element-wise work makes of a value lies as it does."""
    graph, whole = attach_rules(parse_graph(TANH)), replicated(2)
    block = Block(
        ("%x",),
        (
            Move(graph.inputs[0].value, "%x", "%x@1", whole, whole, steps),
            LocalOp((0,), ("%x@1",), ("%y",), (whole,), (whole,)),
        ),
        ("%y",),
    )
    found = columns_outermost(block, Sizes(graph, MeshShape.of((8,))))
    assert found == (frozenset(("%x", "%x@1", "%y")) if outermost else frozenset())


def test_a_value_lies_behind_a_fence_as_it_did() -> None:
    """Else the gradient of a norm that is recomputed was told at 110 us for 6, in a few blocks."""
    graph, whole = attach_rules(parse_graph(TANH)), replicated(2)
    gathered = (MoveStep("all-gather", ("data",), 1),)
    block = Block(
        ("%x",),
        (
            Fence(("%x",), ("%again",)),
            LocalOp((0,), ("%again",), ("%y",), (whole,), (whole,)),
            Move(graph.op_at((0,)).results[0], "%y", "%y@1", whole, whole, gathered),
        ),
        ("%y@1",),
    )
    found = columns_outermost(block, Sizes(graph, MeshShape.of((8,))))
    assert found == {"%x", "%again", "%y", "%y@1"}


@pytest.mark.parametrize(("heads", "outermost"), [(16, True), (1, False)])
def test_columns_lie_outermost_behind_a_product_whose_batches_are_columns(
    heads: int, outermost: bool
) -> None:
    """Heads stay where a product of attention has them; a batch alone leaves its rows in order."""
    piece, kept = f"f32[4,{heads},512,64]", f"f32[4,512,{heads * 64}]"
    numbers = "{dimension_numbers=(((3,), (2,)), ((0, 1), (0, 1)))}"
    text = f"""graph step(%p: f32[4,{heads},512,512] batch "p", %v: {piece} batch "v") {{
      %y: {piece} = dot_general(%p, %v) {numbers}
      %t: f32[4,512,{heads},64] = transpose(%y) {{permutation=(0, 2, 1, 3)}}
      %z: {kept} = reshape(%t) {{dimensions=None, new_sizes=(4, 512, {heads * 64})}}
      return %z
    }}"""
    graph, mesh = attach_rules(parse_graph(text)), MeshShape.of((1,))
    cluster = Cluster.parse("1xh100")
    plan = Optimal().run(graph, Setting(cluster, mesh, 2**60))
    listing = lower_checked(graph, plan, Resharder(Prices(cluster, mesh)))
    assert ("%z" in columns_outermost(listing.block, Sizes(graph, mesh))) == outermost
