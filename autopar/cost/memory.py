"""How much a device holds at most while it runs a listing, when, and what it holds then."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.cost.held import peak_of
from autopar.cost.kernels import Pieces, Sizes, stored_kernels
from autopar.cost.liveness import Moment, busiest
from autopar.cost.order import combined, depth_first
from autopar.ir.graph import Graph, Op
from autopar.ir.mesh import MeshShape
from autopar.ir.peak import Peak
from autopar.ir.spmd import Block, Loop, SpmdProgram


@dataclass(frozen=True)
class Held:
    """Bytes of the arguments, the most that is held at once, arguments included, and when."""

    argument_bytes: int
    peak_bytes: int
    peak: Peak


def held_bytes(graph: Graph, program: SpmdProgram, mesh: MeshShape) -> Held:
    """What one device holds over a step.

    The listing becomes kernels, as compilers fuse it; collectives are combined and kernels
    ordered as XLA does. A stored piece lives from the kernel that makes it to the last that
    reads it. Arguments are held throughout, and state that comes back takes their buffers. A
    loop holds what its body holds at most, beside what is held around it.
    """
    sizes = Sizes(graph, mesh)
    given = {
        i.value.name: sizes.of(i.value.shape, i.value.dtype, s)
        for i, s in zip(graph.inputs, program.input_shardings, strict=True)
    }
    block = program.block
    returned = {block.outputs[o] for o, _ in graph.donated}
    walk = _Walk(sizes)
    moment = walk.busiest(block, given, {*given, *(o for o in returned if o is not None)})
    moments = walk.inward(moment)
    argument_bytes = sum(given.values())
    peak = peak_of(graph, program, given, moments)
    return Held(argument_bytes, argument_bytes + moment.nbytes, peak)


class _Walk:
    """Goes through a block and the loops in it, and keeps what each loop holds at most."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._inside: dict[tuple[str, ...], Moment] = {}

    def busiest(
        self,
        block: Block,
        given: Mapping[str, int],
        outside: Collection[str],
        slices: Mapping[str, int] | None = None,
        stacked: Pieces = frozenset(),
    ) -> Moment:
        """The moment of a block, its loops at their own moments."""
        stored = stored_kernels(block, self._sizes, given, self._inner, slices, stacked)
        return busiest(block, depth_first(combined(stored), block.outputs), outside)

    def inward(self, moment: Moment) -> tuple[Moment, ...]:
        """A moment and, where a loop runs in it, those of its body, outermost first."""
        found = [moment]
        while moment.kernel is not None:
            step = moment.block.instructions[max(0, moment.kernel.at)]
            if not isinstance(step, Loop) or step.results not in self._inside:
                break
            moment = self._inside[step.results]
            found.append(moment)
        return tuple(found)

    def _inner(self, loop: Loop, op: Op, nbytes: Mapping[str, int]) -> int:
        """Bytes of a loop's body at its busiest, beside the loop's operands and results."""
        moments = [self._body(loop, op, b, nbytes) for b in range(len(loop.bodies))]
        worst = max(moments, key=lambda m: m.nbytes, default=None)
        if worst is None:
            return 0
        self._inside[loop.results] = worst
        return worst.nbytes

    def _body(self, loop: Loop, op: Op, b: int, nbytes: Mapping[str, int]) -> Moment:
        body = loop.bodies[b]
        if op.kind != "scan":
            return self.busiest(body, dict.fromkeys(body.inputs, 0), body.inputs)
        carries, length = op.whole("num_carry"), max(1, op.whole("length"))
        start = op.whole("num_consts") + carries
        outer = [0 if o is None else nbytes.get(o, 0) for o in loop.operands]
        given = dict(zip(body.inputs[:start], outer, strict=False))
        slices = {
            n: whole // length for n, whole in zip(body.inputs[start:], outer[start:], strict=True)
        }
        carried = {o for o in body.outputs[:carries] if o is not None}
        stacked = frozenset(o for o in body.outputs[carries:] if o is not None) - carried
        return self.busiest(body, given, given, slices, stacked)
