"""Seconds of moving a value from each of some shardings to each of others, priced once a mesh."""

from __future__ import annotations

import numpy as np

from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.sharding import Sharding
from autopar.ir.values import Value
from autopar.passes.shard.solver.problem import Floats

Key = tuple[tuple[int, ...], str, tuple[Sharding, ...], tuple[Sharding, ...], tuple[str, ...]]


class ReshardCosts:
    """The tables of one cluster and mesh; whoever poses a second problem there finds them made."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.resharder = Resharder(prices)
        self._made: dict[Key, Floats] = {}

    def matrix(
        self,
        value: Value,
        before: tuple[Sharding, ...],
        after: tuple[Sharding, ...],
        combiners: tuple[str, ...] = (),
    ) -> Floats:
        """[before, after] seconds; infinite where there is no such move.

        `combiners` say for each of `before` how its partial results combine; left out, by sums.
        """
        key = (value.shape, value.dtype, before, after, combiners)
        if key not in self._made:
            self._made[key] = self._priced(value, before, after, combiners)
        return self._made[key]

    def _priced(
        self,
        value: Value,
        before: tuple[Sharding, ...],
        after: tuple[Sharding, ...],
        combiners: tuple[str, ...],
    ) -> Floats:
        mesh = self.prices.mesh
        partial = any(s.partial for s in (*before, *after))
        table = self.resharder.table(value, partial)
        rows: list[int] = []
        extra = np.zeros(len(before))
        for i, state in enumerate(before):
            special = bool(combiners) and combiners[i] != "sum" and bool(state.partial)
            if special:
                local = state.local_bytes(value, mesh)
                extra[i] = self.prices.collective("all-reduce", local, state.partial)
            rows.append(table.index.get(Sharding(state.dims) if special else state, -1))
        columns = [table.index.get(s, -1) for s in after]
        seconds: Floats = table.seconds[np.ix_(rows, columns)] + extra[:, None]
        seconds[np.array(rows) < 0, :] = np.inf
        seconds[:, np.array(columns) < 0] = np.inf
        return seconds
