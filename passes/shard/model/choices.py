"""The choices of a decision: shardings of a group, or mesh axes given to an op's factors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.ir.assignment import Assignment
from autopar.ir.mesh import MeshShape
from autopar.ir.rule import Kind, Rule
from autopar.ir.sharding import Sharding
from autopar.passes.shard.model.decisions import Decision, DecisionKind


def op_choices(rule: Rule, mesh: MeshShape) -> tuple[Assignment, ...]:
    """The ways to give axes to shardable factors that divide evenly."""
    able = rule.shardable() if rule.known else ()
    found: list[Assignment] = []
    for factors in itertools.product((-1, *able), repeat=len(mesh.names)):
        shares: dict[int, int] = {}
        for f, size in zip(factors, mesh.sizes, strict=True):
            if f >= 0:
                shares[f] = shares.get(f, 1) * size
        divides = all(rule.factors[f].size % n == 0 for f, n in shares.items())
        combiners = {
            rule.factors[f].combiner for f in shares if rule.factors[f].kind is Kind.REDUCE
        }
        if divides and len(combiners) <= 1:
            found.append(Assignment(factors))
    return tuple(found)


def group_choices(decision: Decision, mesh: MeshShape) -> tuple[Sharding, ...]:
    """The shardings that divide the group's dims, with partial sums if it may be one."""
    if decision.fixed is not None:
        return tuple(_kept(decision, mesh))
    partial = decision.may_be_partial and decision.kind in (DecisionKind.GROUP, DecisionKind.PORT)
    return tuple(canonical_shardings(decision.sizes, mesh, partial))


def canonical_shardings(sizes: Sequence[int], mesh: MeshShape, partial: bool) -> Iterator[Sharding]:
    """Shardings with the axes of each dim in mesh order; whole first."""
    places = [-1, *(d for d, n in enumerate(sizes) if n > 1)] + ([-2] if partial else [])
    for given in itertools.product(places, repeat=len(mesh.names)):
        dims = tuple(
            tuple(a for a, p in zip(mesh.names, given, strict=True) if p == d)
            for d in range(len(sizes))
        )
        if all(n % mesh.size(axes) == 0 for n, axes in zip(sizes, dims, strict=True)):
            left = tuple(a for a, p in zip(mesh.names, given, strict=True) if p == -2)
            yield Sharding(dims, left)


def _kept(decision: Decision, mesh: MeshShape) -> Iterator[Sharding]:
    """Fixed dims as they were given, in their own order of axes; open dims (None) are free.

    Open dims get the axes that no fixed dim uses.
    """
    fixed = decision.fixed or ()
    taken = {a for axes in fixed for a in axes or ()}
    sizes = [n if axes is None else 1 for n, axes in zip(decision.sizes, fixed, strict=True)]
    for sharding in canonical_shardings(sizes, mesh, False):
        if taken.isdisjoint(sharding.axes()):
            dims = zip(fixed, sharding.dims, strict=True)
            yield Sharding(tuple(free if axes is None else axes for axes, free in dims))
