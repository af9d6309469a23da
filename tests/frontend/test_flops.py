"""FLOPs equal what one works out by hand, and what XLA counts."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.frontend.tracing import X, checked, graph_of, shape, zoo_step
from tests.zoo import cases


def _conv(x: Any, w: Any, **given: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **given
    )


def _twice(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (c @ w, None), x, None, length=6)[0]


HAND: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "matrix product": (lambda x, w: x @ w, (X, shape(8, 5)), 2 * 16 * 8 * 5),
    "batched product": (
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
        (shape(3, 4, 5), shape(3, 5, 6)),
        2 * 3 * 4 * 5 * 6,
    ),
    "product by groups": (
        lax.ragged_dot,
        (X, shape(3, 8, 5), jax.ShapeDtypeStruct((3,), jnp.int32)),
        2 * 16 * 8 * 5,
    ),
    "convolution": (_conv, (shape(2, 8, 8, 3), shape(3, 3, 3, 10)), 2 * (2 * 6 * 6 * 10) * 27),
    "grouped convolution": (
        lambda x, w: _conv(x, w, feature_group_count=2),
        (shape(2, 8, 8, 4), shape(3, 3, 2, 10)),
        2 * (2 * 6 * 6 * 10) * 18,
    ),
    "convolution of inputs that lie apart": (  # 2 x 7 x 7 of each: their zeros are not multiplied
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (shape(2, 7, 7, 3), shape(4, 4, 3, 10)),
        2 * (2 * 7 * 7 * 3) * (4 * 4 * 10),
    ),
    "scan": (_twice, (X, shape(8, 8)), 6 * 2 * 16 * 8 * 8),
    "element-wise": (jnp.sin, (X,), 128),
    "sum": (jnp.sum, (X,), 128),
    "moving": (lambda x: x.T.reshape(4, 32)[:2], (X,), 0),
    "the dearer branch": (
        lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.sin(x)),
        (X, shape(8, 8)),
        2 * 16 * 8 * 8 + 1,
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_by_hand(name: str) -> None:
    fun, args, flops = HAND[name]
    assert graph_of(fun, *args).flops == flops


@pytest.mark.parametrize("name", ["gpt", "clip", "gqa_llama", "moe", "mlp"])
def test_as_xla_counts(name: str) -> None:
    case = cases("adam")[name]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    counted: Any = jax.jit(case.step).lower(state, case.batch(0)).cost_analysis()
    assert checked(zoo_step(name)).flops == pytest.approx(counted["flops"], rel=0.04)
