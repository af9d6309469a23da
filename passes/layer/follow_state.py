"""Layers cut where the state lies: for a function that runs on the stages of another step.

stage      0            1            2           given: the submesh of each state input,
state      w0           w1           w2          and the submeshes that the stages follow
ops        x0 = x @ w0  x1 = x0 @ w1 y = x1 @ w2
                      ^            ^             found: the cuts
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from autopar.errors import GraphError
from autopar.ir.batching import Batching
from autopar.ir.stages import LayerSequence
from autopar.passes.base import AbstractLayering, Setting, Single
from autopar.passes.layer.forward_pass import Forward, Ints, forward_of
from autopar.passes.layer.sequence import layers_from


@dataclass(frozen=True)
class FollowState(AbstractLayering):
    """Makes a layer a stage: the least state is read off its submesh, then the fewest bytes cross.

    `homes` has (path, submesh) of state inputs, `submeshes` the submesh of each stage in order.
    """

    name: ClassVar[str] = "follow-state"
    homes: tuple[tuple[str, int], ...] = field(default=(), metadata={"option": False})
    submeshes: tuple[int, ...] = field(default=(0,), metadata={"option": False})

    def run(self, given: Batching, setting: Setting) -> LayerSequence:
        """The layers; raises GraphError where there are fewer forward ops than stages."""
        forward, stages = forward_of(given), len(self.submeshes)
        if stages == 1:
            return Single().run(given, setting)
        if len(forward.positions) < stages:
            raise GraphError(
                f"{given.graph.name} has {len(forward.positions)} ops that read the batch, fewer "
                f"than the {stages} stages that it is to run on"
            )
        return layers_from(given, forward, self._starts(forward))

    def _starts(self, forward: Forward) -> list[int]:
        """The first ops of the stages, by dynamic programming over forward ops i and stages s.

            cost[i, s] = moved[i, s] + min(cost[i-1, s],                     it stays in the stage
                                           cost[i-1, s-1] + crossing[i-1])   or begins it

        moved[i, s] are bytes of state that op i reads first and whose home is not stage s. They
        count before all bytes that cross: state should never move.
        """
        moved, crossing = self._moved(forward), forward.crossing
        count, stages = len(forward.positions), len(self.submeshes)
        weight = 1 + int(crossing.sum())  # any byte of state outweighs all that crosses
        far = np.iinfo(np.int64).max // 2
        best = np.full(stages, far, dtype=object)
        best[0] = weight * int(moved[0, 0])
        begins = np.zeros((count, stages), dtype=bool)
        for i in range(1, count):
            entered = np.full(stages, far, dtype=object)
            entered[1:] = best[:-1] + int(crossing[i - 1])
            begins[i] = entered < best
            best = np.minimum(entered, best) + weight * moved[i].astype(object)
        starts, stage = [0] * stages, stages - 1
        for i in range(count - 1, 0, -1):  # back from the last op in the last stage
            if begins[i, stage]:
                starts[stage] = i
                stage -= 1
        return starts

    def _moved(self, forward: Forward) -> Ints:
        """Bytes of state that each forward op would have moved to each stage."""
        graph, where = forward.graph, dict(self.homes)
        # State, and what is made of nothing but state (a cast of it), lies where that state does.
        home = {i.value.name: where[i.path] for i in graph.inputs if i.path in where}
        place = {i: at for at, i in enumerate(forward.positions)}
        moved = np.zeros((len(place), len(self.submeshes)), dtype=np.int64)
        for i, op in enumerate(graph.ops):
            names = [n for n in dict.fromkeys(op.value_operands) if n in home]
            if i in place:
                for name in names:
                    moved[place[i]] += [
                        graph.values[name].nbytes * (home[name] != k) for k in self.submeshes
                    ]
            elif names and not forward.moments[i].loops:
                largest = max(names, key=lambda n: graph.values[n].nbytes)
                home.update((r.name, home[largest]) for r in op.results)
        return moved
