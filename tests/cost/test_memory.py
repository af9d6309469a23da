"""What a device holds: tiny graphs counted by hand, and laws that hold for every plan."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cluster.chip import Platform
from autopar.cost.kernels import stored_kernels
from autopar.cost.line import read_line
from autopar.cost.memory import SPARE_SHARE, SPARE_SHARE_OF_TRIPS, Held, held_bytes
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.cost.sizes import Sizes
from autopar.ir.graph import Graph
from autopar.ir.listing import (
    Block,
    Collective,
    Fence,
    Listing,
    ListingStep,
    LocalOp,
    Loop,
    Move,
    MoveStep,
)
from autopar.ir.peak import HeldKind
from autopar.ir.record import parse_graph
from autopar.ir.sharding import MeshShape, Sharding, replicated
from autopar.ir.values import Value
from autopar.passes.base import Setting
from autopar.passes.shard.optimal import Optimal
from autopar.rules import RuleBook, attach_rules
from tests.lowering import lower_checked

ONE = MeshShape((), ())
PLATFORMS: tuple[Platform, ...] = ("gpu", "tpu")
PIECE = 64 * 64 * 4  # bytes of f32[64,64]
DOT = "{dimension_numbers=(((1,), (0,)), ((), ()))}"


def graph_of(*ops: str, inputs: str = '%x: f32[64,64] batch "x"', returns: str) -> Graph:
    lines = "\n".join(ops)
    text = f"graph g(\n{inputs}\n) {{\n{lines}\n return\n {returns}\n}}"
    return attach_rules(parse_graph(text), RuleBook())


def dot(name: str, left: str, right: str, notes: str = "forward") -> str:
    return f"{name}: f32[64,64] = dot_general({left}, {right}) {notes} {DOT}"


def element(name: str, kind: str, operands: str, notes: str = "forward") -> str:
    return f"{name}: f32[64,64] = {kind}({operands}) {notes}"


def listing(graph: Graph) -> Listing:
    """The graph on one device, op by op."""
    steps = tuple(
        LocalOp(
            (i,),
            tuple(o if isinstance(o, str) else None for o in op.operands),
            tuple(r.name for r in op.results),
            tuple(replicated(len(graph.value(o).shape)) for o in op.operands),
            tuple(replicated(len(r.shape)) for r in op.results),
        )
        for i, op in enumerate(graph.ops)
    )
    return program_of(graph, steps)


def program_of(graph: Graph, steps: tuple[ListingStep, ...]) -> Listing:
    outputs = tuple(o if isinstance(o, str) else None for o in graph.outputs)
    block = Block(tuple(i.value.name for i in graph.inputs), steps, outputs)
    lies = tuple(replicated(len(i.value.shape)) for i in graph.inputs)
    return Listing(block, lies, tuple(replicated(2) for _ in outputs))


def held(graph: Graph) -> Held:
    return held_bytes(graph, listing(graph), Sizes(graph, ONE))


def kernels(graph: Graph) -> list[tuple[tuple[str, ...], frozenset[str]]]:
    """What the kernels of a graph on one device write and read, in the listing's order."""
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    found = stored_kernels(listing(graph).block, Sizes(graph, ONE), given, lambda *_: 0)
    return [(kernel.makes, kernel.reads) for kernel in found.kernels]


def stored(graph: Graph) -> list[tuple[str, ...]]:
    """What is written."""
    return [makes for makes, _ in kernels(graph)]


def test_a_long_maximum_is_one_kernel_that_reads_every_term() -> None:
    """Terms that other terms read too are read once, and what each term copies does not add up."""
    terms = 800
    lines = [dot(f"%d{i}", "%x", "%x") for i in range(terms)]
    lines.append(element("%s1", "max", "%d0, %d1"))
    lines += [element(f"%s{i}", "max", f"%s{i - 1}, %d{i}") for i in range(2, terms)]
    lines.append(element("%e", "mul", f"%s{terms - 1}, %d7"))
    tracemalloc.start()
    try:
        found = kernels(graph_of(*lines, returns='%e "y"'))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found[-1] == (("%e",), frozenset(f"%d{i}" for i in range(terms)))
    assert len(found) == terms + 1
    assert most < 8 * 2**20  # copied into each other they are 18 MiB


@pytest.mark.parametrize("windows", [3, 4])
def test_what_a_kernel_would_compute_many_times_is_stored(windows: int) -> None:
    """A sum of windows over rows reads nearly every row once for each of them."""
    lines, total = [element("%e", "exp", "%x")], ""
    for w in range(windows):
        begin, end = w, 61 + w
        lines.append(
            f"%w{w}: f32[61,64] = slice(%e) forward {{limit_indices=({end}, 64), "
            f"start_indices=({begin}, 0), strides=None}}"
        )
        if total:
            lines.append(f"%s{w}: f32[61,64] = add({total}, %w{w}) forward")
        total = f"%s{w}" if total else f"%w{w}"
    graph = graph_of(*lines, returns=f'{total} "y"')
    assert stored(graph) == [("%e",), (total,)][windows < 4 :]


@pytest.mark.parametrize(("rows", "is_stored"), [(131072, True), (4096, False)])
def test_what_many_would_load_for_each_item_is_computed_once(rows: int, is_stored: bool) -> None:
    """Of so many rows the three vectors are too large to lie next to each core."""
    spread = ("%d", "%e", "%f")
    lines = [
        f"{made}: f32[{rows},64] = broadcast_in_dim({given}) forward "
        f"{{broadcast_dimensions=(0,), shape=({rows}, 64), sharding=None}}"
        for made, given in zip(spread, ("%a", "%b", "%c"), strict=True)
    ]
    lines += [
        f"{made}: f32[{rows},64] = mul({given}) forward"
        for made, given in (("%s", "%x, %d"), ("%t", "%s, %e"), ("%v", "%t, %f"))
    ]
    lines += [f"%y{k}: f32[{rows},64] = neg(%v) forward" for k in range(3)]
    vectors = ",\n".join(f'%{name}: f32[{rows}] batch "{name}"' for name in "abc")
    graph = graph_of(
        *lines, inputs=f'%x: f32[{rows},64] batch "x",\n{vectors}',
        returns='%y0 "p",\n%y1 "q",\n%y2 "r"',
    )  # fmt: skip
    assert (("%v",) in stored(graph)) == is_stored


def test_a_cast_back_reads_what_was_cast() -> None:
    """XLA leaves out both casts, as it may be more precise than it is asked to be."""
    graph = graph_of(
        element("%v", "exp", "%x"),
        "%n: bf16[64,64] = convert_element_type(%v) forward {new_dtype='bfloat16'}",
        "%w: f32[64,64] = convert_element_type(%n) forward {new_dtype='float32'}",
        "%z: f64[64,64] = convert_element_type(%n) forward {new_dtype='float64'}",
        returns='%w "w",\n%z "z"',
    )
    block = listing(graph).block
    on_gpu, on_tpu = (read_line(block, Sizes(graph, ONE, platform)) for platform in PLATFORMS)
    assert [on_gpu.reads[k] for k in (2, 3)] == [("%v",), ("%n",)]
    assert on_tpu.reads[2] == ("%n",)


def test_a_product_adds_another_to_itself() -> None:
    """cuBLAS does it before it stores, also where all that reads the sum could."""
    graph = graph_of(
        dot("%a", "%x", "%x"), dot("%b", "%a", "%x"),
        element("%s", "add", "%b, %a"), element("%u", "exp", "%s"), element("%v", "sin", "%s"),
        returns='%u "u",\n%v "v"',
    )  # fmt: skip
    assert kernels(graph)[1] == (("%s",), frozenset(("%x", "%a")))
    other = graph_of(
        dot("%a", "%x", "%x"), dot("%b", "%a", "%x"),
        element("%s", "sub", "%b, %a"), element("%u", "exp", "%s"), element("%v", "sin", "%s"),
        returns='%u "u",\n%v "v"',
    )  # fmt: skip
    assert stored(other) == [("%a",), ("%b",), ("%u",), ("%v",)]


def test_a_product_adds_one_piece_and_xla_looks_at_the_first_product() -> None:
    """%s is what a product makes that adds %c: what is added to that no other product adds."""
    for sum_of, written in (("%s, %b", ["%c", "%s", "%b", "%t"]), ("%b, %s", ["%c", "%s", "%t"])):
        graph = graph_of(
            dot("%c", "%x", "%x"), dot("%a", "%c", "%x"), element("%s", "add", "%a, %c"),
            dot("%b", "%c", "%x"), element("%t", "add", sum_of), returns='%t "t"',
        )  # fmt: skip
        assert stored(graph) == [(name,) for name in written]


@pytest.mark.smoke
def test_two_products_hold_the_first_beside_the_second() -> None:
    graph = graph_of(dot("%a", "%x", "%x"), dot("%b", "%a", "%x"), returns='%b "y"')
    assert held(graph).argument_bytes == PIECE
    assert held(graph).peak_bytes == 3 * PIECE


def test_a_piece_dies_with_its_last_reader() -> None:
    chain = [dot(f"%{i + 1}", "%x" if i == 0 else f"%{i}", "%x") for i in range(6)]
    assert held(graph_of(*chain, returns='%6 "y"')).peak_bytes == 3 * PIECE


def test_element_wise_work_is_stored_once_where_a_product_reads_it() -> None:
    graph = graph_of(
        dot("%a", "%x", "%x"),
        element("%t", "tanh", "%a"),
        element("%e", "mul", "%t, %t"),
        dot("%b", "%e", "%x"),
        returns='%b "y"',
    )
    assert stored(graph) == [("%a",), ("%e",), ("%b",)]
    assert held(graph).peak_bytes == 3 * PIECE  # %e takes the buffer of %a


def test_what_fused_work_reads_lives_until_its_readers_run() -> None:
    graph = graph_of(
        dot("%a", "%x", "%x"),
        element("%s", "neg", "%a"),
        dot("%b", "%x", "%x"),
        dot("%c", "%b", "%x"),
        element("%y", "add", "%s, %c"),
        returns='%y "y"',
    )
    assert kernels(graph)[-1] == (("%y",), frozenset(("%a", "%c")))
    # Depth first, the longer chain runs before %a is made. %y takes the place of no product: they
    # come in tuples, with their scratch.
    assert held(graph).peak_bytes == 4 * PIECE


def test_softmax_is_computed_again_in_its_readers_from_its_input() -> None:
    graph = graph_of(
        dot("%a", "%x", "%x"),
        element("%e", "exp", "%a"),
        "%s: f32[64] = reduce_sum(%e) forward {axes=(1,), out_sharding=None}",
        "%w: f32[64,64] = broadcast_in_dim(%s) forward "
        "{shape=(64, 64), broadcast_dimensions=(0,), sharding=None}",
        element("%d", "div", "%e, %w"),
        dot("%y", "%d", "%x"),
        returns='%y "y"',
    )
    assert stored(graph) == [("%a",), ("%s",), ("%d",), ("%y",)]


def test_what_costs_much_to_compute_again_is_stored() -> None:
    sums = [f"%r{i}: f32[64] = reduce_sum(%t) forward {{axes=({i % 2},), out_sharding=None}}"
            for i in range(4)]  # fmt: skip
    graph = graph_of(
        dot("%a", "%x", "%x"), element("%t", "tanh", "%a"), *sums,
        returns=", ".join(f'%r{i} "r{i}"' for i in range(4)),
    )  # fmt: skip
    assert ("%t",) in stored(graph)


def test_state_is_updated_in_place() -> None:
    graph = graph_of(
        dot("%g", "%x", "%w", "backward"),
        element("%n", "sub", "%w, %g", "update"),
        inputs='%w: f32[64,64] state "w",\n%x: f32[64,64] batch "x"',
        returns='%n "w" <- %w',
    )
    answer = held(graph)
    assert answer.peak_bytes == 3 * PIECE  # both arguments and the gradient
    kinds = {i.name: i.kind for i in answer.peak.items}
    assert kinds == {
        "w": HeldKind.PARAMETER,
        "x": HeldKind.BATCH,
        "dot_general": HeldKind.GRADIENT,
    }


def test_state_is_updated_beside_itself_where_its_gradient_lies_otherwise() -> None:
    """One kernel turns the new value over, and a copy puts it into the place of the old."""
    graph = graph_of(
        "%g: f32[4,64,32] = dot_general(%x, %y) backward "
        "{dimension_numbers=(((2,), (2,)), ((0,), (0,)))}",
        "%t: f32[4,32,64] = transpose(%g) backward {permutation=(0, 2, 1)}",
        "%n: f32[4,32,64] = sub(%w, %t) update",
        inputs='%w: f32[4,32,64] state "w",\n%x: f32[4,64,16] batch "x",\n'
        '%y: f32[4,32,16] batch "y"',
        returns='%n "w" <- %w',
    )
    answer, size = held(graph), 4 * 32 * 64 * 4
    assert answer.peak_bytes - answer.argument_bytes == 2 * size  # the gradient, the new value


def test_every_kernel_counts_that_may_compute_a_value() -> None:
    """However far apart they are: two that are 64 apart are no one kernel."""
    products = [dot(f"%d{k}", "%x", "%x") for k in range(63)]
    graph = graph_of(
        element("%t", "neg", "%x"), dot("%a", "%x", "%t"), *products, dot("%b", "%x", "%t"),
        returns='%a "a", %b "b", ' + ", ".join(f'%d{k} "d{k}"' for k in range(63)),
    )  # fmt: skip
    line = read_line(listing(graph).block, Sizes(graph, ONE, "tpu"))
    assert len(line.roots[0]) == 2


def test_of_very_many_kernels_that_may_compute_a_value_the_first_are_told() -> None:
    """A global norm of a deep step is read by every update: all of them, of each of its parts,
    would take memory by the square of the depth."""
    products = [dot(f"%d{k}", "%x", "%t") for k in range(300)]
    returned = ", ".join(f'%d{k} "d{k}"' for k in range(300))
    graph = graph_of(element("%t", "neg", "%x"), *products, returns=returned)
    line = read_line(listing(graph).block, Sizes(graph, ONE, "tpu"))
    assert sorted(line.roots[0]) == list(range(1, 65))


def test_a_loop_on_gpus_holds_what_it_gathers_for_the_next_trip() -> None:
    text = """graph g(%c: f32[4096,4096] batch "c", %ws: f32[8,4096,4096] state "ws") {
      %r: f32[4096,4096] = scan(%c, %ws) {length=8, num_consts=0, num_carry=1, reverse=False, unroll=1} [
        graph body(%h: f32[4096,4096], %w: f32[4096,4096]) {
          %p: f32[4096,4096] = dot_general(%h, %w) flops=137438953472 {dimension_numbers=(((1,), (0,)), ((), ()))}
          return %p
        }
      ]
      return %r
    }"""  # noqa: E501
    graph, cluster = attach_rules(parse_graph(text), RuleBook()), Cluster.parse("8xh100")
    mesh, rows = MeshShape.of((8,)), ("data",)
    pins = (("c", (rows, ())), ("ws", ((), rows, ())))
    plan = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=pins))
    many = lower_checked(graph, plan, Resharder(Prices(cluster, mesh)))
    (loop,) = many.block.instructions
    assert isinstance(loop, Loop)
    assert isinstance(loop.bodies[0].instructions[0], Move)  # the weights are gathered in the loop
    once = replace(many, block=replace(many.block, instructions=(replace(loop, runs=1),)))
    peaks = {
        (platform, listing is many): held_bytes(
            graph, listing, Sizes(graph, mesh, platform)
        ).peak_bytes
        for platform in PLATFORMS
        for listing in (many, once)
    }
    gathered, product = 4096 * 4096 * 4, 512 * 4096 * 4
    # A trip has its own weights until its product is made, while it gathers those of the next.
    more = peaks["gpu", True] - peaks["gpu", False]
    spare = int(SPARE_SHARE_OF_TRIPS * (2 * gathered + 2 * product))
    assert more == pytest.approx(gathered + spare, abs=2)
    assert peaks["tpu", True] == peaks["tpu", False]


def test_what_nobody_wants_is_not_held() -> None:
    graph = graph_of(dot("%a", "%x", "%x"), dot("%b", "%x", "%x"), returns='%b "y"')
    assert held(graph).peak_bytes == 2 * PIECE


def test_a_loop_holds_its_stacks_and_its_body() -> None:
    text = """graph g(%c: f32[64,64], %xs: f32[8,64,64]) {
      %r: f32[64,64], %ys: f32[8,64,64] = scan(%c, %xs) forward {length=8, num_consts=0, num_carry=1, reverse=False, unroll=1} [
        graph body(%h: f32[64,64], %v: f32[64,64]) {
          %p: f32[64,64] = dot_general(%h, %v) forward {dimension_numbers=(((1,), (0,)), ((), ()))}
          %q: f32[64,64] = tanh(%p) forward
          return %p, %q
        }
      ]
      return %r, %ys
    }"""  # noqa: E501
    graph = attach_rules(parse_graph(text), RuleBook())
    whole, stack = replicated(2), replicated(3)
    body = Block(
        ("%h", "%v"),
        (
            LocalOp((0, 0, 0), ("%h", "%v"), ("%p",), (whole, whole), (whole,)),
            LocalOp((0, 0, 1), ("%p",), ("%q",), (whole,), (whole,)),
        ),
        ("%p", "%q"),
    )
    loop = Loop((0,), ("%c", "%xs"), ("%r", "%ys"), (whole, stack), (body,), 8)
    block = Block(("%c", "%xs"), (loop,), ("%r", "%ys"))
    answer = held_bytes(graph, Listing(block, (whole, stack), (whole, stack)), Sizes(graph, ONE))
    # Arguments and results are a piece and a stack each; in the body the slice that the product
    # reads and the product are held, and the tanh goes straight into its stack.
    assert answer.argument_bytes == 9 * PIECE
    trip = 2 * PIECE
    assert answer.peak_bytes == 2 * 9 * PIECE + trip
    assert answer.peak.op == "dot_general"


@pytest.mark.parametrize(("axis", "pieces"), [(1, 3), (0, 2)])
def test_what_triton_reads_of_a_stack_is_cut_out_of_it(axis: int, pieces: int) -> None:
    """A softmax of its rows reads a slice; what goes by columns reads the stack itself."""
    text = f"""graph g(%c: f32[64,64], %vs: f32[8,64,64]) {{
      %r: f32[64,64] = scan(%c, %vs) forward {{length=8, num_consts=0, num_carry=1, reverse=False, unroll=1}} [
        graph body(%h: f32[64,64], %v: f32[64,64]) {{
          %u: f32[64,64] = dot_general(%h, %h) forward {DOT}
          %m: f32[64] = reduce_max(%v) forward {{axes=({axis},), out_sharding=None}}
          %n: f32[64,64] = broadcast_in_dim(%m) forward {{shape=(64, 64), broadcast_dimensions=({1 - axis},), sharding=None}}
          %s: f32[64,64] = sub(%v, %n) forward
          %e: f32[64,64] = mul(%s, %u) forward
          %q: f32[64,64] = dot_general(%e, %h) forward {DOT}
          return %q
        }}
      ]
      return %r
    }}"""  # noqa: E501
    graph = attach_rules(parse_graph(text), RuleBook())
    stack = replicated(3)
    (scan,) = graph.ops
    body = Block(
        ("%h", "%v"),
        tuple(
            LocalOp(
                (0, 0, i), op.value_operands, (op.results[0].name,),
                tuple(replicated(len(scan.graphs[0].values[o].shape)) for o in op.value_operands),
                (replicated(len(op.results[0].shape)),),
            )
            for i, op in enumerate(scan.graphs[0].ops)
        ),
        ("%q",),
    )  # fmt: skip
    loop = Loop((0,), ("%c", "%vs"), ("%r",), (replicated(2),), (body,), 8)
    block = Block(("%c", "%vs"), (loop,), ("%r",))
    lies = (replicated(2), stack)
    answer = held_bytes(graph, Listing(block, lies, lies[:1]), Sizes(graph, ONE))
    # The carry is beside the argument that it starts from.
    assert answer.peak_bytes - answer.argument_bytes == (1 + pieces) * PIECE + 256 * (axis == 0)


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", ""])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("wide", [64, 4096])
def test_a_loop_holds_what_its_trips_hand_on_and_its_stacks_once(
    kind: str, gathers: bool, wide: int
) -> None:
    """XLA gathers for the next trip, and reduces what the one before made."""
    text = f"""graph g(%x: f32[64,{wide}], %y: f32[{wide},64], %z: f32[64,64], %xs: f32[8,64,64]) {{
      %w: f32[64,{wide}] = dot_general(%z, %x) forward {DOT}
      %c: f32[64,64] = dot_general(%w, %y) forward {DOT}
      %r: f32[64,64], %ys: f32[8,64,64] = scan(%c, %xs) backward {{length=8, num_consts=0, num_carry=1, reverse=False, unroll=1}} [
        graph body(%h: f32[64,64], %v: f32[64,64]) {{
          %u: f32[64,64] = dot_general(%v, %v) backward {DOT}
          %q: f32[64,64] = dot_general(%h, %u) backward {DOT}
          %s: f32[64,64] = dot_general(%h, %u) backward {DOT}
          return %q, %s
        }}
      ]
      return %r, %ys
    }}"""  # noqa: E501
    graph, mesh = attach_rules(parse_graph(text), RuleBook()), MeshShape(("data",), (8,))
    whole, stack = replicated(2), replicated(3)

    def run(at: tuple[int, ...], left: str, right: str, made: str) -> LocalOp:
        return LocalOp(at, (left, right), (made,), (whole, whole), (whole,))

    body: list[ListingStep] = [run((2, 0, 0), "%v", "%v", "%u"), run((2, 0, 1), "%h", "%u", "%q")]
    if gathers:
        gather = moved("%g", "%v", "all-gather", mesh)
        body[:1] = [gather, run((2, 0, 0), "%g", "%g", "%u")]
    if kind:
        raw = run((2, 0, 2), "%h", "%u", "%s.raw")
        body += [raw, moved("%s", "%s.raw", kind, mesh)]
    else:
        body.append(run((2, 0, 2), "%h", "%u", "%s"))
    trip = Block(("%h", "%v"), tuple(body), ("%q", "%s"))
    steps = (
        run((0,), "%z", "%x", "%w"),
        run((1,), "%w", "%y", "%c"),
        Loop((2,), ("%c", "%xs"), ("%r", "%ys"), (whole, stack), (trip,), 8),
    )
    block = Block(("%x", "%y", "%z", "%xs"), steps, ("%r", "%ys"))
    answer = held_bytes(
        graph, Listing(block, (whole, whole, whole, stack), (whole, stack)), Sizes(graph, mesh)
    )
    beside = answer.peak_bytes - answer.argument_bytes
    # In the loop: its results, of which %r takes the buffer of %c, and what a trip holds: %u, %q
    # and %s, or the slice of a trip in place of %s, what the next one reads, and what the one
    # before left. Trips in front of the loop and behind it find room in the stack's place.
    pieces = 3 + bool(kind) + gathers
    in_loop = (1 + 8) * PIECE + pieces * PIECE
    share = SPARE_SHARE_OF_TRIPS if kind or gathers else 0.0
    # While %c is made: %w and %c (a long sum is cut into parts of 128, each of a piece).
    before = (wide // 64 + 1 + wide // 128) * PIECE
    assert beside == pytest.approx(max(in_loop, before) * (1 + share), abs=2)


def test_one_number_that_a_loop_reads_everywhere_is_made_in_its_body() -> None:
    """XLA sinks it; what a loop starts from, and what was computed, is stored."""
    text = """graph g(%x: f32[64,64], %xs: f32[8,64,64]) {
      %one: f32[] = convert_element_type(-1e+30:f32) forward
      %fill: f32[64,64] = broadcast_in_dim(%one) forward {broadcast_dimensions=(), shape=(64, 64)}
      %start: f32[64,64] = broadcast_in_dim(0.0:f32) forward {broadcast_dimensions=(), shape=(64, 64)}
      %made: f32[64,64] = tanh(%x) forward
      %r: f32[64,64] = scan(%fill, %made, %start, %xs) forward {length=8, num_consts=2, num_carry=1, reverse=False, unroll=1} [
        graph body(%f: f32[64,64], %m: f32[64,64], %h: f32[64,64], %v: f32[64,64]) {
          %a: f32[64,64] = max(%h, %f) forward
          %b: f32[64,64] = add(%a, %m) forward
          %c: f32[64,64] = mul(%b, %v) forward
          return %c
        }
      ]
      return %r
    }"""  # noqa: E501
    graph = attach_rules(parse_graph(text), RuleBook())
    whole = replicated(2)
    names = ("%h", "%f"), ("%a", "%m"), ("%b", "%v")
    body = Block(
        ("%f", "%m", "%h", "%v"),
        tuple(
            LocalOp((4, 0, i), pair, (made,), (whole, whole), (whole,))
            for i, (pair, made) in enumerate(zip(names, ("%a", "%b", "%c"), strict=True))
        ),
        ("%c",),
    )
    steps = (
        LocalOp((0,), (None,), ("%one",), (replicated(0),), (replicated(0),)),
        LocalOp((1,), ("%one",), ("%fill",), (replicated(0),), (whole,)),
        LocalOp((2,), (None,), ("%start",), (replicated(0),), (whole,)),
        LocalOp((3,), ("%x",), ("%made",), (whole,), (whole,)),
        Loop(
            (4,), ("%fill", "%made", "%start", "%xs"), ("%r",), (whole,), (body,), 8
        ),
    )  # fmt: skip
    block = Block(("%x", "%xs"), steps, ("%r",))
    given = {"%x": PIECE, "%xs": 8 * PIECE}
    found = stored_kernels(block, Sizes(graph, ONE), given, lambda *_: 0)
    assert [k.makes for k in found.kernels] == [("%start",), ("%made",), ("%r",)]


def moved(name: str, source: str, kind: str, mesh: MeshShape) -> Move:
    """A value of 64 x 64 gathered or reduced over the one axis of a mesh."""
    value = Value(source, (64, 64), "f32")
    cut, whole = Sharding((("data",), ())), replicated(2)
    summed = Sharding(((), ()), ("data",))
    before = cut if kind == "all-gather" else summed
    step = MoveStep(kind, ("data",), 0 if kind == "all-gather" else -1)
    collective = Collective(kind, ("data",), PIECE, 0.0)
    assert mesh.names == ("data",)
    return Move(value, source, name, before, whole, (step,), collectives=(collective,))


def reduced_pair(apart: bool) -> Held:
    """Two products all-reduced: the second of the first's result unless they are apart."""
    mesh = MeshShape(("data",), (8,))
    graph = graph_of(
        dot("%a", "%x", "%x"), dot("%b", "%x" if apart else "%a", "%x"),
        returns='%a "a", %b "b"',
    )  # fmt: skip
    plain = listing(graph).block.instructions
    first, second = plain
    assert isinstance(first, LocalOp)
    assert isinstance(second, LocalOp)
    source = "%x" if apart else "%a"
    steps = (
        LocalOp(
            first.equation, first.operands, ("%a.raw",), first.operand_shardings, (replicated(2),)
        ),
        moved("%a", "%a.raw", "all-reduce", mesh),
        LocalOp(
            second.equation, (source, "%x"), ("%b.raw",), second.operand_shardings, (replicated(2),)
        ),
        moved("%b", "%b.raw", "all-reduce", mesh),
    )
    return held_bytes(graph, program_of(graph, steps), Sizes(graph, mesh))


def test_collectives_that_do_not_wait_for_each_other_run_as_one() -> None:
    # Combined, both are copied into one buffer; apart, each is reduced in place.
    assert reduced_pair(apart=True).peak_bytes == (1 + 2 + 2) * PIECE
    assert reduced_pair(apart=False).peak_bytes == 3 * PIECE


@pytest.mark.parametrize(
    ("platform", "dim", "written"), [("gpu", 0, 1), ("gpu", 1, 2), ("tpu", 1, 1)]
)
def test_what_is_gathered_along_a_later_dim_is_written_once_more(
    platform: Platform, dim: int, written: int
) -> None:
    """XLA for GPUs gathers along the outermost dim, and results lie in the order of their dims."""
    mesh = MeshShape(("data",), (8,))
    graph = graph_of(element("%a", "tanh", "%x"), returns='%a "a"')
    cut = Sharding((("data",), ()) if dim == 0 else ((), ("data",)))
    collective = Collective("all-gather", ("data",), PIECE, 0.0)
    steps = (
        LocalOp((0,), ("%x",), ("%a.raw",), (cut,), (cut,)),
        Move(
            Value("%a.raw", (64, 64), "f32"), "%a.raw", "%a", cut, replicated(2),
            (MoveStep("all-gather", ("data",), dim),), collectives=(collective,),
        ),
    )  # fmt: skip
    block = Block(("%x",), steps, ("%a",))
    answer = held_bytes(
        graph, Listing(block, (cut,), (replicated(2),)), Sizes(graph, mesh, platform)
    )
    # The argument's piece is an eighth, and so is the result's before it is gathered.
    later = max(PIECE // 8 + PIECE, written * PIECE)
    spare = int(SPARE_SHARE * later) if platform == "tpu" else 0
    assert answer.peak_bytes == PIECE // 8 + later + spare


def test_a_fence_keeps_recomputation_until_all_of_it_is_there() -> None:
    graph = graph_of(
        dot("%a", "%x", "%x"), dot("%b", "%a", "%x"), dot("%c", "%x", "%x"),
        element("%s", "max", "%c, %b"),
        "%y: f32[64] = reduce_sum(%s) forward {axes=(1,), out_sharding=None}", returns='%y "y"',
    )  # fmt: skip
    first, second, third, *rest = listing(graph).block.instructions
    assert isinstance(third, LocalOp)
    fence = Fence(("%x", "%b"), ("%x2", "%b2"))
    third = LocalOp(third.equation, ("%x2", "%x2"), third.results, third.operand_shardings,
                third.result_shardings)  # fmt: skip
    answer = held_bytes(
        graph, program_of(graph, (first, second, fence, third, *rest)), Sizes(graph, ONE)
    )
    assert answer.peak_bytes == 3 * PIECE + 64 * 4  # never %a, %b and %c at once


def test_the_peak_says_when_and_what() -> None:
    graph = graph_of(
        dot("%a", "%x", "%w", 'forward "Net/up"') + "  # net.py:3",
        element("%t", "tanh", "%a", 'forward "Net"') + "  # net.py:4",
        dot("%g", "%t", "%a", 'backward "Net/up"') + "  # net.py:3",
        element("%n", "sub", "%w, %g", "update"),
        element("%k", "add", "%m, %g", "update"),
        inputs='%w: f32[64,64] state "w",\n%m: f32[64,64] state "m",\n%x: f32[64,64] batch "x"',
        returns='%n "w" <- %w,\n%k "m" <- %m',
    )
    answer = held(graph)
    peak = answer.peak
    assert (peak.op, peak.module, peak.region, peak.line) == (
        "dot_general", "Net/up", "backward", "net.py:3",
    )  # fmt: skip
    by_kind: Mapping[HeldKind, int] = dict(peak.totals)
    assert sum(by_kind.values()) == answer.peak_bytes
    assert by_kind[HeldKind.PARAMETER] == by_kind[HeldKind.OPTIMIZER] == PIECE
    assert by_kind[HeldKind.ACTIVATION] == 2 * PIECE  # %a and %t
    assert str(peak).startswith("backward dot_general Net/up net.py:3, ")
