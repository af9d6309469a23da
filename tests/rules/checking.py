"""Checks a rule and its local run together: sharded in every legal way, the op gives the same.

`check_rule(fn, *args)` takes every equation of `fn`, gives the axes of a 2 by 4 mesh to its
shardable factors in all ways, runs the pieces in one manual region and compares with the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar.frontend.plain_data import dtype_name, plain_params
from autopar.frontend.trace.graph import dims_apart
from autopar.frontend.traced import Const, Equation
from autopar.ir.graph import Op
from autopar.ir.rule import Dims, Kind, Rule
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Literal, Value
from autopar.rules.custom import RuleBook
from autopar.rules.table import rule_for
from autopar.runtime.local import Local, LocalRun, local_run
from tests.compiling import NEWER_EMITTERS

MESH = MeshShape(("data", "model"), (2, 4))
Axes = Mapping[int, tuple[str, ...]]  # of each factor
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
# Of these every run gives others, or contents that mean nothing.
UNCOMPARED = ("rng_uniform", "empty")


@dataclass(frozen=True)
class Case:
    """One equation, one way to shard it, and the operands that come as partial sums."""

    equation: Equation
    operands: tuple[Any, ...]  # whole values
    expected: tuple[Any, ...]
    rule: Rule
    axes: Axes
    partial: tuple[int, ...] = ()
    run: LocalRun | None = None

    def __str__(self) -> str:
        given = {f: "+".join(axes) for f, axes in self.axes.items()}
        name = self.equation.primitive.name
        return f"{name} {self.rule} with axes {given}, partial operands {self.partial}"

    def shardings(self, tensors: Sequence[Dims], partial: Sequence[bool]) -> list[Sharding]:
        """How tensors lie: the axes of each dim are those of its factors."""
        return [
            Sharding(
                tuple(tuple(a for f in dim for a in self.axes.get(f, ())) for dim in dims),
                ("model",) if is_partial else (),
            )
            for dims, is_partial in zip(tensors, partial, strict=True)
        ]

    def local(self) -> Local:
        """What the local run is told."""
        reduced = tuple(
            a
            for f, axes in self.axes.items()
            if self.rule.factors[f].kind is Kind.REDUCE
            for a in axes
        )
        operands = self.shardings(
            self.rule.operands, [i in self.partial for i in range(len(self.operands))]
        )
        results = self.shardings(self.rule.results, [bool(self.partial)] * len(self.expected))
        return Local(
            MESH,
            tuple(operands),
            tuple(Sharding(s.dims, s.partial + reduced) for s in results),
            tuple(np.shape(v) for v in self.operands),
            tuple(np.shape(v) for v in self.expected),
            "cpu",
        )


def spec(sharding: Sharding) -> PartitionSpec:
    """A sharding as JAX writes it, partial axes left out."""
    return PartitionSpec(*(axes or None for axes in sharding.dims))


def check_rule(fn: Callable[..., Any], *args: Any, book: RuleBook = RuleBook()) -> list[str]:
    """Check every equation of `fn`; returns the names of the primitives that were sharded."""
    cases = [case for steps in whole_run(fn, *args) for case in cases_of(*steps, book=book)]
    run_cases(cases)
    return [c.equation.primitive.name for c in cases if c.axes]


Step = tuple[Equation, tuple[Any, ...], tuple[Any, ...]]


def whole_run(fn: Callable[..., Any], *args: Any) -> list[Step]:
    """Every equation with its operands and results, run whole."""
    closed = jax.make_jaxpr(fn)(*args)
    equations: list[Equation] = []

    def run(flat: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
        equations.clear()
        steps: list[tuple[list[Any], list[Any]]] = []
        for equation, operands, results in _evaluated(closed.jaxpr, closed.consts, flat):
            equations.append(equation)
            steps.append((operands, results))
        return steps

    options = _emitters(eqn.primitive.name for eqn in _inner_equations(closed.jaxpr))
    values = jax.jit(run, compiler_options=options)(jax.tree.leaves(args))
    return [
        (e, tuple(map(_fetched, ins)), tuple(map(_fetched, outs)))
        for e, (ins, outs) in zip(equations, values, strict=True)
    ]


def _emitters(primitives: Iterable[str]) -> dict[str, bool | int | str]:
    """XLA's options for a program of such primitives; the newer emitters take twice as long."""
    return NEWER_EMITTERS if any("scatter" in name for name in primitives) else {}


def _fetched(value: Any) -> Any:
    """A value off its device, so that it may go to any; keys have no other form."""
    key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key)
    return value if key else np.asarray(value)


def _evaluated(jaxpr: Any, consts: Sequence[Any], flat: Sequence[Any]) -> Iterator[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, flat, strict=True))
    yield from _run_jaxpr(jaxpr, env)


def _run_jaxpr(jaxpr: Any, env: dict[Any, Any]) -> Iterator[Any]:
    def read(var: Any) -> Any:
        return var.val if hasattr(var, "val") else env[var]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in CALLS:
            body = getattr(inner, "jaxpr", inner)
            nested = dict(zip(body.constvars, getattr(inner, "consts", ()), strict=True))
            nested.update(zip(body.invars, operands, strict=True))
            yield from _run_jaxpr(body, nested)
            results = [v.val if hasattr(v, "val") else nested[v] for v in body.outvars]
        else:
            out = eqn.primitive.bind(*operands, **eqn.params)
            results = list(out) if eqn.primitive.multiple_results else [out]
            yield equation_of(eqn), operands, results
        env.update(zip(eqn.outvars, results, strict=True))


def equation_of(eqn: Any) -> Equation:
    """A jaxpr equation as the front end seals it; literals keep their values."""
    operands = tuple(
        Const(v.val, v.aval) if hasattr(v, "val") else n for n, v in enumerate(eqn.invars)
    )
    results = tuple(range(len(operands), len(operands) + len(eqn.outvars)))
    avals = tuple(v.aval for v in eqn.outvars)
    return Equation(
        primitive=eqn.primitive,
        params=dict(eqn.params),
        operands=operands,
        operand_shapes=tuple(v.aval.shape for v in eqn.invars),
        results=results,
        result_avals=avals,
        bodies=(),
        name_stack="",
        line="",
    )


def traced_ops(fn: Callable[..., Any], *args: Any) -> list[tuple[Op, list[Value]]]:
    """Every op of `fn` and its operands, without running any."""
    return [
        op_of(equation_of(eqn), [getattr(v, "val", v.aval) for v in eqn.invars])
        for eqn in _inner_equations(jax.make_jaxpr(fn)(*args).jaxpr)
    ]


def _inner_equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            yield from _inner_equations(getattr(inner, "jaxpr", inner))
        else:
            yield eqn


def op_of(equation: Equation, operands: Sequence[Any]) -> tuple[Op, list[Value]]:
    """The equation as an op of a graph, and its operands as values."""
    names: list[str | Literal] = []
    values: list[Value] = []
    for n, (ref, operand) in enumerate(zip(equation.operands, operands, strict=True)):
        dtype = dtype_name(_dtype(operand))
        literal = isinstance(ref, Const)
        names.append(Literal(str(operand), dtype) if literal else f"%x{n}")
        values.append(Value("" if literal else f"%x{n}", getattr(operand, "shape", ()), dtype))
    results = tuple(
        Value(f"%{n}", aval.shape, dtype_name(aval.dtype))
        for n, aval in enumerate(equation.result_avals)
    )
    apart = tuple(dims_apart(equation).values())
    params = (*plain_params(equation.params), *((("grid_apart", apart),) if apart else ()))
    return Op(equation.primitive.name, tuple(names), results, params), values


def _dtype(operand: Any) -> Any:
    return operand.dtype if hasattr(operand, "dtype") else jnp.result_type(operand)


def cases_of(
    equation: Equation,
    operands: tuple[Any, ...],
    expected: tuple[Any, ...],
    *,
    book: RuleBook = RuleBook(),
    run: LocalRun | None = None,
) -> Iterator[Case]:
    """Every legal way to give mesh axes to the factors, then each set of partial operands."""
    op, values = op_of(equation, operands)
    rule = rule_for(op, values, book)
    case = partial(Case, equation, operands, expected, rule, run=run)
    verify(rule, op, values)
    for axes in assignments(rule, ("data", "model")):
        if axes or not rule.shardable:
            yield case(axes)
    if not op.results or not all(v.is_floating for v in op.results):
        return
    for group in rule.linear:
        for axes in assignments(rule, ("data",)):
            yield case(axes, tuple(group))


def verify(rule: Rule, op: Op, operands: Sequence[Value]) -> None:
    """The factors of each dim make up its size, and partial sets name operands that there are."""
    tensors = (*rule.operands, *rule.results)
    for value, dims in zip((*operands, *op.results), tensors, strict=True):
        for n, dim in zip(value.shape, dims, strict=True):
            sizes = [rule.factors[f].size for f in dim]
            assert not dim or math.prod(sizes) == n, f"{op.kind} {rule}: {sizes} do not make {n}"
    assert all(0 <= n < len(operands) for group in rule.linear for n in group)


def assignments(rule: Rule, names: Sequence[str]) -> Iterator[Axes]:
    """Each axis on one shardable factor or none; both on one factor in both orders."""
    choices = [None, *rule.shardable]
    for picks in itertools.product(choices, repeat=len(names)):
        axes: dict[int, tuple[str, ...]] = {}
        for name, factor in zip(names, picks, strict=True):
            if factor is not None:
                axes[factor] = (*axes.get(factor, ()), name)
        if all(rule.factors[f].size % MESH.size(a) == 0 for f, a in axes.items()):
            yield axes
            if any(len(a) > 1 for a in axes.values()):
                yield {f: a[::-1] for f, a in axes.items()}


def run_cases(cases: Sequence[Case]) -> None:
    """Run all cases in one manual region and compare; raises AssertionError naming the case."""
    mesh = jax.make_mesh(MESH.sizes, MESH.names, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inputs: list[Any] = []
    in_specs: list[Any] = []
    out_specs: list[Any] = []
    for case in cases:
        local = case.local()
        for n, (value, sharding) in enumerate(zip(case.operands, local.operands, strict=True)):
            if n in case.partial:
                inputs.append(_pieces(value, n))
                in_specs.append(PartitionSpec("model", *spec(sharding)))
            else:
                inputs.append(value)
                in_specs.append(spec(sharding))
        out_specs.append([spec(s) for s in local.results])

    def pieces(flat: list[Any]) -> list[list[Any]]:
        given = iter(flat)
        return [_run_case(case, [next(given) for _ in case.operands]) for case in cases]

    region = jax.shard_map(
        pieces, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
    )
    options = _emitters(case.equation.primitive.name for case in cases)
    compiled = jax.jit(region, compiler_options=options)
    for case, outs in zip(cases, compiled(inputs), strict=True):
        if case.equation.primitive.name not in UNCOMPARED:
            for out, expected in zip(outs, case.expected, strict=True):
                _same(out, expected, case)


def _pieces(value: Any, seed: int) -> Any:
    """Four tensors that sum up to a tensor, each about as large as it."""
    value = np.asarray(value)
    largest = float(np.max(np.abs(value), initial=0, where=np.isfinite(value)))
    # A power of two keeps the small whole numbers of most examples exact.
    scale = 2.0 ** math.floor(math.log2(largest) - 1) if largest else 1.0
    draws = np.random.default_rng(seed).integers(-3, 4, (3, *value.shape))
    noise = (draws * scale).astype(value.dtype)
    return np.concatenate([noise, (value - noise.sum(0, dtype=value.dtype))[None]])


def _run_case(case: Case, operands: list[Any]) -> list[Any]:
    given = [o[0] if n in case.partial else o for n, o in enumerate(operands)]
    run = case.run or local_run(case.equation.primitive.name)
    results = list(run(case.equation, given, case.local()))
    for f, axes in case.axes.items():
        factor = case.rule.factors[f]
        if factor.kind is Kind.REDUCE:
            results = [_combined(r, factor.combiner, axes) for r in results]
    return [jax.lax.psum(r, "model") for r in results] if case.partial else results


def _combined(part: jax.Array, combiner: str, axes: tuple[str, ...]) -> jax.Array:
    if combiner in ("and", "or"):
        extreme: Any = jax.lax.pmin if combiner == "and" else jax.lax.pmax
        found: jax.Array = extreme(part.astype(jnp.int32), axes)
        return found.astype(part.dtype)
    combiners: dict[str, Any] = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
    combined: jax.Array = combiners[combiner](part, axes)
    return combined


def _same(out: Any, expected: Any, case: Case) -> None:
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        words: Any = jax.random.key_data
        out, expected = words(out), words(expected)
    out, expected = np.asarray(out), np.asarray(expected)
    assert out.shape == expected.shape, f"{case}: shape {out.shape}, not {expected.shape}"
    assert out.dtype == expected.dtype, f"{case}: dtype {out.dtype}, not {expected.dtype}"
    if np.issubdtype(expected.dtype, np.inexact):
        close = np.allclose(out, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        close = np.array_equal(out, expected)
    assert close, f"{case}:\n{out}\nis not\n{expected}"
