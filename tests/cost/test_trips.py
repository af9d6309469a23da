"""Which trips XLA for GPUs takes out of a loop, and what they wait for."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from autopar.cluster import Cluster
from autopar.cost.kernels import Kernel
from autopar.cost.memory import held_bytes, held_while, step_kernels
from autopar.cost.prices import Prices
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import Timed, timed_listing
from autopar.ir.graph import Graph
from autopar.ir.listing import Block, Listing, ListingStep, LocalOp, Loop
from autopar.ir.record import parse_graph
from autopar.ir.sharding import MeshShape, replicated
from autopar.rules import RuleBook, attach_rules
from tests.cost.test_memory import DOT, moved

MESH = MeshShape(("data",), (8,))


def looped(kinds: Collection[str], runs: int = 8) -> tuple[Graph, Listing]:
    """A loop of a trip that gathers its weights, and reduces two gradients in two ways."""
    text = f"""graph g(%c: f32[64,64], %xs: f32[{runs},64,64]) {{
      %r: f32[64,64], %ys: f32[{runs},64,64], %zs: f32[{runs},64,64] = scan(%c, %xs) backward {{length={runs}, num_consts=0, num_carry=1, reverse=False, unroll=1}} [
        graph body(%h: f32[64,64], %v: f32[64,64]) {{
          %u: f32[64,64] = dot_general(%v, %v) backward {DOT}
          %q: f32[64,64] = dot_general(%h, %u) backward {DOT}
          %y: f32[64,64] = dot_general(%h, %u) backward {DOT}
          %z: f32[64,64] = dot_general(%u, %h) backward {DOT}
          return %q, %y, %z
        }}
      ]
      return %r, %ys, %zs
    }}"""  # noqa: E501
    whole, stack = replicated(2), replicated(3)

    def run(at: int, left: str, right: str, made: str) -> LocalOp:
        return LocalOp((0, 0, at), (left, right), (made,), (whole, whole), (whole,))

    gathers = "all-gather" in kinds
    weights = "%g" if gathers else "%v"
    body: list[ListingStep] = [moved("%g", "%v", "all-gather", MESH)] if gathers else []
    body += [run(0, weights, weights, "%u"), run(1, "%h", "%u", "%q")]
    gradients = ("%y", "%h", "%u", "all-reduce"), ("%z", "%u", "%h", "reduce-scatter")
    for at, (name, left, right, kind) in enumerate(gradients, 2):
        raw = f"{name}.raw" if kind in kinds else name
        body.append(run(at, left, right, raw))
        body += [moved(name, raw, kind, MESH)] if kind in kinds else []
    trip = Block(("%h", "%v"), tuple(body), ("%q", "%y", "%z"))
    loop = Loop((0,), ("%c", "%xs"), ("%r", "%ys", "%zs"), (whole, stack, stack), (trip,), runs)
    block = Block(("%c", "%xs"), (loop,), ("%r", "%ys", "%zs"))
    graph = attach_rules(parse_graph(text), RuleBook())
    return graph, Listing(block, (whole, stack), (whole, stack, stack))


def timed(graph: Graph, listing: Listing, sizes: Sizes) -> Timed:
    return timed_listing(graph, listing, Prices(Cluster.parse("8xh100"), MESH), sizes)


def kernels_of(kinds: Collection[str], runs: int = 8) -> tuple[Kernel, ...]:
    """The kernels of a step that is such a loop."""
    graph, listing = looped(kinds, runs)
    sizes = Sizes(graph, MESH)
    return step_kernels(graph, listing, sizes, timed(graph, listing, sizes)).stored.kernels


def trips(kernels: Collection[Kernel]) -> set[str]:
    """The trips in front of the loop and behind it that make the loop's products."""
    made = (name.split(" ", 1)[1] for k in kernels for name in k.makes if name.endswith("%u"))
    return {name.removesuffix(" %u") for name in made}


@pytest.mark.parametrize(
    ("kinds", "runs", "outside"),
    [
        ((), 8, set()),
        (("all-reduce",), 8, {"trip 0"}),
        (("reduce-scatter",), 8, {"trip 0"}),
        (("all-gather",), 8, {"last trip"}),
        (("all-reduce", "reduce-scatter"), 8, {"trip 0", "trip 1"}),
        (("all-reduce", "all-gather", "reduce-scatter"), 8, {"trip 0", "trip 1", "last trip"}),
        # One trip stays in the loop, for as many kinds as there are others, which time chooses.
        (("all-reduce", "all-gather", "reduce-scatter"), 3, {"trip 0", "trip 1"}),
        (("all-reduce", "all-gather", "reduce-scatter"), 2, {"trip 0"}),
        (("all-reduce", "all-gather", "reduce-scatter"), 1, set()),
    ],
)
def test_each_kind_that_is_pipelined_takes_a_trip_out_of_the_loop(
    kinds: tuple[str, ...], runs: int, outside: set[str]
) -> None:
    assert trips(kernels_of(kinds, runs)) == outside


def test_the_last_trip_waits_for_the_loop_and_the_first_for_nothing_but_its_carry() -> None:
    kernels = kernels_of(("all-reduce", "all-gather", "reduce-scatter"))
    maker = {name: k for k in kernels for name in k.makes}
    assert sum(len(k.makes) for k in kernels) == len(maker)  # no two make the same
    loop = next(k for k in kernels if k.at >= 0)

    def behind(kernel: Kernel) -> set[str]:
        found, front = set[str](), [kernel]
        while front:
            reads = front.pop().reads - found
            found |= reads
            front += [maker[name] for name in reads if name in maker]
        return found

    last = [k for k in kernels if any("last trip" in name for name in k.makes)]
    assert last
    assert all(behind(k) & {*loop.makes} for k in last)
    # What a trip makes of its weights alone may run before the trip in front of it.
    assert "%r trip 0 %q" not in behind(maker["%r trip 1 %u"])
    assert "%r trip 0 %q" in behind(maker["%r trip 1 %q"])
    # What the last trip in the loop left, and the last one of all, is reduced behind it.
    for stack, gradient in (("%ys", "%y"), ("%zs", "%z")):
        assert {f"%r trips {gradient}.raw", f"%r last trip {gradient}.raw"} <= behind(maker[stack])


def test_what_is_held_over_a_loop_adds_up_to_its_peak() -> None:
    graph, listing = looped(("all-reduce", "all-gather", "reduce-scatter"))
    sizes = Sizes(graph, MESH)
    run = timed(graph, listing, sizes)
    answer = held_bytes(graph, listing, sizes, run)
    assert max(h.by_kind.total() for h in held_while(graph, listing, sizes, run)) == (
        pytest.approx(answer.peak_bytes, abs=8)
    )
    assert sum(nbytes for _, nbytes in answer.peak.totals) == answer.peak_bytes


def test_the_peak_of_a_trip_outside_its_loop_names_what_it_holds() -> None:
    graph, listing = looped(("all-reduce",), 2)
    sizes = Sizes(graph, MESH)
    peak = held_bytes(graph, listing, sizes, timed(graph, listing, sizes)).peak
    products = [i for i in peak.items if i.name == "dot_general"]
    assert products
    assert all(i.shape == (64, 64) for i in products)


def test_what_triton_reads_is_cut_out_of_a_stack_outside_the_loop_too() -> None:
    """A softmax of its rows reads a slice; a gradient that is reduced takes a trip out."""
    text = f"""graph g(%c: f32[64,64], %vs: f32[8,64,64]) {{
      %r: f32[64,64], %ys: f32[8,64,64] = scan(%c, %vs) backward {{length=8, num_consts=0, num_carry=1, reverse=False, unroll=1}} [
        graph body(%h: f32[64,64], %v: f32[64,64]) {{
          %u: f32[64,64] = dot_general(%h, %h) backward {DOT}
          %m: f32[64] = reduce_max(%v) backward {{axes=(1,), out_sharding=None}}
          %n: f32[64,64] = broadcast_in_dim(%m) backward {{shape=(64, 64), broadcast_dimensions=(0,), sharding=None}}
          %s: f32[64,64] = sub(%v, %n) backward
          %e: f32[64,64] = mul(%s, %u) backward
          %q: f32[64,64] = dot_general(%e, %h) backward {DOT}
          %y: f32[64,64] = dot_general(%h, %u) backward {DOT}
          return %q, %y
        }}
      ]
      return %r, %ys
    }}"""  # noqa: E501
    graph = attach_rules(parse_graph(text), RuleBook())
    whole, stack = replicated(2), replicated(3)
    (scan,) = graph.ops
    ops = scan.graphs[0].ops
    body: list[ListingStep] = [
        LocalOp(
            (0, 0, i), op.value_operands, (f"{name}.raw" if name == "%y" else name,),
            tuple(replicated(len(scan.graphs[0].values[o].shape)) for o in op.value_operands),
            (replicated(len(op.results[0].shape)),),
        )
        for i, op in enumerate(ops)
        for name in (op.results[0].name,)
    ]  # fmt: skip
    body.append(moved("%y", "%y.raw", "all-reduce", MESH))
    trip = Block(("%h", "%v"), tuple(body), ("%q", "%y"))
    loop = Loop((0,), ("%c", "%vs"), ("%r", "%ys"), (whole, stack), (trip,), 8)
    listing = Listing(Block(("%c", "%vs"), (loop,), ("%r", "%ys")), (whole, stack), (whole, stack))
    sizes = Sizes(graph, MESH)
    stored = step_kernels(graph, listing, sizes, timed(graph, listing, sizes)).stored
    made = {name: k for k in stored.kernels for name in k.makes}
    assert made["%r trip 0 %v"].reads == {"%vs"}
    assert "%r trip 0 %v" in made["%r trip 0 %e"].reads
    assert stored.nbytes["%r trip 0 %v"] == stored.nbytes["%r trip 0 %e"]


def test_a_loop_of_no_trips_takes_no_time_of_its_trips() -> None:
    graph, listing = looped((), runs=0)
    assert timed(graph, listing, Sizes(graph, MESH)).seconds.compute < 1e-4
