"""Steps that no microbatches make exactly are refused, with the user's lines named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.errors import BatchError, BatchStatisticError, RowsError
from autopar.ir.batching import BatchGraphs
from autopar.ir.record import parse_graph
from autopar.passes.batch.exact import Exact
from autopar.rules import attach_rules
from tests.passes.driving import setting
from tests.passes.microbatch_reference import batch_graphs, cut
from tests.passes.test_batch_steps import (
    Batch,
    Params,
    balance,
    batch,
    descent,
    log_of_mean,
    logits,
    losses,
    mean_loss,
    params,
    settle,
)

Loss = Callable[[Params, Batch], Any]


def batch_norm(weights: Params, given: Batch) -> Any:
    h = jnp.tanh(given["x"] @ weights["first"])
    mean = h.mean(axis=0)
    return jnp.mean(((h - mean) @ weights["last"]) ** 2)


def two_norms(weights: Params, given: Batch) -> Any:
    def norm(h: jax.Array) -> jax.Array:
        mean = h.mean(axis=0)
        h = h - mean
        return h / jnp.sqrt((h**2).mean(axis=0) + 1e-5)

    h = norm(jnp.tanh(given["x"] @ weights["first"]))
    return jnp.mean((norm(jnp.tanh(h @ weights["first"])) @ weights["last"]) ** 2)


def frozen_norm(weights: Params, given: Batch) -> Any:
    h = jnp.tanh(given["x"] @ weights["first"])
    mean = lax.stop_gradient(h.mean(axis=0))
    return jnp.mean(((h - mean) @ weights["last"]) ** 2)


def penalized_slope(weights: Params, given: Batch) -> Any:
    slopes = jax.grad(mean_loss)(weights, given)
    return mean_loss(weights, given) + sum(jnp.sum(g**2) for g in slopes.values())


def looped_norm(weights: Params, given: Batch) -> Any:
    def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = jnp.tanh(h @ weights["first"])
        mean = h.mean(axis=0)
        return h - mean, None

    return jnp.mean(lax.scan(layer, given["x"], None, length=3)[0] ** 2)


def contrastive(weights: Params, given: Batch) -> Any:
    out = logits(weights, given)
    similar = out @ out.T
    return -jnp.mean(jax.nn.log_softmax(similar))


def paired_diagonal(weights: Params, given: Batch) -> Any:
    out = logits(weights, given)
    similar = out @ out.T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(similar)))


def paired_labels(weights: Params, given: Batch) -> Any:
    similar = jnp.einsum("id,jd->ij", given["x"] @ weights["first"], given["x"])
    own = jnp.arange(similar.shape[0])[:, None]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(similar), own, axis=1))


def by_size(weights: Params, given: Batch) -> Any:
    if given["x"].shape[0] % 4 == 0:
        return losses(weights, given).mean()
    return (losses(weights, given) * 2.0).mean()


def rolled(weights: Params, given: Batch) -> Any:
    out = logits(weights, given)
    return jnp.mean((out - jnp.roll(out, 1, axis=0)) ** 2)


def sorted_losses(weights: Params, given: Batch) -> Any:
    return jnp.mean(jnp.sort(losses(weights, given)) ** 2)


def spread_back(weights: Params, given: Batch) -> Any:
    order = jnp.sort(lax.stop_gradient(losses(weights, given)))
    scale = jnp.broadcast_to(jnp.tanh(order).sum(), given["y"].shape)
    return (losses(weights, given) * scale).mean()


def running(weights: Params, given: Batch) -> Any:
    return jnp.mean(jnp.cumsum(losses(weights, given)) ** 2)


def hardest(weights: Params, given: Batch) -> Any:
    worst = jnp.argmax(lax.stop_gradient(losses(weights, given)))
    return mean_loss(weights, given) + worst


def reversed_rows(weights: Params, given: Batch) -> Any:
    return jnp.mean(losses(weights, given) * given["mask"][::-1])


def row_by_row(weights: Params, given: Batch) -> Any:
    def trip(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total * 0.9 + jnp.sum((x @ weights["first"]) ** 2), None

    return lax.scan(trip, jnp.zeros(()), given["x"])[0]


def from_one(weights: Params, given: Batch) -> Any:
    def layer(held: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, None]:
        h, total = held
        return (jnp.tanh(h @ weights["first"]), total + h.mean()), None

    (h, total), _ = lax.scan(layer, (given["x"], jnp.ones(())), None, length=2)
    return mean_loss(weights, {**given, "x": h}) + total


def or_else(weights: Params, given: Batch) -> Any:
    on = weights["first"][0, 0] > 0.0
    return lax.cond(on, lambda: mean_loss(weights, given), lambda: jnp.ones(()))


def until_settled(weights: Params, given: Batch) -> Any:
    start = lax.stop_gradient(logits(weights, given))
    end = lax.while_loop(lambda h: (h > 0.1).any(), lambda h: h * 0.5, start)
    return mean_loss(weights, given) + end.sum()


def trips_of_all(weights: Params, given: Batch) -> Any:
    trips, h = settle(weights, given)
    return mean_loss(weights, given) + h.sum() * trips


def settled_from_any(weights: Params, given: Batch) -> Any:
    _, h = settle(weights, given, first=lambda h: jnp.abs(h).sum(-1) > 0.5)
    return mean_loss(weights, given) + h.sum()


def either_way(weights: Params, given: Batch) -> Any:
    first = given["mask"][0] > 0
    return lax.cond(first, lambda: mean_loss(weights, given), lambda: jnp.zeros(()))


def foreign(weights: Params, given: Batch) -> Any:
    out = lax.stop_gradient(logits(weights, given))
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    same = jax.pure_callback(lambda x: x, shape, out)
    return mean_loss(weights, given) + same.sum()


def loud(weights: Params, given: Batch) -> Any:
    def trip(carry: Any) -> Any:
        jax.debug.print("{}", carry[0], ordered=True)
        return carry[0] + 1, carry[1] * 0.5

    first = lax.stop_gradient(losses(weights, given))
    _, out = lax.while_loop(lambda carry: carry[0] < 2, trip, (0, first))
    return mean_loss(weights, given) + out.sum()


def onto_state_in_loop(weights: Params, given: Batch) -> Any:
    def count(counts: jax.Array, _: None) -> Any:
        return counts.at[given["y"]].add(1.0), None

    counts, _ = lax.scan(count, weights["last"][0], None, length=2)
    return mean_loss(weights, given) + counts.sum()


def accumulated(weights: Params, given: Batch) -> Any:
    def trip(total: jax.Array, rows: Batch) -> Any:
        scores, labels = logits(weights, rows), rows["y"][:, None]  # of two tokens, both alike
        pairs = jnp.stack([scores, scores], 1), jnp.concatenate([labels, labels], 1)
        picked = jnp.take_along_axis(pairs[0], pairs[1][..., None], -1)
        return total - picked.mean(), None

    rows = {k: a.reshape(2, -1, *a.shape[1:]) for k, a in given.items()}
    return lax.scan(trip, jnp.zeros(()), rows)[0]


@dataclass(frozen=True)
class Refusal:
    """A loss, its error, the op to be named and the text on the line to be named."""

    loss: Loss
    error: type[BatchError]
    op: str
    code: str


REFUSALS = [
    Refusal(batch_norm, BatchStatisticError, "the mean over rows", "mean = h.mean"),
    Refusal(batch_norm, BatchStatisticError, "subtracted from rows: sub", "h - mean"),
    Refusal(frozen_norm, BatchStatisticError, "subtracted from rows: sub", "h - mean"),
    Refusal(looped_norm, BatchStatisticError, "sub", "return h - mean"),
    Refusal(looped_norm, BatchStatisticError, "needs all of", "mean = h.mean"),
    Refusal(contrastive, BatchError, "dot_general", "out @ out.T"),
    Refusal(paired_diagonal, RowsError, "every row of the batch meets every other", "out @ out.T"),
    Refusal(paired_labels, RowsError, "dot_general", "jnp.einsum"),
    Refusal(accumulated, BatchError, "structure depends on the batch size", "lax.scan"),
    Refusal(by_size, BatchError, "", "* 2.0"),
    Refusal(rolled, RowsError, "slice", "jnp.roll"),
    Refusal(sorted_losses, RowsError, "sort", "jnp.sort"),
    Refusal(spread_back, RowsError, "sort", "jnp.sort"),
    Refusal(running, RowsError, "cumsum", "jnp.cumsum"),
    Refusal(hardest, RowsError, "argmax", "jnp.argmax"),
    Refusal(reversed_rows, RowsError, "rev", "[::-1]"),
    Refusal(row_by_row, RowsError, "scan", "lax.scan"),
    Refusal(until_settled, RowsError, "while", "lax.while_loop"),
    Refusal(from_one, RowsError, "scan", "lax.scan"),
    Refusal(or_else, RowsError, "cond", "lax.cond"),
    Refusal(foreign, RowsError, "pure_callback", "jax.pure_callback"),
    Refusal(loud, RowsError, "debug_print", "jax.debug.print"),
    Refusal(onto_state_in_loop, BatchStatisticError, "scatter-add", ".at[given"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: f"{c.loss.__name__}-{c.op}")
def test_refused_with_the_named_line(case: Refusal) -> None:
    with pytest.raises(case.error) as raised:
        cut(descent(case.loss), (params(), batch()), 4)
    message = str(raised.value)
    assert f"test_batch_refusals.py:{_line(case)}" in message
    assert case.op in message
    assert message.splitlines()[0].startswith("step cannot be cut into microbatches")


def _line(case: Refusal) -> int:
    lines, first = inspect.getsourcelines(case.loss)
    return first + next(i for i, line in enumerate(lines) if case.code in line)


@pytest.mark.parametrize("loss", [trips_of_all, settled_from_any], ids=lambda f: f.__name__)
def test_a_loop_that_tells_of_its_last_row_is_refused(loss: Loss) -> None:
    """Its count is read, or its mask at the start is not what its test asks."""
    with pytest.raises(BatchStatisticError, match="needs all of reduce_or"):
        cut(descent(loss), (params(), batch()), 4)


def test_a_gradient_of_the_batch_in_the_loss_is_refused() -> None:
    with pytest.raises(BatchStatisticError) as raised:
        cut(descent(penalized_slope), (params(), batch()), 4)
    assert "(test_batch_steps.py:" in str(raised.value)
    assert "2 passes over the microbatches in all" in str(raised.value)


def test_a_deviation_that_is_only_returned_is_no_batch_norm() -> None:
    def loss(weights: Params, given: Batch) -> Any:
        every = losses(weights, given)
        return every.mean(), every.std()

    with pytest.raises(BatchStatisticError, match="a value that it returns needs another pass"):
        cut(descent(loss, has_aux=True), (params(), batch()), 4)


def test_a_line_is_told_of_once() -> None:
    with pytest.raises(BatchStatisticError) as raised:
        cut(descent(two_norms), (params(), batch()), 4)
    headline, mean, square, more, remedy = str(raised.value).splitlines()
    assert headline.endswith("as BatchNorm does in training.")
    assert mean.startswith("* the mean over rows")
    assert "subtracted from rows: sub" in mean
    assert mean.count("test_batch_refusals.py:") == 2
    assert square != mean
    assert more == "* and 2 more like these"
    assert remedy.startswith("Use LayerNorm or GroupNorm")


def test_choosing_by_one_row_is_refused() -> None:
    with pytest.raises(BatchError):
        cut(descent(either_way), (params(), batch()), 4)


def test_one_microbatch_is_always_right() -> None:
    assert cut(descent(batch_norm), (params(), batch()), 1).batching.is_whole


def test_nothing_of_the_batch_is_returned() -> None:
    def step(weights: Params, given: Batch) -> Params:
        del given
        return jax.tree.map(lambda w: w * 2.0, weights)

    with pytest.raises(BatchError, match="nothing that it returns depends on the batch"):
        cut(step, (params(), batch()), 4)


def test_a_barrier_may_be_ruled_out() -> None:
    given = batch_graphs(cut(descent(balance), (params(), batch()), 4).trace)
    assert Exact().run(given, setting((1,))).barrier
    with pytest.raises(BatchStatisticError, match="gpipe") as raised:
        Exact(barrier=False).run(given, setting((1,)))
    assert "the mean over rows" in str(raised.value)


def test_half_precision_is_not_rescaled() -> None:
    def low(weights: Params, given: Batch) -> Any:
        half = {n: w.astype(jnp.float16) for n, w in weights.items()}
        x = given["x"].astype(jnp.float16)
        out = losses(half, {**given, "x": x}).astype(jnp.float32)
        return jnp.log(out.mean())

    plan = cut(descent(low), (params(), batch()), 4).batching
    assert (plan.loops, plan.barrier, plan.rescales) == (2, True, ())


def test_a_print_is_taken_out_of_the_loop() -> None:
    def loss(weights: Params, given: Batch) -> Any:
        jax.debug.print("{}", losses(weights, given))
        return mean_loss(weights, given)

    trace = cut(descent(loss), (params(), batch()), 4).trace
    assert not any(e.has_effects for e in trace.part.program.walk())
    assert trace.calls is not None
    assert [e.primitive.name for e in trace.calls.walk()] == ["debug_print"]
    assert [a.shape for a in trace.calls.input_avals] == [(8,)]


# -- graphs that no front end has prepared -------------------------------------------------


def _graphs(text: str, **sizes: tuple[int, int]) -> BatchGraphs:
    """Both traces from one text, in which $B and the like stand for (whole, part)."""
    pairs = {"B": (8, 2), **sizes}
    graphs = []
    for side in (0, 1):
        own = dedent(text)
        for name, sized in pairs.items():
            own = own.replace(f"${name}", str(sized[side]))
        graphs.append(attach_rules(parse_graph(own)))
    return BatchGraphs(graphs[0], graphs[1], 4)


def _refused(text: str, match: str, **sizes: tuple[int, int]) -> str:
    with pytest.raises(BatchError, match=match) as raised:
        Exact().run(_graphs(text, **sizes), setting((1,)))
    return str(raised.value)


def test_an_iota_along_the_rows_needs_the_front_end() -> None:
    message = _refused(
        """\
        graph f(%x: f32[$B]) {
          %0: f32[$B] = iota() {dimension=0, dtype='f32', shape=($B,)}  # a.py:3
          %1: f32[$B] = mul(%x, %0)  # a.py:4
          return %1
        }""",
        "position",
    )
    assert "iota %0: f32[8] (a.py:3)" in message


def test_an_option_that_follows_the_batch_size() -> None:
    message = _refused(
        """\
        graph f(%x: f32[$B,4]) {
          %0: f32[$B,4] = integer_pow(%x) {y=$B}  # a.py:3
          return %0
        }""",
        "option",
    )
    assert "y=8 on the whole batch, y=2 on a microbatch" in message


def test_a_batch_that_is_not_there() -> None:
    text = "graph f(%x: f32[6]) {\n  %0: f32[6] = tanh(%x)\n  return %0\n}"
    assert "%x f32[6]" in _refused(text, "no batch axis")


def test_rows_merged_with_others_between_them() -> None:
    message = _refused(
        """\
        graph f(%x: f32[$B,3]) {
          %0: f32[3,$B] = reshape(%x) {new_sizes=(3, $B)}  # a.py:3
          return %0
        }""",
        "mixes rows",
    )
    assert "reshape %0: f32[3,8] (a.py:3)" in message


def test_rows_in_two_orders_do_not_meet() -> None:
    message = _refused(
        """\
        graph f(%x: f32[$B,3], %y: f32[3,$B]) {
          %0: f32[$N] = reshape(%x) {new_sizes=($N,)}  # a.py:3
          %1: f32[$N] = reshape(%y) {new_sizes=($N,)}  # a.py:4
          %2: f32[$N] = add(%0, %1)  # a.py:5
          return %2
        }""",
        "different orders",
        N=(24, 6),
    )
    assert "add %2: f32[24] (a.py:5)" in message


def test_log_of_mean_needs_one_pass_after_rewriting() -> None:
    plan = cut(descent(log_of_mean), (params(), batch()), 4).batching
    (rescale,) = plan.rescales
    later = [a.value for a in plan.accumulators if a.loop == 1]
    assert list(rescale.accumulators) == later
    assert plan.graph.values[rescale.value].shape == ()


def test_gradients_are_added_up_in_the_order_of_their_weights() -> None:
    """A product comes out in any order; to turn over a whole sum takes as many bytes again."""
    plan = cut(descent(mean_loss), (params(), batch()), 4).batching
    makers = {v.name: op.kind for op in plan.graph.ops for v in op.results}
    sums = [a.value for a in plan.accumulators]
    assert "transpose" in {makers[name] for name in sums}
    turned = [op for op in plan.graph.ops if op.kind == "transpose"]
    assert not {name for op in turned for name in op.value_operands}.intersection(sums)
