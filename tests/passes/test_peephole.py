"""Rewrites of a listing: what they make of moves, and what they leave alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import autopar
from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder, Route
from autopar.frontend.rewrite.remat import rematerialize
from autopar.ir.graph import Graph
from autopar.ir.listing import (
    IN_ROWS,
    Collective,
    Fence,
    Listing,
    ListingStep,
    LocalOp,
    Loop,
    Move,
    MoveStep,
    names_made,
)
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.soundness import ListingChecker
from autopar.ir.values import Value
from autopar.passes.base import Setting
from autopar.passes.lower.listing import combine_once, merge_scatters, move_once
from autopar.passes.shard.optimal import Optimal
from autopar.rules import attach_rules
from tests.frontend.tracing import traced
from tests.lowering import lower_checked

MESH = MeshShape.of("data=2,model=4")
RESHARDER = Resharder(Prices(Cluster.parse("8xh100"), MESH))
SHAPE = (64, 64)
PARTIAL = Sharding(((), ()), ("model",))
ROWS, COLUMNS = Sharding((("model",), ())), Sharding(((), ("model",)))
SUMS = {(9,), (10,)}


def moved(
    source: str, result: str, before: Sharding = PARTIAL, after: Sharding = ROWS, by: str = "sum"
) -> Move:
    value = Value(result, SHAPE, "f32")
    route = RESHARDER.route(value, before, after)
    return Move(value, source, result, before, after, route.steps, by, route.collectives)


def added(one: str, other: str, result: str, at: int = 9, lies: Sharding = ROWS) -> LocalOp:
    return LocalOp((at,), (one, other), (result,), (lies, lies), (lies,))


def shown(steps: list[ListingStep]) -> list[str]:
    """Each instruction as "results <- sources: kinds"."""
    return [
        f"{s.result} <- {s.source}: {' '.join(step.kind for step in s.steps)}"
        if isinstance(s, Move)
        else f"{' '.join(s.results)} <- {' '.join(str(o) for o in s.operands)}"
        for s in steps
        if isinstance(s, Move | LocalOp)
    ]


def test_sums_that_are_only_added_are_combined_once() -> None:
    one = moved("a.raw", "a")
    steps: list[ListingStep] = [
        one, moved("b.raw", "b"), added("a", "b", "c"),
        moved("d.raw", "d"), added("c", "d", "e", at=10),
    ]  # fmt: skip
    found = combine_once(steps, ("e",), SUMS)
    assert shown(found) == [
        "c.partial <- a.raw b.raw",
        "e.partial <- c.partial d.raw",
        "e <- e.partial: reduce-scatter",
    ]
    (run, _, last) = found
    assert isinstance(run, LocalOp)
    assert isinstance(last, Move)
    assert run.operand_shardings == (PARTIAL, PARTIAL)
    assert run.result_shardings == (last.before,) == (PARTIAL,)
    assert (last.after, last.value.name, last.collectives) == (ROWS, "e", one.collectives)


def test_other_sums_stay() -> None:
    pair = [moved("a.raw", "a"), moved("b.raw", "b")]
    total = added("a", "b", "c")
    cases: list[tuple[list[ListingStep], tuple[str, ...], set[tuple[int]]]] = [
        ([*pair, total], ("c", "a"), SUMS),  # another reads one of them
        ([*pair, total, added("b", "c", "d", at=3)], ("d",), SUMS),
        ([*pair, total], ("c",), {(8,)}),  # no op that adds
        ([pair[0], moved("b.raw", "b", ROWS, ROWS), total], ("c",), SUMS),  # one is no partial sum
        ([pair[0], moved("b.raw", "b", by="max"), total], ("c",), SUMS),
        ([pair[0], added("a", "a", "c")], ("c",), SUMS),  # one value, twice
        ([*pair, added("a", "b", "c", lies=COLUMNS)], ("c",), SUMS),
    ]
    for steps, outputs, sums in cases:
        assert combine_once(steps, outputs, sums) == steps


def test_what_is_moved_on_goes_there_at_once() -> None:
    whole = Sharding(((), ()))
    steps: list[ListingStep] = [
        moved("a.raw", "a", after=whole), added("x", "y", "z"), moved("a", "a@1", whole, COLUMNS)
    ]  # fmt: skip
    found = move_once(steps, ("a@1",), MESH, RESHARDER)
    assert shown(found) == ["a@1 <- a.raw: reduce-scatter", "z <- x y"]
    assert isinstance(found[0], Move)
    assert (found[0].before, found[0].after) == (PARTIAL, COLUMNS)
    # Not where another wants it on its way, or where the larger piece would be held from then on.
    assert move_once(steps, ("a@1", "a"), MESH, RESHARDER) == steps
    grown: list[ListingStep] = [moved("a.raw", "a"), moved("a", "a@1", ROWS, whole)]
    assert move_once(grown, ("a@1",), MESH, RESHARDER) == grown


def test_an_all_reduce_that_is_sliced_is_a_reduce_scatter() -> None:
    both = ("data", "model")
    reduce = MoveStep("all-reduce", both)
    sent = Collective("all-reduce", both, 64, 1.0)
    rows = [MoveStep("slice", (axis,), 0) for axis in both]
    columns = MoveStep("slice", ("model",), 1)
    gather = MoveStep("all-gather", ("model",), 1)
    more = Collective("all-gather", ("model",), 32, 0.5)
    route = Route((gather, reduce, *rows), (more, sent), 1.5)
    assert merge_scatters(route) == Route(
        (gather, MoveStep("reduce-scatter", both, 0)),
        (more, Collective("reduce-scatter", both, 64, 1.0)),
        1.5,
    )
    for steps in ((reduce, rows[1], rows[0]), (reduce, rows[0]), (reduce, rows[0], columns)):
        kept = Route(steps, (sent,), 1.0)
        assert merge_scatters(kept) == kept


def _listing(
    step: Any, w: Any, x: Any, method: str, cluster: str = "8xh100"
) -> tuple[Graph, Listing]:
    parallel = autopar.parallelize(step, cluster=cluster, mesh=8, method=method)
    planned = parallel.planned(w, x)
    return planned.graph, planned.program.parts[0].listing


def _convolved(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step of a convolution in half precision and a product, with weight decay in the loss."""

    def loss_of(w: Any) -> jax.Array:
        h = lax.conv_general_dilated(
            x.astype("bfloat16"), w["filter"].astype("bfloat16"), (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        decay = jnp.sum(w["filter"] ** 2)
        return jnp.sum((h.mean((1, 2)).astype("float32") @ w["matrix"]) ** 2) + decay

    loss, grads = jax.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


def test_the_update_of_a_filter_shares_no_kernel_with_its_cast() -> None:
    w = {
        "filter": jax.ShapeDtypeStruct((1, 1, 64, 64), "float32"),
        "matrix": jax.ShapeDtypeStruct((64, 64), "float32"),
    }
    x = jax.ShapeDtypeStruct((64, 8, 8, 64), "float32")
    graph, listing = _listing(_convolved, w, x, "dp")
    name = next(i.value.name for i in graph.inputs if "filter" in i.path)
    (fence,) = (s for s in listing.block.instructions if isinstance(s, Fence))
    assert (fence.sources, fence.results) == ((name,), (f"{name}.late",))
    runs = [s for s in listing.block.instructions if isinstance(s, LocalOp)]
    kinds = {
        read: sorted(graph.op_at(s.equation).kind for s in runs if read in s.operands)
        for read in (name, f"{name}.late")
    }
    # Its cast and the decay that the loss counts read it as it is; the decay's gradient and the
    # update read it behind the fence.
    assert kinds == {name: ["convert_element_type", "integer_pow"], f"{name}.late": ["mul", "sub"]}
    ListingChecker(MeshShape.of("data=8")).check(graph, listing)
    # A filter that is gathered is cast by a kernel of its own, and libtpu makes no such kernels.
    for method, cluster in (("fsdp", "8xh100"), ("dp", "v5e:2x4")):
        _, other = _listing(_convolved, w, x, method, cluster)
        assert not any(isinstance(s, Fence) for s in other.block.instructions)


def test_the_update_of_a_filter_shares_no_kernel_with_what_turns_it_around() -> None:
    """A backward pass in full precision reads it so; it waited for the filter's own all-reduce."""

    def convolved(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss_of(w: Any) -> jax.Array:
            h = x
            for name in ("first", "second"):
                h = lax.conv_general_dilated(
                    jnp.tanh(h), w[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            return jnp.sum(h**2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    filters = dict.fromkeys(("first", "second"), jax.ShapeDtypeStruct((3, 3, 64, 64), "float32"))
    x = jax.ShapeDtypeStruct((64, 8, 8, 64), "float32")
    graph, listing = _listing(convolved, filters, x, "dp")
    name = next(i.value.name for i in graph.inputs if "second" in i.path)
    runs = [s for s in listing.block.instructions if isinstance(s, LocalOp)]
    kinds = {
        read: sorted(graph.op_at(s.equation).kind for s in runs if read in s.operands)
        for read in (name, f"{name}.late")
    }
    assert kinds == {name: ["conv_general_dilated", "rev"], f"{name}.late": ["sub"]}


def test_the_gradient_of_a_filter_is_turned_over_before_the_update() -> None:
    """cuDNN makes it with the output features outermost: the update would run in that order."""
    taps = {
        "filter": jax.ShapeDtypeStruct((3, 3, 64, 64), "float32"),
        "matrix": jax.ShapeDtypeStruct((64, 64), "float32"),
    }
    x = jax.ShapeDtypeStruct((64, 8, 8, 64), "float32")
    for method, over in (("dp", "all-reduce"), ("fsdp", "reduce-scatter")):
        graph, listing = _listing(_convolved, taps, x, method)
        moves = {s.source: s for s in listing.block.instructions if isinstance(s, Move)}
        (turned,) = (m for m in moves.values() if m.steps == (MoveStep(IN_ROWS, ()),))
        (summed,) = (m for m in moves.values() if m.result == turned.source)
        assert [step.kind for step in summed.steps] == [over]  # once that, or a piece, is left
        assert turned.before == turned.after == summed.after
        readers = [
            graph.op_at(s.equation).kind
            for s in listing.block.instructions
            if isinstance(s, LocalOp) and turned.result in s.operands
        ]
        assert readers == ["convert_element_type"]
        ListingChecker(MeshShape.of("data=8")).check(graph, listing)
    _, other = _listing(_convolved, taps, x, "dp", "v5e:2x4")
    assert not any(
        isinstance(s, Move) and s.steps[-1].kind == IN_ROWS for s in other.block.instructions
    )


def test_both_gradients_of_a_filter_that_is_read_twice_are_turned_over() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(w: jax.Array) -> jax.Array:
            h = x
            for _ in range(2):
                dims = ("NHWC", "HWIO", "NHWC")
                h = lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=dims)
            return jnp.sum(h**2)

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    taps = jax.ShapeDtypeStruct((3, 3, 64, 64), "float32")
    x = jax.ShapeDtypeStruct((64, 8, 8, 64), "float32")
    graph, listing = _listing(step, taps, x, "dp")
    made = {name: s for s in listing.block.instructions for name in names_made(s)}
    turned = [
        s for s in listing.block.instructions
        if isinstance(s, Move) and s.steps == (MoveStep(IN_ROWS, ()),)
    ]  # fmt: skip
    kinds = {
        graph.op_at(run.equation).kind for s in turned if isinstance(run := made[s.source], LocalOp)
    }
    assert (len(turned), kinds) == (2, {"conv_general_dilated"})  # summed before they are reduced
    ListingChecker(MeshShape.of("data=8")).check(graph, listing)


def _joined(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step whose trips put sums of many terms beside sums of few, and what is no sum."""

    def trip(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        many = jnp.tanh(x[:, None, :] * carry).sum(-1)  # of 512 terms each
        few = jnp.tanh(x.reshape(8, 128, 4) * 2).sum(-1)
        joined = jnp.concatenate(
            [many.astype("bfloat16"), few.astype("bfloat16"), x[:, :4].astype("bfloat16")], 1
        )
        return carry, joined

    _, joined = lax.scan(trip, w, x)
    return w, joined


def test_long_sums_are_there_before_they_are_joined() -> None:
    shapes = {"w": (4, 512), "x": (3, 8, 512)}
    given = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes.values()]
    loops: dict[str, Loop] = {}
    for cluster in ("1xh100", "v5e:1x1"):
        planned = autopar.parallelize(_joined, cluster=cluster).planned(*given)
        graph, listing = planned.graph, planned.program.parts[0].listing
        ListingChecker(planned.plan.mesh).check(graph, listing)
        (loops[cluster],) = (s for s in listing.block.instructions if isinstance(s, Loop))
    steps = loops["1xh100"].bodies[0].instructions
    (fence,) = (s for s in steps if isinstance(s, Fence))
    runs = [s for s in steps if isinstance(s, LocalOp)]
    (join,) = (s for s in runs if graph.op_at(s.equation).kind == "concatenate")
    assert fence.results == join.operands[:1]
    ops = {name: graph.op_at(s.equation) for s in runs for name in s.results}
    # The sums of 512 terms, and beside them those of four and what is no sum.
    read = [ops[str(name)].results[0].shape for name in (*fence.sources, *join.operands[1:])]
    assert read == [(8, 4), (8, 128), (8, 4)]
    assert not any(isinstance(s, Fence) for s in loops["v5e:1x1"].bodies[0].instructions)


def _twice(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    """A step of two losses of one model, of two random draws and two looks at the loss."""

    def run(w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.sin(x) @ w)

    first, grad = jax.value_and_grad(lambda w: jnp.sum(run(w) ** 2))(w)
    second = jnp.sum(run(w) ** 4)
    key = jax.random.key(0)
    noise = [jax.random.normal(key, x.shape) for _ in range(2)]
    seen = [jax.pure_callback(_looks, jax.ShapeDtypeStruct((), x.dtype), first) for _ in range(2)]
    return w - 0.1 * grad, (first, second, noise, seen)


def _looks(loss: Any) -> Any:
    return loss


def test_what_is_equal_once_it_is_sharded_runs_once() -> None:
    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    graph, listing = _listing(_twice, w, x, "dp")
    runs = [s for s in listing.block.instructions if isinstance(s, LocalOp)]
    kinds = Counter(graph.op_at(s.equation).kind for s in runs)
    written = Counter(op.kind for op in graph.ops)
    for kind, count in {"sin": 1, "tanh": 1, "dot_general": 2}.items():
        assert kinds[kind] == count
    assert written["tanh"] == 2
    # What is drawn, and what Python is asked, stays apart.
    assert [(k, kinds[k], written[k]) for k in ("random_bits", "pure_callback")] == [
        ("random_bits", 2, 2), ("pure_callback", 2, 2)
    ]  # fmt: skip
    ListingChecker(MeshShape.of("data=8")).check(graph, listing)


def test_equal_work_of_a_loop_runs_once_a_trip() -> None:
    def step(ws: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def trip(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(x) @ w, jnp.sum(jnp.tanh(x))

        return ws, jnp.sum(lax.scan(trip, x, ws)[0])

    ws, x = jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    graph, listing = _listing(step, ws, x, "dp")
    (loop,) = (s for s in listing.block.instructions if isinstance(s, Loop))
    kinds = [graph.op_at(s.equation).kind for s in loop.bodies[0].instructions
             if isinstance(s, LocalOp)]  # fmt: skip
    assert kinds.count("tanh") == 1


def _attending(w: jax.Array, x: jax.Array) -> jax.Array:
    """A step of one layer of attention, twice as many heads of queries as of keys."""

    def loss(w: jax.Array) -> jax.Array:
        made = (x @ w).reshape(8, 64, 6, 16)
        q, k = made[:, :, :4].reshape(8, 64, 2, 2, 16), made[:, :, 4:]
        scores = jax.nn.softmax(jnp.einsum("btkgc,bskc->bkgts", q, k))
        return jnp.sum(jnp.einsum("bkgts,bskc->btkgc", scores, k) ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def test_scores_that_wait_for_the_backward_pass_are_swapped_too() -> None:
    """The softmax is made of them again behind a fence: XLA turned all of that over twice."""
    shapes = (16, 96), (8, 64, 16)
    step = traced(_attending, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    scores = next(
        o for o in step.graph.ops if o.kind == "dot_general" and len(o.results[0].shape) > 3
    )
    cluster, mesh = Cluster.parse("8xh100"), MeshShape.of((8,))
    softmax = ("transpose", "reduce_max", "exp", "sub", "div", "reduce_sum", "broadcast_in_dim")
    forward = [o for o in step.graph.ops if o.origin.region == "forward" and o.kind in softmax]
    for again in ((), tuple(o.results[0].name for o in forward)):
        graph = attach_rules(rematerialize(step, again).graph)
        plan = Optimal().run(graph, Setting(cluster, mesh, 2**60))
        listing = lower_checked(graph, plan, Resharder(Prices(cluster, mesh)))
        runs = [s for s in listing.block.instructions if isinstance(s, LocalOp)]
        (product,) = (s for s in runs if s.results == (scores.results[0].name,))
        fences = [s for s in listing.block.instructions if isinstance(s, Fence)]
        assert any(product.results[0] in f.sources for f in fences) == bool(again)
        assert product.swapped


def test_the_weights_of_a_checkpoint_are_fenced_apart() -> None:
    """What gathers them need not wait for the gradient that the rest is fenced with."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(h: jax.Array, m: jax.Array) -> jax.Array:
            return jnp.tanh(h @ m.astype("bfloat16"))

        def loss(w: jax.Array) -> jax.Array:
            h = x
            for i in range(2):
                h = layer(h, w[i])
            return jnp.sum(h**2)

        return w - 0.1 * jax.grad(loss)(w)

    given = jax.ShapeDtypeStruct((2, 64, 64), "float32"), jax.ShapeDtypeStruct((8, 64), "bfloat16")
    planned = autopar.parallelize(step, cluster="8xh100").planned(*given)
    graph, listing = planned.graph, planned.program.parts[0].listing
    ListingChecker(planned.plan.mesh).check(graph, listing)
    fences = [s for s in listing.block.instructions if isinstance(s, Fence)]
    shapes = sorted(sorted(graph.nested_values[r].shape for r in f.results) for f in fences)
    assert shapes == [[(8, 64), (8, 64)]] * 2 + [[(64, 64)]] * 2
