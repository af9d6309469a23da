"""Scans over layers are found and cut: the step computes the same, on pieces of its stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autopar.errors import ArgumentError
from autopar.frontend import StepSpec, TracedStep, trace
from autopar.frontend.microbatch.part_trace import split_microbatch, trace_microbatch
from autopar.frontend.rewrite.layer_scans import layer_scans
from autopar.frontend.rewrite.scan_split import Cuts
from autopar.frontend.traced import Piece
from autopar.ir.batching import Batching
from autopar.ir.values import Role
from autopar.passes.batch.exact import Exact
from autopar.passes.layer.min_cut import MinCut
from tests.frontend.running import PLAINLY, run_step
from tests.frontend.tracing import cut_at, kinds, without_remat, zoo_step
from tests.passes.driving import largest_error, setting
from tests.passes.microbatch_reference import Cut, batch_graphs
from tests.zoo import cases

LAYERS, WIDTH, ROWS = 3, 8, 4
EVERYWHERE = tuple(range(1, LAYERS))

Step = Callable[[Any, Any], Any]


def _numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def _params() -> dict[str, Any]:
    layers = {"w": 0.3 * _numbers(LAYERS, WIDTH, WIDTH), "b": _numbers(LAYERS, WIDTH)}
    return {"layers": layers, "head": _numbers(WIDTH, 3)}


X = _numbers(ROWS, WIDTH)


def _layer(h: Any, p: Any) -> Any:
    return h + jnp.tanh(h @ p["w"] + p["b"])


def _loss(params: Any, x: Any) -> jax.Array:
    h, _ = lax.scan(lambda h, p: (_layer(h, p), None), x, params["layers"])
    return jnp.mean((h @ params["head"]) ** 2)


def _descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _cut(step: Step, state: Any, *cuts: Cuts, x: Any = X) -> list[TracedStep]:
    """The step cut in each of these ways, and checked to give what the user's own gives."""
    sealed = trace(StepSpec(step), (state, x), {})
    leaves = jax.tree.leaves((state, x))
    expected = jax.tree.leaves(jax.jit(step, compiler_options=PLAINLY)(state, x))
    found = [cut_at(sealed, c) for c in cuts]
    for again in found:
        again.graph.verify()
        assert largest_error(run_step(again, leaves), expected) <= 1e-6
    return found


# -- the zoo -----------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "optimizer", "cuts"),
    [
        pytest.param("gpt_scan", "sgd", Cuts(((1,),)), marks=SLOW),
        ("gpt_scan_raw", "sgd", Cuts(((1, 3),))),
        pytest.param("gpt_scan", "adam", Cuts(((1,),), inline=False), marks=SLOW),
        pytest.param("gpt_scan_raw", "adam", Cuts(((1, 2, 3),)), marks=SLOW),
        pytest.param("gpt_scan_raw", "adam", Cuts(((3,),), inline=False), marks=SLOW),
    ],
)
def test_a_scanned_transformer_is_cut_exactly(name: str, optimizer: Any, cuts: Cuts) -> None:
    case = cases(optimizer)[name]
    state = jax.jit(case.create_state)(jax.random.key(0))
    (step,) = _cut(case.step, state, cuts, x=case.batch(0))
    assert not step.notes
    assert not {"concatenate", "slice"} & {op.kind for op in step.graph.ops}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", ["gpt_scan", "gpt_scan_raw"])
def test_cut_everywhere_a_scan_has_the_layers_of_an_unrolled_model(name: str, opened: bool) -> None:
    step = without_remat(zoo_step(name)) if opened else zoo_step(name)
    cut = cut_at(step, Cuts.everywhere(layer_scans(step)))
    sequence = MinCut().run(Batching.whole(cut.graph), setting("a=1"))
    sequence.verify()
    blocks = [n for n, layer in enumerate(sequence.layers) if layer.name.endswith("]")]
    assert len(blocks) == layer_scans(step)[0].length
    assert [sequence.layers[n].same_as for n in blocks[1:]] == [blocks[0]] * (len(blocks) - 1)
    homes = zip(cut.graph.inputs, sequence.input_homes, strict=True)
    stacked = [(given.path, home) for given, home in homes if "/layers/" in given.path]
    for path, home in stacked:
        layer = int(path.rpartition("[")[2].partition(":")[0])
        assert home == (blocks[layer],), path


# -- what is found -----------------------------------------------------------------------------


def test_scans_over_layers_are_found_with_their_backward_twins() -> None:
    (scan,) = layer_scans(zoo_step("gpt_scan_raw"))
    assert str(scan) == "4 layers: 1 forward and 1 backward scan(s), 24 stacked state inputs"


@pytest.mark.parametrize("name", ["lstm", "lstm_raw", "gpt"])
def test_scans_over_time_are_no_scans_over_layers(name: str) -> None:
    assert layer_scans(zoo_step(name)) == ()


def test_two_stacks_are_cut_by_themselves() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["encoder"])
            h, _ = lax.scan(lambda h, w: (jnp.sin(h @ w), None), h, params["decoder"])
            return jnp.sum(h**2)

        return _descend(params, jax.grad(loss)(params))

    params = {"encoder": _numbers(4, WIDTH, WIDTH), "decoder": _numbers(6, WIDTH, WIDTH)}
    sealed = trace(StepSpec(step), (params, X), {})
    assert [s.length for s in layer_scans(sealed)] == [4, 6]
    one, both = _cut(step, params, Cuts(((2,), ()), inline=False), Cuts(((1, 3), (5,))))
    assert kinds(one.graph).count("scan") == 2 * 2 + 2
    assert both.input_pieces[:2] == (Piece(0, 0, 5), Piece(0, 5, 6))


# -- pieces ------------------------------------------------------------------------------------


def _sgd(params: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x)
    return _descend(params, grads), loss


def test_inputs_and_outputs_tell_what_piece_they_are() -> None:
    (step,) = _cut(_sgd, _params(), Cuts(((2,),)))
    assert step.input_pieces == (
        Piece(0), Piece(1, 0, 2), Piece(1, 2, 3), Piece(2, 0, 2), Piece(2, 2, 3), Piece(3),
    )  # fmt: skip
    assert step.output_pieces == (*step.input_pieces[:-1], Piece(3))
    assert step.input_paths[:3] == ("params/head", "params/layers/b[0:2]", "params/layers/b[2:3]")
    assert step.donated == tuple((i, i) for i in range(5))
    assert [i.role for i in step.graph.inputs] == [Role.STATE] * 5 + [Role.BATCH]


def test_one_layer_is_straight_code_if_asked_for() -> None:
    steps = _cut(_sgd, _params(), Cuts(((1,),)), Cuts(((1,),), inline=False))
    lengths = [[op.whole("length") for op in s.graph.ops if op.kind == "scan"] for s in steps]
    assert lengths == [[2, 2], [1, 2, 2, 1]]


def test_layers_keep_their_modules_with_their_number() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            def layer(h: Any, p: Any) -> Any:
                with jax.named_scope("block"):
                    return _layer(h, p), None

            return jnp.sum(lax.scan(layer, x, params["layers"])[0] ** 2)

        return _descend(params, jax.grad(loss)(params))

    (cut,) = _cut(step, _params(), Cuts((EVERYWHERE,)))
    for region in ("forward", "backward"):
        modules = {op.origin.module for op in cut.graph.ops if op.origin.region == region}
        assert {f"block[{i}]" for i in range(LAYERS)} <= modules


def test_no_cuts_are_the_same_step() -> None:
    step = zoo_step("gpt_scan")
    assert cut_at(step, Cuts(((),))) is step


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "has 1 scans over layers"),
        (((1,), (1,)), "cuts are given for 2"),
        (((0,),), "no cuts between the 4 layers"),
        (((4,),), "numbers from 1 to 3"),
        (((2, 2),), "rising"),
    ],
)
def test_cuts_that_are_none_are_refused(layers: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cut_at(zoo_step("gpt_scan_raw"), Cuts(layers))


# -- what steps do with stacks -----------------------------------------------------------------


def _optax(tx: optax.GradientTransformation) -> tuple[Step, Any]:
    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(state["params"], x)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, {"params": _params(), "opt": tx.init(_params())}


def _no_biases(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim != 2 or p.shape[0] != LAYERS, params)


OPTIMIZERS = {
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-2)),
    "masked decay": optax.adamw(1e-2, eps=1e-2, weight_decay=0.1, mask=_no_biases),
    "by layer": optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1, momentum=0.9)),
    "accumulating": optax.MultiSteps(optax.adam(1e-2, eps=1e-2), 2).gradient_transformation(),
    "only if finite": optax.apply_if_finite(optax.adam(1e-2, eps=1e-2), 3),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_the_pieces(name: str) -> None:
    (step,) = _cut(*_optax(OPTIMIZERS[name]), Cuts(((2,),)))
    state = [i for i in step.graph.inputs if i.role is Role.STATE]
    assert not step.notes
    assert not [i.path for i in state if i.value.shape[:1] == (LAYERS,)]


def _with(loss: Callable[[Any, Any], Any]) -> Step:
    def step(params: Any, x: Any) -> Any:
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return _descend(params, grads), value, aux

    return step


RATES = jnp.linspace(0.5, 1.0, LAYERS)


def _constant_slices(params: Any, x: Any) -> Any:
    """Closed-over rates, numbers of the layers and zeros go along with the parameters."""

    def layer(h: Any, xs: Any) -> Any:
        p, rate, number, zero = xs
        out = h + rate * jnp.tanh(h @ p["w"] + p["b"]) * jnp.cos(number) + zero
        return out, (out**2).mean()

    beside = RATES, jnp.arange(LAYERS, dtype=jnp.float32), jnp.zeros((LAYERS, WIDTH))
    h, sizes = lax.scan(layer, x, (params["layers"], *beside))
    return (h**2).mean() + sizes.sum(), sizes


def _half_precision(params: Any, x: Any) -> Any:
    """The stack is cast as a whole, and its gradient back."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params["layers"])
    h, _ = lax.scan(lambda h, p: (_layer(h, p), None), x.astype(jnp.bfloat16), half)
    return (h.astype(jnp.float32) ** 2).mean(), ()


def _decay_in_the_loss(params: Any, x: Any) -> Any:
    """Norms over the whole stack: flat, by layer, and as one product."""
    w = params["layers"]["w"]
    flat = w.reshape(-1)
    norms = jnp.sqrt(jnp.einsum("lab,lab->l", w, w))
    first = jnp.sum(jnp.abs(w[0])) + jnp.max(w)
    return _loss(params, x) + 1e-3 * (flat @ flat) + norms.mean() + 1e-3 * first, norms


def _turned(params: Any, x: Any) -> Any:
    """Each layer is used twice, transposed the second time, in two scans."""
    turned = jax.tree.map(lambda p: p * 1.0, params["layers"])
    turned["w"] = turned["w"].transpose(0, 2, 1)
    h, _ = lax.scan(lambda h, p: (_layer(h, p), None), x, params["layers"])
    h, _ = lax.scan(lambda h, p: (_layer(h, p), None), h, turned, reverse=True)
    return (h**2).mean(), ()


def _keys(params: Any, x: Any) -> Any:
    """A key for each layer."""
    keys = jax.random.split(jax.random.key(0), LAYERS)

    def layer(h: Any, xs: Any) -> Any:
        p, key = xs
        return _layer(h, p) * jax.random.bernoulli(key, 0.8, h.shape), None

    return (lax.scan(layer, x, (params["layers"], keys))[0] ** 2).mean(), ()


def _rematerialised(params: Any, x: Any) -> Any:
    """The whole stack within one remat."""

    @jax.checkpoint
    def stack(layers: Any, x: Any) -> Any:
        return lax.scan(lambda h, p: (_layer(h, p), None), x, layers)[0]

    return (stack(params["layers"], x) ** 2).mean(), ()


def _nested(params: Any, x: Any) -> Any:
    """A scan within the body of the scan over layers."""

    def layer(h: Any, p: Any) -> Any:
        return lax.scan(lambda h, _: (_layer(h, p), h.sum()), h, None, length=2)

    h, sums = lax.scan(layer, x, params["layers"])
    return (h**2).mean(), sums


LOSSES = (
    _constant_slices,
    _half_precision,
    _decay_in_the_loss,
    _turned,
    _keys,
    _rematerialised,
    _nested,
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__.strip("_"))
def test_what_a_loss_does_with_a_stack_is_done_to_its_pieces(loss: Any) -> None:
    cuts = Cuts((EVERYWHERE,)), Cuts(((2,),), inline=False)
    assert not [step.notes for step in _cut(_with(loss), _params(), *cuts) if step.notes]


def test_a_remat_around_the_scan_is_cut_when_opened_too() -> None:
    step = without_remat(trace(StepSpec(_with(_rematerialised)), (_params(), X), {}))
    cut = cut_at(step, Cuts((EVERYWHERE,)))
    leaves = jax.tree.leaves((_params(), X))
    assert largest_error(run_step(cut, leaves), run_step(step, leaves)) <= 1e-6
    assert not cut.notes
    assert "scan" not in kinds(cut.graph)


def test_two_passes_over_the_layers_are_cut_together() -> None:
    def step(params: Any, x: Any) -> Any:
        first = jax.grad(_loss)(params, x)
        beside = jax.tree.map(lambda p, g: p + 0.05 * g / optax.tree.norm(first), params, first)
        return _descend(params, jax.grad(_loss)(beside, x))

    (cut,) = _cut(step, _params(), Cuts((EVERYWHERE,)))
    assert not cut.notes
    assert "scan" not in kinds(cut.graph)


def _backwards(params: Any, x: Any) -> Any:
    """The layers in the opposite order: a stack whose layers are mixed."""
    mixed = jax.tree.map(lambda p: p[::-1], params["layers"])
    h, _ = lax.scan(lambda h, p: (_layer(h, p), None), x, params["layers"])
    h, _ = lax.scan(lambda h, p: (_layer(h, p), None), h, mixed)
    return (h**2).mean(), ()


def test_what_mixes_layers_reads_them_joined_and_says_so() -> None:
    (cut,) = _cut(_with(_backwards), _params(), Cuts((EVERYWHERE,)))
    assert any("rev at test_scan_split.py" in note and "joined again" in note for note in cut.notes)
    assert "concatenate" in kinds(cut.graph)


# -- microbatches ------------------------------------------------------------------------------


def test_both_traces_of_a_microbatch_are_cut_alike() -> None:
    step, x = _with(_keys), _numbers(8, WIDTH)
    trace = trace_microbatch(StepSpec(step, state_argnums=(0,)), (_params(), x), {}, 4)
    again = split_microbatch(trace, Cuts((EVERYWHERE,)))
    values = [[r.name for op in t.graph.ops for r in op.results] for t in (again.whole, again.part)]
    assert values[0] == values[1]
    named = {name for name, _ in again.sources}
    assert len(named) >= LAYERS  # the bits of every layer's own dropout
    assert named <= set(values[0])
    batching = Exact().run(batch_graphs(again), setting("a=1"))
    flat = replace(again.whole, out_tree=jax.tree.structure([0] * len(again.whole.output_pieces)))
    leaves = [_params()["head"], *(_params()["layers"][k] for k in "bw"), x]
    pieces = [
        leaves[p.leaf] if p.stop is None else leaves[p.leaf][p.start : p.stop]
        for p in again.whole.input_pieces
    ]
    found = Cut(replace(again, whole=flat), batching)(*pieces)
    stacks = [np.concatenate(found[i : i + LAYERS]) for i in (1, 1 + LAYERS)]
    expected = jax.tree.leaves(jax.jit(step)(_params(), x))
    assert largest_error([found[0], *stacks, found[-1]], expected) <= 1e-6
