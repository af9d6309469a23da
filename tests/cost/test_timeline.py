"""Collectives beside work: two streams, checked by hand, by bounds and on a real compiler's law."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cost.kernels import Kernel, Stored, pieces_of
from autopar.cost.liveness import buffers
from autopar.cost.memory import piece_kinds, step_kernels
from autopar.cost.prices import Prices, product_seconds
from autopar.cost.reshard import Resharder
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import (
    Known,
    Seconds,
    Streams,
    Timed,
    beside_moves,
    in_two_streams,
    sent,
    timed_listing,
)
from autopar.errors import GraphError
from autopar.ir.compiler_options import PIPELINED
from autopar.ir.graph import Graph
from autopar.ir.listing import Block, Listing, LocalOp, Loop, Move
from autopar.ir.peak import HeldKind
from autopar.ir.record import parse_graph
from autopar.ir.sharding import MeshShape, replicated
from autopar.passes.base import Setting
from autopar.passes.shard.optimal import Optimal
from autopar.rules import attach_rules
from tests.lowering import lower_checked

# Two layers whose weights are cut up: the second's can be gathered while the first works.
LAYERS = """
graph step(%x: f32[4096,4096] batch "x", %v: f32[4096,4096] state "v",
           %w: f32[4096,4096] state "w") {
  %y: f32[4096,4096] = dot_general(%x, %v)
    flops=137438953472 {dimension_numbers=(((1,), (0,)), ((), ()))}
  %z: f32[4096,4096] = dot_general(%y, %w)
    flops=137438953472 {dimension_numbers=(((1,), (0,)), ((), ()))}
  return %z
}
"""
ROWS = ("data",), ()
PINS = (("x", ROWS), ("v", ROWS), ("w", ROWS))


def lowered(name: str) -> tuple[Graph, Listing, Prices]:
    """The layers with rows and weights cut up over eight devices of a kind."""
    graph = attach_rules(parse_graph(LAYERS))
    cluster, mesh = Cluster.parse(name), MeshShape.of((8,))
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=PINS))
    prices = Prices(cluster, mesh)
    return graph, lower_checked(graph, sharding, Resharder(prices)), prices


def timed(name: str) -> tuple[Seconds, Prices]:
    """What they take, and the prices."""
    graph, program, prices = lowered(name)
    return timed_listing(graph, program, prices).seconds, prices


def test_a_gather_runs_beside_the_layer_before() -> None:
    seconds, prices = timed("8xh100")
    gather = prices.collective("all-gather", 4096 * 4096 * 4, ("data",))
    work = product_seconds(
        prices.cluster.chip, (1, 512, 4096, 4096), 4096 * 4096 * 4 * (1 + 2 / 8), "f32"
    )
    assert seconds.communication == pytest.approx(2 * gather)
    # The first has nothing to run beside; of the second a layer hides its own length.
    assert seconds.exposed == pytest.approx(2 * gather - min(gather, work))


def test_cpus_run_collectives_by_themselves() -> None:
    seconds, cpu = timed("8xcpu")
    assert seconds.exposed == seconds.communication > 0
    gpu, tpu = (Prices(Cluster.parse(n), MeshShape.of((8,))) for n in ("8xh100", "v5e:2x4"))
    assert cpu.exposed_share("all-gather") == tpu.exposed_share("all-reduce") == 1.0
    assert tpu.exposed_share("all-gather") == gpu.exposed_share("all-reduce") < 1.0


def kernel(at: int, needs: frozenset[int]) -> Kernel:
    return Kernel(at, (f"k{at}",), frozenset(f"k{n}" for n in needs))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Kernel], list[Seconds], list[bool]]:
    """Kernels in an order that can run, each of work or a collective of so many seconds."""
    count = draw(st.integers(1, 12))
    kernels = [
        kernel(at, draw(st.frozensets(st.integers(0, at - 1), max_size=3)) if at else frozenset())
        for at in range(count)
    ]
    on_wires = [draw(st.booleans()) for _ in range(count)]
    lengths = [float(draw(st.integers(0, 9))) for _ in range(count)]
    spent = [
        Seconds(0.0, n, n) if wires else Seconds(n)
        for n, wires in zip(lengths, on_wires, strict=True)
    ]
    return kernels, spent, on_wires


def placed(
    kernels: Sequence[Kernel],
    spent: Sequence[Seconds],
    on_wires: Sequence[bool],
    crossing: frozenset[int] = frozenset(),
) -> Streams:
    """Kernels of which the scheduler knows what they take."""
    return in_two_streams(kernels, spent, on_wires, Known([s.total for s in spent]), crossing)


def test_what_fits_the_rest_of_a_collective_runs_beside_it() -> None:
    # Seen from the end 10 s of the reduction are left, then 3, then 1: what takes closest to that
    # runs, in place of the last in order.
    kernels = [kernel(at, frozenset()) for at in range(4)]
    spent = [Seconds(0.0, 10.0, 10.0), Seconds(7.0), Seconds(1.0), Seconds(2.0)]
    starts = placed(kernels, spent, [True, False, False, False]).starts
    assert sorted((1, 2, 3), key=starts.__getitem__) == [2, 3, 1]


def longest(kernels: list[Kernel], spent: list[Seconds]) -> float:
    ends: dict[str, float] = {}
    for k, s in zip(kernels, spent, strict=True):
        ends[k.makes[0]] = s.total + max((ends[r] for r in k.reads), default=0.0)
    return max(ends.values())


@given(graphs())
@settings(max_examples=200)
def test_two_streams_lie_between_the_bounds(
    made: tuple[list[Kernel], list[Seconds], list[bool]],
) -> None:
    kernels, spent, on_wires = made
    found = placed(kernels, spent, on_wires).seconds
    work, wires = sum(s.compute for s in spent), sum(s.communication for s in spent)
    assert found.compute == work
    assert found.communication == wires
    assert max(work, wires, longest(kernels, spent)) - 1e-9 <= found.total <= work + wires + 1e-9


@given(graphs())
@settings(max_examples=200)
def test_kernels_run_after_what_they_read_one_a_stream(
    made: tuple[list[Kernel], list[Seconds], list[bool]],
) -> None:
    kernels, spent, on_wires = made
    streams = placed(kernels, spent, on_wires)
    spans = dict(zip((k.makes[0] for k in kernels), streams.spans, strict=True))
    for kernel in kernels:
        assert all(spans[r][1] <= spans[kernel.makes[0]][0] + 1e-9 for r in kernel.reads)
    for stream in (False, True):
        rows = zip(streams.spans, on_wires, strict=True)
        own = sorted(s for s, wires in rows if wires == stream and s[0] < s[1])
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(own))
    alone = streams.alone
    assert sum(alone) == pytest.approx(
        max(end for _, end in streams.spans) - streams.seconds.compute
    )
    work = [s for s, wires in zip(streams.spans, on_wires, strict=True) if not wires]
    for k, wires in enumerate(on_wires):
        start, end = streams.spans[k]
        ticks = [t + 0.5 for t in range(round(start), round(end))]  # all lengths are whole
        idle = [t for t in ticks if not any(a < t < b for a, b in work)]
        assert alone[k] == pytest.approx(len(idle) if wires else 0.0)


def test_what_kernels_wait_for_adds_up() -> None:
    graph, program, prices = lowered("8xh100")
    timed = timed_listing(graph, program, prices)
    spent = [seconds for _, _, seconds in timed.spent()]
    gathers = [s for s in spent if s.communication]
    work = product_seconds(
        prices.cluster.chip, (1, 512, 4096, 4096), 4096 * 4096 * 4 * (1 + 2 / 8), "f32"
    )
    first, second = gathers
    assert first.exposed == first.communication
    hidden = min(second.communication, work)
    assert second.exposed == pytest.approx(second.communication - hidden)
    assert sum(spent, Seconds()).exposed == pytest.approx(timed.seconds.exposed)


def test_kernels_that_wait_for_each_other_are_refused() -> None:
    kernels = [kernel(0, frozenset({1})), kernel(1, frozenset({0})), kernel(2, frozenset())]
    spent = [Seconds(1.0), Seconds(0.0, 1.0, 1.0), Seconds(1.0)]
    with pytest.raises(GraphError, match="2 of 3 kernels wait for each other"):
        placed(kernels, spent, [False, True, False])


def test_seconds_that_cannot_be_are_refused() -> None:
    # Two kernels of work at the same time: all would be over before the work is.
    spent = [Seconds(2.0), Seconds(2.0), Seconds(0.0, 1.0, 1.0)]
    streams = Streams(spent, [False, False, True], [0.0, 0.0, 0.0])
    with pytest.raises(GraphError, match="are waited for"):
        _ = streams.seconds


def test_without_collectives_beside_all_is_in_a_row() -> None:
    kernels = [kernel(0, frozenset()), kernel(1, frozenset())]
    spent = [Seconds(2.0), Seconds(0.0, 3.0, 3.0)]
    assert placed(kernels, spent, [False, False]).seconds.total == 5.0
    found = placed(kernels, spent, [False, True]).seconds
    assert found == Seconds(2.0, 3.0, 1.0)


def test_what_takes_no_time_keeps_no_collective_waiting() -> None:
    """A gather that is read under another name is hidden as one that is read itself."""
    work, gather, name = kernel(0, frozenset()), kernel(1, frozenset()), kernel(2, frozenset({1}))
    kernels = [work, gather, name, kernel(3, frozenset({0, 2}))]
    spent = [Seconds(3.0), Seconds(0.0, 2.0, 2.0), Seconds(), Seconds(1.0)]
    streams = placed(kernels, spent, [False, True, False, False])
    assert streams.seconds == Seconds(4.0, 2.0, 0.0)
    assert streams.alone == [0.0] * 4


def test_weight_gradients_run_while_what_comes_next_is_gathered() -> None:
    """The latest that nobody waits for stands between the start and the end of a collective."""

    def kernel(name: str, *reads: str) -> Kernel:
        return Kernel(-1, (name,), frozenset(reads))

    chain = (
        kernel("a"), kernel("da", "a"), kernel("dw1", "da"), kernel("b", "da"), kernel("db", "b"),
        kernel("dw2", "db"),
    )  # fmt: skip
    beside = [k.makes[0] in ("a", "b") for k in chain]
    assumed = [5.0 if on_wires else 1.0 for on_wires in beside]
    streams = Streams([Seconds()] * len(chain), beside, [0.0] * len(chain))
    timed = Timed(Block((), (), ()), chain, streams, {}, Known(assumed))
    stored = Stored(chain, dict.fromkeys(("a", "da", "dw1", "b", "db", "dw2"), 1), frozenset())
    found = [k.makes[0] for k in beside_moves(stored, timed).kernels]
    assert found == ["a", "da", "b", "dw1", "db", "dw2"]


def left_by_the_scheduler(
    chain: Sequence[Kernel],
    moves: str,
    takes: float = 5.0,
    products: str = "",
    convolutions: str = "",
    short: str = "",
    large: str = "",
    moment: float = 1e-6,
) -> str:
    """The order in which kernels named by letters are left; `moves` are collectives.

    Without any the scheduler leaves all as it is given: Z is one that takes no time. All else takes
    a second, but what is `short` takes a `moment`. All has a byte, but what is `large` has 64.
    """
    chain = [*chain, Kernel(len(chain), ("Z",), frozenset())] if not moves else chain
    beside = [k.makes[0] in (*moves, "Z") for k in chain]
    times = {**dict.fromkeys(moves, takes), **dict.fromkeys(short, moment), "Z": 0.0}
    assumed = [times.get(k.makes[0], 1.0) for k in chain]
    streams = Streams([Seconds()] * len(chain), beside, [0.0] * len(chain))
    multiplied, convolved = (
        frozenset(n for n, k in enumerate(chain) if k.makes[0] in names)
        for names in (products + convolutions, convolutions)
    )
    block = Block((), (), ())
    timed = Timed(block, tuple(chain), streams, {}, Known(assumed, multiplied, convolved))
    bytes_of = {name: 64 if name in large else 1 for k in chain for name in k.makes}
    stored = Stored(tuple(chain), bytes_of, frozenset())
    return "".join(k.makes[0] for k in beside_moves(stored, timed).kernels).replace("Z", "")


def lettered(*kernels: str) -> list[Kernel]:
    """Kernels by what each makes and, behind it, what it reads."""
    return [Kernel(k, (text[0],), frozenset(text[1:])) for k, text in enumerate(kernels)]


def test_a_block_without_collectives_is_left_as_it_is() -> None:
    chain = tuple(lettered("a", "wa", "pa", "dp"))
    streams = Streams([Seconds()] * len(chain), [False] * len(chain), [0.0] * len(chain))
    known = Known([1.0] * len(chain), frozenset({1, 2, 3}))
    stored = Stored(chain, dict.fromkeys("awpd", 1), frozenset())
    assert beside_moves(stored, Timed(Block((), (), ()), chain, streams, {}, known)) == stored


def test_what_comes_in_a_tuple_is_ready_in_a_moment() -> None:
    """w, which waits, goes before what d has let go of, as a view takes that out of the tuple."""
    chain = lettered("a", "wa", "pa", "dp")
    assert left_by_the_scheduler(chain, moves="") == "awpd"
    chain[2] = replace(chain[2], makes=("p", "x"))
    assert left_by_the_scheduler(chain, moves="") == "apwd"


@pytest.mark.parametrize(("kind", "until"), [("all-gather", 2), ("all-reduce", 1), (None, 2)])
def test_what_a_collective_sends_is_held_until_it_ends(kind: str | None, until: int) -> None:
    """A sends x beside b, which may not take its buffer. A sum takes that itself, at once."""
    chain = lettered("x", "Ax", "b", "cbA")
    group = (kind, ("data",), "f32") if kind is not None else None
    chain[1] = replace(chain[1], group=group)
    chain[2] = replace(chain[2], in_place=True)
    beside = [k.makes[0] == "A" for k in chain]
    streams = Streams([Seconds()] * len(chain), beside, [0.0] * len(chain))
    timed = Timed(Block((), (), ()), tuple(chain), streams, {}, Known([1.0] * len(chain)))
    left = beside_moves(Stored(tuple(chain), dict.fromkeys("xAbc", 1), frozenset("c")), timed)
    assert "".join(k.makes[0] for k in left.kernels) == "xAbc"
    assert dict((name, span) for name, _, span in buffers(left, ()))["x"] == (0, until)


def test_collectives_that_run_as_one_otherwise_are_on_the_wires_too() -> None:
    """Where work that was joined waits for more, A and C, which were timed as one, are apart."""
    group = ("all-gather", ("data",), "")
    x, y, both = lettered("x", "y", "Axy")
    timed_as = (
        x,
        y,
        replace(both, makes=("A", "C"), group=group),
        Kernel(4, ("z",), frozenset("AC")),
    )
    first = replace(both, reads=frozenset("x"), group=group)
    other = Kernel(3, ("C",), frozenset("y"), group=group)
    streams = Streams([Seconds()] * 4, [False, False, True, False], [0.0] * 4)
    known = Known([1.0, 1.0, 6.0, 1.0], moved={"A": (5.0, 1.0), "C": (5.0, 1.0)})
    timed = Timed(Block((), (), ()), timed_as, streams, {}, known)
    apart = Stored((x, y, first, other, timed_as[-1]), dict.fromkeys("xyACz", 1), frozenset("z"))
    assert set(beside_moves(apart, timed).sent) == {"x", "y"}


def test_what_lets_others_go_goes_last() -> None:
    """w alone reads b; of x and y neither is the only one that reads a, until one is placed."""
    assert left_by_the_scheduler(lettered("a", "b", "wb", "xa", "ya"), moves="") == "abxyw"
    assert left_by_the_scheduler(lettered("a", "b", "xb", "va", "wa", "yb"), moves="") == "abvwxy"


def test_a_sum_that_is_begun_by_another_kernel_lets_that_go() -> None:
    """s sums y up, which w alone reads then: both go before z, which is the last as given."""
    chain = [replace(k, is_light=k.makes[0] in "ys") for k in lettered("a", "ya", "sy", "wy", "za")]
    assert left_by_the_scheduler(chain, moves="") == "ayswz"
    assert left_by_the_scheduler(chain, moves="", large="y") == "ayzsw"


def test_what_fits_a_moment_runs_in_it() -> None:
    """d is a product, and v takes as long as the view through which it reads p."""
    chain = lettered("a", "va", "wa", "pa", "dp")
    assert left_by_the_scheduler(chain, moves="", products="d", short="v") == "awpvd"
    assert left_by_the_scheduler(chain, moves="", products="d") == "avpwd"


def test_a_convolution_has_no_view_of_what_it_reads() -> None:
    """So there is no moment that v fits into, and p, as it is given last, goes first."""
    chain = lettered("a", "va", "wa", "pa", "dp")
    assert left_by_the_scheduler(chain, moves="", convolutions="d", short="v") == "avwpd"


@pytest.mark.parametrize(("products", "left"), [("", "axpwe"), ("p", "awpxe")])
def test_a_view_goes_at_once_whatever_else_is_ready(products: str, left: str) -> None:
    """Behind e, which takes less than a moment, the view of p lets one pass: x is ready as w is."""
    chain = lettered("a", "wa", "xa", "pa", "exp")
    found = left_by_the_scheduler(chain, moves="", products=products, short="e", moment=1e-8)
    assert found == left


def test_a_weight_gradient_that_waits_goes_behind_what_a_product_has_let_go_of() -> None:
    """p and d are products, w is the gradient of a weight: XLA takes w while it has a view of p."""
    chain = lettered("a", "wa", "pa", "dp")
    assert left_by_the_scheduler(chain, moves="") == "awpd"
    assert left_by_the_scheduler(chain, moves="", products="pdw") == "apwd"


def test_what_collectives_lead_to_goes_last() -> None:
    # w is the last as given; b and c have the gather G ahead of them.
    chain = lettered("a", "Ga", "bG", "cb", "va", "wv")
    assert left_by_the_scheduler(chain, moves="") == "aGvbcw"
    assert left_by_the_scheduler(chain, moves="G") == "aGvwbc"


def test_a_collective_starts_at_once_where_another_waits_for_the_wires() -> None:
    chain = lettered("a", "Ga", "Ha", "bG", "cH", "xa", "ya")
    assert left_by_the_scheduler(chain, moves="GH", takes=1.0) == "aGxyHbc"


def test_a_start_takes_its_turn_among_work_with_as_much_ahead() -> None:
    # R is the last as given; it is through when x is placed.
    chain = lettered("a", "Ga", "bG", "wb", "xb", "Rb")
    assert left_by_the_scheduler(chain, moves="GR", takes=0.5) == "aGbwRx"


def test_of_collectives_that_nothing_waits_for_the_longest_ends_last() -> None:
    """The step ends with the longest way of collectives, beside what is left of its work."""
    kernels = [kernel(k, frozenset()) for k in range(4)]
    spent = [Seconds(0.0, 4.0, 4.0), Seconds(0.0, 1.0, 1.0), Seconds(1.0), Seconds(4.0)]
    streams = placed(kernels, spent, [True, True, False, False])
    assert streams.spans[1][1] <= streams.spans[0][0]
    assert streams.seconds.exposed == 0.0


def test_work_behind_the_end_of_a_collective_waits_for_it() -> None:
    """One gather ends before the other begins, and what the scheduler leaves beside that begins
    with it.

        h | g beside x | r, which reads both
    """
    kernels = [kernel(0, frozenset()), kernel(1, frozenset()), kernel(2, frozenset())]
    kernels.append(kernel(3, frozenset({0, 1})))
    spent = [Seconds(0.0, 4.0, 4.0), Seconds(0.0, 2.0, 2.0), Seconds(2.0), Seconds(1.0)]
    streams = placed(kernels, spent, [True, True, False, False])
    assert streams.spans == [(2.0, 6.0), (0.0, 2.0), (2.0, 4.0), (6.0, 7.0)]


def test_what_a_collective_made_is_added_to_a_sum_by_work_behind_it() -> None:
    """Other work hides a part of the second one only: the first is added while that runs."""
    kernels = [kernel(0, frozenset()), kernel(1, frozenset())]
    kernels += [kernel(2, frozenset({0})), kernel(3, frozenset({1}))]
    spent = [Seconds(0.0, 4.0, 4.0), Seconds(0.0, 3.0, 3.0), Seconds(1.0), Seconds(1.0)]
    streams = placed(kernels, spent, [True, True, False, False])
    assert streams.spans == [(3.0, 7.0), (0.0, 3.0), (7.0, 8.0), (3.0, 4.0)]
    assert streams.seconds == Seconds(2.0, 7.0, 6.0)
    assert streams.alone == [3.0, 3.0, 0.0, 0.0]


@given(st.data())
def test_the_scheduler_leaves_each_kernel_once_and_after_what_it_reads(
    data: st.DataObject,
) -> None:
    names = "abcdefghijkl"[: data.draw(st.integers(1, 12))]
    reads = [
        data.draw(st.sets(st.sampled_from(names[:k]))) if k else set() for k in range(len(names))
    ]
    chain = lettered(*(name + "".join(sorted(r)) for name, r in zip(names, reads, strict=True)))
    some = st.sets(st.sampled_from(names)).map("".join)
    takes = data.draw(st.sampled_from([0.0, 1e-7, 1.0, 5.0]))
    order = left_by_the_scheduler(chain, data.draw(some), takes, data.draw(some))
    assert sorted(order) == sorted(names)
    assert all(order.index(r) < order.index(k.makes[0]) for k in chain for r in k.reads)


# -- loops: what XLA takes across trips ------------------------------------------------------------


def scanned(text: str, *options: str, cluster: str = "8xh100") -> tuple[Timed, Prices]:
    """A step with a scan, and its prices without some options; rows and weights are cut up."""
    graph = attach_rules(parse_graph(text))
    machine, mesh = Cluster.parse(cluster), MeshShape.of((8,))
    paths = [i.path for i in graph.inputs]
    pins = tuple(p for p in (("x", ROWS), ("ws", ((), ("data",), ()))) if p[0] in paths)
    sharding = Optimal().run(graph, Setting(machine, mesh, 2**60, pins=pins))
    prices = Prices(machine, mesh, tuple((name, False) for name in sorted(options)))
    listing = lower_checked(graph, sharding, Resharder(prices))
    return timed_listing(graph, listing, prices), prices


GATHERED = """
graph step(%x: f32[4096,4096] batch "x", %ws: f32[8,4096,4096] state "ws") {
  %y: f32[4096,4096] = scan(%x, %ws)
    {length=8, num_consts=0, num_carry=1, reverse=False, unroll=1} [
    graph body(%h: f32[4096,4096], %w: f32[4096,4096]) {
      %g: f32[4096,4096] = dot_general(%h, %w)
        flops=137438953472 {dimension_numbers=(((1,), (0,)), ((), ()))}
      return %g
    }
  ]
  return %y
}
"""
# Sums over the devices' rows that are only stacked; and such that the next trip reads.
STACKED = """
graph step(%x: f32[65536,1024] batch "x") {
  %y: f32[65536,1024], %z: f32[8,1024,1024] = scan(%x)
    {length=8, num_consts=0, num_carry=1, reverse=False, unroll=1} [
    graph body(%h: f32[65536,1024]) {
      %i: f32[65536,1024] = tanh(%h)
      %g: f32[1024,1024] = dot_general(%h, %i)
        flops=137438953472 {dimension_numbers=(((0,), (0,)), ((), ()))}
      %t: f32[1024,1024] = tanh(%g)
      return %i, %t
    }
  ]
  return %y, %z
}
"""
CARRIED = """
graph step(%x: f32[65536,1024] batch "x", %a: f32[1024,1024] state "a") {
  %y: f32[65536,1024], %z: f32[1024,1024] = scan(%x, %a)
    {length=8, num_consts=0, num_carry=2, reverse=False, unroll=1} [
    graph body(%h: f32[65536,1024], %b: f32[1024,1024]) {
      %i: f32[65536,1024] = tanh(%h)
      %g: f32[1024,1024] = dot_general(%h, %i)
        flops=137438953472 {dimension_numbers=(((0,), (0,)), ((), ()))}
      %t: f32[1024,1024] = tanh(%g)
      %c: f32[1024,1024] = add(%b, %t)
      return %i, %c
    }
  ]
  return %y, %z
}
"""


def bodies(timed: Timed) -> list[tuple[int, list[str]]]:
    """The trips of the loop that go alike, and the kinds of what crosses them."""
    (trips,) = timed.bodies.values()
    return [(t.runs, list(crossing_kinds(t.timed))) for t in trips]


def crossing_kinds(timed: Timed) -> Iterator[str]:
    for k in sorted(timed.streams.crossing):
        step = timed.kernels[k].instruction(timed.block)
        assert isinstance(step, Move)
        yield from (c.kind for c in step.collectives)


def test_weights_of_the_next_trip_are_gathered_beside_this_one() -> None:
    timed, prices = scanned(GATHERED)
    assert bodies(timed) == [(1, []), (7, ["all-gather"])]
    gather = prices.collective("all-gather", 4096 * 4096 * 4, ("data",))
    work = timed.seconds.compute / 8
    assert gather > work
    # The first is waited for; of the others what exceeds a trip's work, and a tenth of the rest.
    assert timed.seconds.exposed == pytest.approx(gather + 7 * (gather - 0.9 * work))
    assert timed.seconds.across == pytest.approx(7 * 0.9 * work)
    spent = {kernel.makes: seconds for _, kernel, seconds in timed.spent()}  # each once
    assert sum(spent.values(), Seconds()).exposed == pytest.approx(timed.seconds.exposed)
    assert sum(s.communication for s in spent.values()) == pytest.approx(8 * gather)


def test_sums_that_are_only_stacked_are_finished_in_the_next_trip() -> None:
    assert bodies(scanned(STACKED)[0]) == [(1, []), (7, ["reduce-scatter"])]


def test_a_loop_spares_a_trip_for_each_kind_that_crosses_them() -> None:
    """XLA takes all-reduces, gathers and reduce-scatters in turn, until one trip is left.

    Of two trips one kind can cross: the sums take longer, and gathers are not asked for.
    """
    product = "flops=137438953472 {dimension_numbers=(((0,), (0,)), ((), ()))}"
    both = f"""
    graph step(%x: f32[4096,4096] batch "x", %ws: f32[N,4096,4096] state "ws") {{
      %y: f32[4096,4096], %z: f32[N,4096,4096], %u: f32[N,4096,4096] = scan(%x, %ws)
        {{length=N, num_consts=0, num_carry=1, reverse=False, unroll=1}} [
        graph body(%h: f32[4096,4096], %w: f32[4096,4096]) {{
          %g: f32[4096,4096] = dot_general(%h, %w)
            flops=137438953472 {{dimension_numbers=(((1,), (0,)), ((), ()))}}
          %a: f32[4096,4096] = dot_general(%h, %g) {product}
          %b: f32[4096,4096] = dot_general(%g, %g) {product}
          return %g, %a, %b
        }}
      ]
      return %y, %z, %u
    }}
    """

    def crossing(trips: int, *off: str) -> tuple[list[tuple[int, set[str]]], frozenset[str]]:
        timed, _ = scanned(both.replace("N", str(trips)), *off)
        return [(runs, set(kinds)) for runs, kinds in bodies(timed)], timed.pipelined

    three = [(1, set[str]()), (2, {"all-gather", "reduce-scatter"})]
    assert crossing(3) == (three, frozenset(PIPELINED))
    left = frozenset({"all-reduce", "reduce-scatter"})
    assert crossing(2) == ([(1, set()), (1, {"reduce-scatter"})], left)
    only = [(1, set[str]()), (1, {"all-gather"})]
    assert crossing(2, PIPELINED["reduce-scatter"])[0] == only


def test_what_the_next_trip_reads_is_waited_for() -> None:
    timed, _ = scanned(CARRIED)
    assert timed.seconds.communication > 0
    assert bodies(timed) == [(8, [])]


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_only_what_the_compiler_is_told_to_pipeline_crosses_trips(kind: str) -> None:
    body = GATHERED if kind == "all-gather" else STACKED
    on, _ = scanned(body)
    off, _ = scanned(body, *PIPELINED.values())
    assert bodies(off) == [(8, [])]
    assert off.seconds.exposed > on.seconds.exposed
    assert off.seconds.communication == pytest.approx(on.seconds.communication)
    other = PIPELINED["all-reduce"] if kind == "all-gather" else PIPELINED["all-gather"]
    assert scanned(body, other)[0].seconds == on.seconds


def test_compilers_for_tpus_are_not_taken_to_pipeline() -> None:
    assert [runs for runs, _ in bodies(scanned(GATHERED, cluster="v5e:2x4")[0])] == [8]


@given(graphs(), st.frozensets(st.integers(0, 11)))
@settings(max_examples=200, deadline=None)
def test_what_crosses_trips_is_never_waited_for_longer(
    made: tuple[list[Kernel], list[Seconds], list[bool]], some: frozenset[int]
) -> None:
    kernels, spent, on_wires = made
    crossing = frozenset(k for k in some if k < len(kernels) and on_wires[k])
    streams = placed(kernels, spent, on_wires, crossing)
    found, work = streams.seconds, sum(s.compute for s in spent)
    assert max(work, sum(s.communication for s in spent)) - 1e-9 <= found.total
    assert 0.0 <= found.across <= found.communication - found.exposed + 1e-9
    if all(k in crossing for k, wires in enumerate(on_wires) if wires) and any(on_wires):
        hidden = min(work, found.communication)
        assert found.total == pytest.approx(max(work, found.communication) + 0.1 * hidden)


STACKS = """graph g(%c: f32[64,64], %xs: f32[8,64,64]) {
  %r: f32[64,64], %ys: f32[8,64,64] = scan(%c, %xs) forward {length=8, num_consts=0, num_carry=1, reverse=False, unroll=1} [
    graph body(%h: f32[64,64], %v: f32[64,64]) {
      %p: f32[64,64] = dot_general(%h, %v) forward {dimension_numbers=(((1,), (0,)), ((), ()))}
      %q: f32[64,64] = tanh(%p) forward
      return %p, %q
    }
  ]
  return %r, %ys
}"""  # noqa: E501


@pytest.mark.parametrize("ends", [("%p", "%q"), ("%q", "%p"), ("%q", "%q")])
def test_a_stack_counts_once_more_on_a_gpu_as_its_zeros_would(ends: tuple[str, str]) -> None:
    """What is stacked is made in its place if it is element-wise work that nothing else reads."""
    text = STACKS.replace("return %p, %q", f"return {', '.join(ends)}")
    graph, mesh = attach_rules(parse_graph(text)), MeshShape((), ())
    whole, stack = replicated(2), replicated(3)
    body = Block(
        ("%h", "%v"),
        (
            LocalOp((0, 0, 0), ("%h", "%v"), ("%p",), (whole, whole), (whole,)),
            LocalOp((0, 0, 1), ("%p",), ("%q",), (whole,), (whole,)),
        ),
        ends,
    )
    loop = Loop((0,), ("%c", "%xs"), ("%r", "%ys"), (whole, stack), (body,), 8)
    block = Block(("%c", "%xs"), (loop,), ("%r", "%ys"))
    listed = Listing(block, (whole, stack), (whole, stack))
    for name, is_gpu in (("1xh100", True), ("v5e:1x1", False)):
        prices = Prices(Cluster.parse(name), mesh)
        found = timed_listing(graph, listed, prices)
        (trips,) = found.bodies.values()
        stacking = found.seconds.total - 8 * trips[0].timed.seconds.total
        fill, copy = (prices.elementwise(n * 64 * 64 * 4) for n in (8, 2))
        copies = 0.0 if ends == ("%p", "%q") else 8 * copy
        assert stacking == pytest.approx(fill + copies if is_gpu else 0.0)
        assert sum(s.total for _, _, s in found.spent()) == pytest.approx(found.seconds.total)


def test_what_is_turned_over_item_by_item_takes_a_transaction_each() -> None:
    # %g lies [groups, positions, keys] and is added to what lies [keys, positions, groups]: this is
    # given back, too, so that it is not made otherwise.
    graph = attach_rules(
        parse_graph("""graph g(%k: bf16[4,1024,64] batch "k",
        %q: bf16[4,1024,2,64] batch "q", %p: bf16[4,2,1024,64] batch "p") {
      %s: bf16[4,1024,1024,2] = dot_general(%k, %q)
        flops=1 {dimension_numbers=(((2,), (3,)), ((0,), (0,)))}
      %e: bf16[4,2,1024,1024] = transpose(%s) {permutation=(0, 3, 2, 1)}
      %g: bf16[4,2,1024,1024] = dot_general(%p, %k)
        flops=1 {dimension_numbers=(((3,), (2,)), ((0,), (0,)))}
      %y: bf16[4,2,1024,1024] = mul(%e, %g)
      return %y, %s
    }""")
    )
    cluster, mesh = Cluster.parse("1xh100"), MeshShape.of((1,))
    prices = Prices(cluster, mesh)
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60))
    program = lower_checked(graph, sharding, Resharder(prices))
    taken = {k.makes: s.total for _, k, s in timed_listing(graph, program, prices).spent()}
    items = 4 * 2 * 1024 * 1024
    assert taken["%g as 0,3,2,1",] == prices.elementwise(items * (64 + 2))  # loaded, and stored
    assert taken["%y",] == prices.elementwise(items * 3 * 2)


def two_gradients() -> tuple[Graph, Listing, Prices]:
    """The gradients of two weights are scattered along one axis, then along the other."""
    product = "flops=68719476736 {dimension_numbers=(((0,), (0,)), ((), ()))} backward"
    text = f"""graph step(%v: bf16[2048,2048] state "v", %w: bf16[2048,2048] state "w",
                          %x: bf16[8192,2048] batch "x", %g: bf16[8192,2048] batch "g") {{
      %dv: bf16[2048,2048] = dot_general(%x, %g) {product}
      %dw: bf16[2048,2048] = dot_general(%g, %x) {product}
      %v1: bf16[2048,2048] = sub(%v, %dv) update
      %w1: bf16[2048,2048] = sub(%w, %dw) update
      return %v1 "v", %w1 "w"
    }}"""
    graph, cluster = attach_rules(parse_graph(text)), Cluster.parse("8xh100")
    mesh = MeshShape(("data", "model"), (2, 4))
    rows, cut = (("data", "model"), ()), (("model",), ())
    pins = (("x", rows), ("g", rows), ("v", cut), ("w", cut))
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=pins))
    prices = Prices(cluster, mesh)
    return graph, lower_checked(graph, sharding, Resharder(prices)), prices


def test_each_collective_of_a_move_is_combined_with_its_like() -> None:
    graph, listing, prices = two_gradients()
    moves = [s for s in listing.block.instructions if isinstance(s, Move)]
    first, second = (m for m in moves if len(m.collectives) == 2)
    assert [c.kind for c in first.collectives] == ["reduce-scatter", "reduce-scatter"]
    timed = timed_listing(graph, listing, prices)
    pairs = [*zip(pieces_of(first), pieces_of(second), strict=True)]
    spent = {k.makes: s for _, k, s in timed.spent() if k.makes in pairs}
    assert list(spent) == pairs
    for pair, own in zip(pairs, first.collectives, strict=True):
        once = prices.collective(own.kind, 2 * own.nbytes, own.axes)
        assert spent[pair].communication == pytest.approx(once)
    told = [(move.result, j) for move, j, _ in sent(timed) if len(move.collectives) == 2]
    assert sorted(told) == [(m.result, j) for m in (first, second) for j in (0, 1)]


def test_what_lies_between_two_collectives_of_a_move_is_told() -> None:
    graph, listing, prices = two_gradients()
    sizes = Sizes(graph, prices.mesh)
    timed = timed_listing(graph, listing, prices, sizes)
    stepped = step_kernels(graph, listing, sizes, timed)
    kinds = piece_kinds(graph, stepped.moment(stepped.stored), at_top=True)
    between = [name for name in kinds if " after " in name]
    assert len(between) == 2
    assert {kinds[name] for name in between} == {HeldKind.COLLECTIVE}
    assert all(stepped.stored.nbytes[name] > 0 for name in between)
