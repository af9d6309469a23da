"""The module that each op of a step belongs to, where no op has a named scope, as in flax nnx.

    x = x + gelu(norm(x, l.ln) @ l.up) @ l.down     for each layer l, all on one line

1. An op that reads a parameter belongs to that parameter's module: layers/3.
2. An op on a line on which there are such belongs to the one of its neighbors on that line: those
   that make what it reads, read what it makes or read the same.
3. Any other belongs to the innermost module that holds all of those before it and, in the forward
   pass, after it: attention, between q/3, k/3, v/3 and o/3, belongs to what these are in. A loss,
   after which there is none, and the update belong to none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.inspecting.flow import Flow
from autopar.ir.graph import Op, Origin
from autopar.ir.listing import LocalOp, Loop
from autopar.ir.paths import enclosing_path, module_of
from autopar.ir.values import Input, Role

UPDATE = "update"
_SWEEPS = 2  # over lines, forth and back


def parameters_of(flows: Sequence[Flow]) -> Iterator[tuple[Input, Origin]]:
    """The state that an op reads before the update, with the origin of the first that does."""
    for flow in flows:
        for given in flow.listed.graph.inputs:
            reader = flow.reader(given.value.name) if given.role is Role.STATE else None
            if reader is not None and reader.origin.region != UPDATE:
                yield given, reader.origin


def has_scopes(flows: Sequence[Flow]) -> bool:
    """True if any op of a step has a named scope."""
    ops = (op for flow in flows for op in flow.listed.graph.walk())
    return any(op.origin.module for op in ops)


def homes_of(flows: Sequence[Flow]) -> dict[int, str]:
    """The module of every op that runs, by the op's identity."""
    places = _Places()
    modules = {given.path: module_of(given.path) for given, _ in parameters_of(flows)}
    for flow in flows:
        for step, _ in flow.steps:
            if isinstance(step, LocalOp | Loop):
                places.add(flow, step, modules)
    for _ in range(_SWEEPS):
        places.sweep()
    return places.found()


@dataclass
class _Places:
    """The ops of a step in the order in which they run, and what is known of each."""

    ops: list[Op] = field(default_factory=list[Op])
    makers: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    readers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    homes: dict[int, str] = field(default_factory=dict[int, str])
    on_line: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    line_of: dict[int, str] = field(default_factory=dict[int, str])

    def add(self, flow: Flow, step: LocalOp | Loop, modules: dict[str, str]) -> None:
        """Note an op, its neighbors, and its module where it reads a parameter."""
        op = flow.op(step)
        if op.origin.region == UPDATE:
            return
        own = id(op)
        names = [o for o in step.operands if o is not None]
        made_by = {id(flow.makers[n]) for n in names if n in flow.makers} - {own}
        self.ops.append(op)
        self.makers[own], self.line_of[own] = tuple(made_by), op.origin.line
        for maker in made_by:
            self.readers.setdefault(maker, []).append(own)
        read = {modules[p] for n in names if (p := flow.paths.get(n, "")) in modules}
        if read and isinstance(step, LocalOp):
            self._settle(own, enclosing_path(sorted(read)))

    def sweep(self) -> None:
        """Give ops the module of their neighbors on the same line, forth and back."""
        for op in (*self.ops, *reversed(self.ops)):
            own, line = id(op), op.origin.line
            known = self.on_line.get(line, set())
            if own in self.homes or not known:
                continue
            near = known if len(known) == 1 else self._near(own, line)
            if len(near) == 1:
                self._settle(own, *near)

    def found(self) -> dict[int, str]:
        """The module of every op."""
        before, after = dict(self.homes), dict(self.homes)
        forward = [op for op in self.ops if op.origin.region == "forward"]
        inside = {id(op) for op in forward}
        for op in reversed(forward):
            told = [after[r] for r in self.readers.get(id(op), ()) if r in after and r in inside]
            if told and id(op) not in after:
                after[id(op)] = enclosing_path(told)
        for op in self.ops:
            own = id(op)
            if own in self.homes:
                continue
            told = [before[m] for m in self.makers[own] if m in before]
            readers = self.readers.get(own, [])
            if own in inside and (not readers or not inside.isdisjoint(readers)):
                told.append(after.get(own, ""))  # after the loss comes nothing: it is in none
            if told:  # a constant of the backward pass tells nothing to who reads it
                before[own] = enclosing_path(told)
        return before

    def _settle(self, own: int, home: str) -> None:
        self.homes[own] = home
        self.on_line.setdefault(self.line_of[own], set()).add(home)

    def _near(self, own: int, line: str) -> set[str]:
        """The modules of an op's neighbors on its line, by the values that tell one alone."""
        groups = [(m, *self.readers[m]) for m in self.makers[own]]
        found: set[str] = set()
        for group in (*groups, self.readers.get(own, ())):
            here = (o for o in group if o in self.homes and self.line_of[o] == line)
            told = {self.homes[other] for other in here}
            found |= told if len(told) == 1 else set()
        return found
