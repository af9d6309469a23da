"""A kernel's grid is cut only where its blocks are computed each on its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from autopar.rules import attach_rules, unknown_ops
from tests.frontend.tracing import graph_of, shape
from tests.rules import cases_kernels as kernels


def _apart(fun: Callable[..., Any], *args: Any) -> Any:
    (op,) = (op for op in graph_of(fun, *args).walk() if op.kind == "pallas_call")
    return dict(op.params).get("grid_apart", ())


def test_each_dim_of_a_grid_of_tiles_is_cut() -> None:
    rows, columns = ((0, 0, 2), (2, 0, 2)), ((0, 1, 4), (1, 1, 4), (2, 1, 4))
    assert _apart(kernels.BY_TILES, shape(8, 8), shape(1, 8)) == (rows, columns)


def test_a_dim_that_is_summed_over_is_whole() -> None:
    assert _apart(kernels.SUMS, shape(8, 8)) == (((0, 0, 2), (1, 0, 2)),)


@pytest.mark.parametrize(
    "fun",
    [kernels.NUMBERED, kernels.ONE_BLOCK, kernels.REVERSED],
    ids=["asks-for-its-number", "writes-one-block", "reads-backwards"],
)
def test_blocks_that_know_of_each_other_stay_together(fun: Callable[..., Any]) -> None:
    assert _apart(fun, shape(8, 4)) == ()
    (op,) = unknown_ops(attach_rules(graph_of(fun, shape(8, 4))))
    assert op.kind == "pallas_call"


def test_a_dim_that_vmap_added_is_cut_though_the_kernel_asks_for_its_own() -> None:
    assert _apart(jax.vmap(kernels.NUMBERED), shape(16, 8, 4)) == (((0, 0, 1), (1, 0, 1)),)


def test_the_rule_has_blocks_as_factors_and_keeps_them_whole() -> None:
    graph = attach_rules(graph_of(kernels.BY_ROWS, shape(8, 4), shape(1, 4)))
    rule = graph.ops[0].rule
    assert rule is not None
    assert [rule.factors[f].size for f in rule.shardable] == [4]
    assert not unknown_ops(graph)


def test_work_is_what_the_kernel_says() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...]

    def fun(x: Any) -> Any:
        cost = pl.CostEstimate(flops=1234, transcendentals=0, bytes_accessed=0)
        out = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        return pl.pallas_call(body, out_shape=out, cost_estimate=cost, interpret=True)(x)

    assert graph_of(fun, shape(8, 4)).flops == 1234
