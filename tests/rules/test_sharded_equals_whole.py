"""Every primitive, sharded in every way that its rule allows, computes what it computes whole."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.rules.custom import RuleBook
from autopar.rules.table import primitive_names, rule_for
from autopar.runtime.local import rebind
from tests.rules import cases, cases_along, cases_kernels
from tests.rules.cases import Example, f
from tests.rules.checking import (
    assignments,
    cases_of,
    check_rule,
    run_cases,
    traced_ops,
    whole_run,
)
from tests.rules.primitives import primitives

EXAMPLES = [
    *cases.POINTWISE,
    *cases.SHAPE,
    *cases.CONTRACT,
    *cases_along.REDUCE,
    *cases_along.WINDOW,
    *cases_along.GATHER,
    *cases_along.SCATTER,
    *cases_along.LINALG,
    *cases_along.RANDOM,
    *cases_kernels.KERNELS,
]

# Their results can only be whole: no axis may be given to anything.
NEVER_SHARDED = {
    "cholesky_update",
    "platform_index",
    "random_clone",
    "random_fold_in",
    "random_gamma",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "rng_uniform",
}
# Hints that only a program with a mesh of its own holds; each is an identity.
HINTS = {"layout_constraint", "reshard", "sharding_constraint"}


def _named(example: Example) -> object:
    marks = [pytest.mark.smoke] if example.smoke else []
    return pytest.param(example, id=example.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("example", [_named(e) for e in EXAMPLES])
def test_every_legal_sharding_gives_the_whole_result(example: Example) -> None:
    check_rule(example.fn, *example.args)


def test_every_primitive_with_a_rule_is_sharded_by_some_example() -> None:
    sharded: set[str] = set()
    whole: set[str] = set()
    for example in EXAMPLES:
        for op, operands in traced_ops(example.fn, *example.args):
            rule = rule_for(op, operands)
            found = any(axes for axes in assignments(rule, ("data", "model")))
            (sharded if found else whole).add(op.kind)
    # The table also knows primitives of newer releases, which no example here can call.
    here = primitive_names() & set(primitives())
    assert here - sharded == (NEVER_SHARDED | HINTS) & here
    assert NEVER_SHARDED <= whole


def test_names_of_examples_are_distinct() -> None:
    names = [e.name for e in EXAMPLES]
    assert len(names) == len(set(names))


def _wrong_offset(equation: Any, operands: Any, local: Any) -> Any:
    return rebind(equation, operands, shape=local.result_shape())


def _wrong_mask(equation: Any, operands: Any, local: Any) -> Any:
    del local
    return rebind(equation, operands)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("fn", "args", "run"),
    [
        (lambda: lax.broadcasted_iota(jnp.int32, (8, 4), 0), (), _wrong_offset),
        (
            lambda x, k: x.at[k].add(x),
            (f(8, 4), np.arange(8, dtype=np.int32)),
            _wrong_mask,
        ),
    ],
    ids=["iota-without-offset", "scatter-add-counts-operand-twice"],
)
def test_a_wrong_local_run_is_caught(fn: Any, args: Any, run: Any) -> None:
    equation, operands, expected = whole_run(fn, *args)[-1]
    with pytest.raises(AssertionError, match=equation.primitive.name):
        run_cases(list(cases_of(equation, operands, expected, run=run)))


@pytest.mark.smoke
def test_a_wrong_rule_is_caught() -> None:
    equation, operands, expected = whole_run(lambda x: lax.cumsum(x, 0), f(8))[0]
    cases = list(cases_of(equation, operands, expected, book=RuleBook({"cumsum": "a -> a"})))
    with pytest.raises(AssertionError, match="cumsum"):
        run_cases(cases)


@pytest.mark.smoke
def test_a_wrong_linear_group_is_caught() -> None:
    book = RuleBook({"exp": "a -> a; linear 0"})
    equation, operands, expected = whole_run(lax.exp, f(8))[0]
    with pytest.raises(AssertionError, match="partial operands"):
        run_cases(list(cases_of(equation, operands, expected, book=book)))
