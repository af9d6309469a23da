"""No primitive that calls of JAX and its libraries make is without a word: a rule, or a reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax, nn, random

from autopar.rules import attach_rules, primitive_fates, unknown_ops
from tests.frontend.tracing import graph_of, shape

Call = tuple[str, Callable[..., Any], tuple[Any, ...]]
TOLD = dict(primitive_fates())
KEY = jax.eval_shape(lambda: random.key(0))
ROWS, VECTOR, SQUARES = shape(8, 4), shape(4), shape(8, 4, 4)
COUNTS = shape(8, 4, dtype=jnp.int32)


def _each(module: Any, names: str, *args: Any) -> Iterator[Call]:
    """Functions of a module on the same arguments."""
    yield from ((name, getattr(module, name), args) for name in names.split())


def _vmapped(module: Any, names: str, *args: Any) -> Iterator[Call]:
    """Functions of a module, each row by itself."""
    yield from ((name, jax.vmap(getattr(module, name)), args) for name in names.split())


def _draws() -> Iterator[Call]:
    yield from _each(
        random, """
        cauchy exponential gumbel laplace logistic maxwell normal rademacher uniform bits
        split clone key_data
        """, KEY,
    )  # fmt: skip
    yield from _each(
        random,
        "bernoulli categorical chisquare dirichlet gamma loggamma lognormal pareto permutation "
        "poisson rayleigh t choice geometric",
        KEY,
        shape(4),
    )
    yield from _each(random, "beta binomial f", KEY, shape(4), shape(4))


def _lax() -> Iterator[Call]:
    yield from _each(
        lax, """
        abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh
        cumlogsumexp cummax cummin cumprod cumsum digamma erf erf_inv erfc exp exp2 expm1 floor
        is_finite lgamma log log1p logistic neg reciprocal round rsqrt sign sin sinh sort sqrt
        square stop_gradient tan tanh optimization_barrier
        """, ROWS,
    )  # fmt: skip
    yield from _each(
        lax, """
        add atan2 div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter
        polygamma pow random_gamma_grad rem sub zeta complex
        """, ROWS, ROWS,
    )  # fmt: skip
    yield from _each(lax, "bitwise_not clz population_count", COUNTS)
    yield from _each(
        lax, "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic", COUNTS, COUNTS
    )
    yield from _each(lax.linalg, "cholesky eigh lu qr svd", SQUARES)
    yield "scan", lambda x: lax.associative_scan(jnp.add, x), (ROWS,)
    yield "map", lambda x: lax.map(jnp.sin, x, batch_size=3), (ROWS,)
    yield "top_k", lambda x: lax.top_k(x, 2), (ROWS,)
    yield "platform", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (ROWS,)
    yield "named", jax.vmap(lambda x: lax.psum(x, "b") + lax.pmax(x, "b"), axis_name="b"), (ROWS,)
    yield "gathered", jax.vmap(lambda x: lax.all_gather(x, "b"), axis_name="b"), (ROWS,)
    yield "tridiagonal", lax.linalg.tridiagonal_solve, (ROWS, ROWS, ROWS, shape(8, 4, 1))


def _linalg() -> Iterator[Call]:
    yield from _each(
        jnp.linalg,
        "cholesky det eigh eigvals eigvalsh inv norm pinv qr slogdet svd cond matrix_rank",
        SQUARES,
    )
    yield "solve", jnp.linalg.solve, (SQUARES, SQUARES)
    yield from _vmapped(jnp.linalg, "lstsq", SQUARES, ROWS)
    yield from _vmapped(jax.scipy.linalg, "expm lu cho_factor schur sqrtm", SQUARES)
    sparse = importlib.import_module("jax.scipy.sparse.linalg")
    for solver in (sparse.cg, sparse.gmres, sparse.bicgstab):
        row = jax.vmap(lambda a, b, solver=solver: solver(lambda v: a @ v, b)[0])
        yield solver.__name__, row, (SQUARES, ROWS)


def _activations() -> Iterator[Call]:
    yield from _each(
        nn, """
        celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu
        log_sigmoid log_softmax logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax
        softplus sparse_plus sparse_sigmoid squareplus standardize
        """, ROWS,
    )  # fmt: skip
    yield "one_hot", lambda x: nn.one_hot(x, 5), (COUNTS,)
    heads = [shape(2, 8, 4, 4)] * 3
    yield "attention", lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True), (*heads,)


def _optax() -> Iterator[Call]:
    optax = pytest.importorskip("optax")
    names = """
        adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad lamb lars lion
        nadam nadamw novograd optimistic_gradient_descent radam rmsprop rprop sgd
        sign_sgd sm3 yogi
    """.split()
    for name in names:
        tx = getattr(optax, name)(1e-3)

        def update(w: Any, tx: Any = tx) -> Any:
            return tx.update(w, tx.init(w), w)

        yield name, update, ({"w": SQUARES, "b": VECTOR},)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.1))
    yield "clipped", lambda w: clipped.update(w, clipped.init(w), w), (ROWS,)
    yield "losses", lambda x, y: optax.softmax_cross_entropy_with_integer_labels(x, y), (
        ROWS, shape(8, dtype=jnp.int32),
    )  # fmt: skip


def _flax() -> Iterator[Call]:
    linen = pytest.importorskip("flax.linen")
    image, text = shape(2, 8, 8, 3), shape(2, 8, 16)
    layers = {
        "Conv": (linen.Conv(4, (3, 3)), image),
        "ConvTranspose": (linen.ConvTranspose(4, (3, 3)), image),
        "BatchNorm": (linen.BatchNorm(use_running_average=False), image),
        "GroupNorm": (linen.GroupNorm(1), image),
        "LayerNorm": (linen.LayerNorm(), text),
        "SpectralNorm": (linen.SpectralNorm(linen.Dense(4)), text),
        "Attention": (linen.MultiHeadDotProductAttention(2), text),
        "LSTM": (linen.RNN(linen.OptimizedLSTMCell(4)), text),
        "GRU": (linen.RNN(linen.GRUCell(4)), text),
    }
    for name, (layer, given) in layers.items():
        options = {"update_stats": True} if name == "SpectralNorm" else {}

        def run(x: Any, layer: Any = layer, options: Any = options) -> Any:
            return layer.init_with_output(random.key(0), x, **options)

        yield name, run, (given,)


def _equinox() -> Iterator[Call]:
    eqx = pytest.importorskip("equinox")
    key = random.key(0)
    layers = {
        "Conv1d": (eqx.nn.Conv1d(4, 4, 3, key=key), shape(4, 8)),
        "GroupNorm": (eqx.nn.GroupNorm(2, 4), shape(4, 8)),
        "GRUCell": (eqx.nn.GRUCell(4, 4, key=key), None),
        "MLP": (eqx.nn.MLP(4, 4, 8, 2, key=key), VECTOR),
        "MultiheadAttention": (eqx.nn.MultiheadAttention(2, 4, key=key), None),
        "Pool": (eqx.nn.AdaptiveAvgPool1d(2), shape(4, 8)),
    }
    for name, (layer, given) in layers.items():
        if given is not None:
            yield name, lambda x, layer=layer: layer(x), (given,)
    attention = layers["MultiheadAttention"][0]
    yield "MultiheadAttention", lambda x: attention(x, x, x), (ROWS,)
    cell = layers["GRUCell"][0]
    yield "GRUCell", lambda x, h: cell(x, h), (VECTOR, VECTOR)
    for mode in ("batch", "ema"):
        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "b", mode=mode)

        def normalized(x: Any, norm: Any = norm, state: Any = state) -> Any:
            rows = jax.vmap(norm, axis_name="b", in_axes=(0, None), out_axes=(0, None))
            return rows(x, state)[0]

        yield f"BatchNorm {mode}", normalized, (ROWS,)
    internal = importlib.import_module("equinox.internal")
    for kind, options in (
        ("lax", {}),
        ("bounded", {"max_steps": 8}),
        ("checkpointed", {"max_steps": 8}),
    ):

        def loop(x: Any, kind: str = kind, options: Any = options) -> Any:
            def row(c: Any) -> Any:
                return internal.while_loop(
                    lambda s: s.sum() < 9, lambda s: s * 2, c, kind=kind, **options
                )

            return jax.vmap(row)(x)

        yield f"while_loop {kind}", loop, (ROWS,)
    yield "nonbatchable", lambda x: internal.nonbatchable(x), (ROWS,)
    yield "unvmap_max", lambda x: jax.vmap(internal.unvmap_max)(x), (COUNTS,)


def _diffrax() -> Iterator[Call]:
    dfx = pytest.importorskip("diffrax")
    pid = dfx.PIDController(rtol=1e-3, atol=1e-4)
    plain, back = dfx.RecursiveCheckpointAdjoint(), dfx.BacksolveAdjoint()
    ways = {
        "Euler": (dfx.Euler(), dfx.ConstantStepSize(), plain),
        "Tsit5": (dfx.Tsit5(), pid, plain),
        "backwards": (dfx.Euler(), dfx.ConstantStepSize(), back),
    }
    for name, (solver, steps, adjoint) in ways.items():

        def loss(
            w: Any, x: Any, solver: Any = solver, steps: Any = steps, way: Any = adjoint
        ) -> Any:
            def row(y: Any) -> Any:
                term = dfx.ODETerm(lambda t, y, a: jnp.tanh(a @ y))
                return dfx.diffeqsolve(
                    term, solver, 0.0, 1.0, 0.25, y, args=w, stepsize_controller=steps,
                    adjoint=way, max_steps=16,
                ).ys  # fmt: skip

            return jnp.sum(jax.vmap(row)(x))

        yield name, jax.grad(loss), (shape(4, 4), ROWS)


LIBRARIES = {
    "random": _draws,
    "lax": _lax,
    "linalg": _linalg,
    "nn": _activations,
    "optax": _optax,
    "flax": _flax,
    "equinox": _equinox,
    "diffrax": _diffrax,
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_primitive_of_a_library_has_a_word(library: str) -> None:
    silent: dict[str, set[str]] = {}
    for name, fun, args in LIBRARIES[library]():
        graph = attach_rules(graph_of(fun, *args))
        kinds = {op.kind for op in graph.walk() if op.kind not in TOLD}
        kinds |= {op.kind for op in unknown_ops(graph)}
        if kinds:
            silent[name] = kinds
    assert not silent
