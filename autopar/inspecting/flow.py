"""A listing followed: where each of its values comes from, who reads it, and when kernels run.

    %w  params/w1                      forward: paths and makers    params/w1
    %w@1 = move %w: all-gather         the same                     params/w1
    %c = run convert %w@1              the same, seen otherwise     params/w1
    %y = run dot %x %c                 a maker of its own           dot Block_0/mlp

Backwards, `dot` is the reader of %c, %w@1 and %w: casts and moves are looked through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost.sizes import Sizes
from autopar.cost.timeline import Timed
from autopar.inspecting.loaded_plan import Listed
from autopar.ir.graph import Op, Operand
from autopar.ir.inspection import Spot
from autopar.ir.listing import Block, Fence, ListingStep, LocalOp, Loop, Move
from autopar.ir.naming import join_words
from autopar.ir.values import Role

# What leaves a value the same but for its type, its order or its scale: a piece of an argument
# stays one.
_VIEWS = frozenset(
    {
        "convert_element_type", "transpose", "reshape", "squeeze", "slice", "split", "copy",
        "broadcast_in_dim", "dynamic_slice", "rev", "reduce_precision", "mul", "div", "neg",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Flow:
    """A listing, every instruction of it with how often it runs in a step, and its names' ways.

    `paths` are of pieces of one argument, `makers` the ops behind all others; `readers` are the
    first to do more with a name than to move it or to see it otherwise. `homes` are the modules of
    ops that have no named scope, by identity.
    """

    listed: Listed
    steps: tuple[tuple[ListingStep, int], ...]
    paths: dict[str, str] = field(repr=False)
    makers: dict[str, Op] = field(repr=False)
    readers: dict[str, LocalOp | Loop] = field(repr=False)
    homes: dict[int, str] = field(default_factory=dict[int, str], repr=False)

    @classmethod
    def of(cls, listed: Listed, paths: Mapping[str, str], makers: Mapping[str, Op]) -> Flow:
        """A listing from its first instruction to the last and back.

        `paths` and `makers` are of what other listings make: its inputs that are no arguments.
        """
        flow = cls(listed, tuple(_steps(listed.listing.block, listed.runs)), {}, {}, {})
        for given in listed.graph.inputs:
            name = given.value.name
            if given.path or name in paths:
                flow.paths[name] = given.path or paths[name]
            elif name in makers:
                flow.makers[name] = makers[name]
        flow._forward(listed.listing.block)
        flow._back(listed.listing.block)
        return flow

    @property
    def timed(self) -> Timed:
        """A single run of the listing, kernel by kernel."""
        return self.listed.timed

    @property
    def sizes(self) -> Sizes:
        """The sizes of pieces, and what is stored of them."""
        return self.listed.sizes

    @cached_property
    def read_before_update(self) -> frozenset[str]:
        """The paths of the arguments that the forward or backward pass reads."""
        graph = self.listed.graph
        early = (op for op in graph.ops if op.origin.region != "update")
        names = {name for op in early for name in op.value_operands}
        return frozenset(i.path for i in graph.inputs if i.value.name in names)

    @cached_property
    def batch_paths(self) -> frozenset[str]:
        """The paths of the arguments that are given anew at every step."""
        inputs = self.listed.graph.inputs
        return frozenset(i.path for i in inputs if i.role is Role.BATCH)

    def op(self, step: LocalOp | Loop) -> Op:
        """The op that an instruction runs."""
        path = step.equation
        graph = self.listed.graph
        return graph.ops[path[0]] if len(path) == 1 else graph.op_at(path)

    def module(self, op: Op) -> str:
        """The module of an op: its named scope, or its home."""
        return op.origin.module or self.homes.get(id(op), "")

    def reader(self, name: str) -> Op | None:
        """The op that a name is read by first; None where it is only returned."""
        step = self.readers.get(name)
        return None if step is None else self.op(step)

    def subject(self, name: str) -> str:
        """A value as its user knows it: an argument's path, else the module and op behind it."""
        path, op = self.paths.get(name), self.makers.get(name)
        if path:
            return path
        if op is not None:
            return join_words(self.module(op), op.kind)
        loop, operand = self._given_by.get(name, (None, None))
        if loop is None:
            return name
        repeats = loop.control_flow is not None and loop.control_flow.repeats
        if not repeats and isinstance(operand, str):
            return self.subject(operand)
        return join_words(self.module(loop), f"what {loop.kind} hands on")

    @cached_property
    def _given_by(self) -> Mapping[str, tuple[Op, Operand]]:
        """Inputs of bodies: the op that the body is of, and its operand."""
        # The last operands are the body's: a cond's number of the branch stands before them.
        ops = (op for op in self.listed.graph.walk() if op.graphs)
        return {
            i.value.name: (op, operand)
            for op in ops
            for body in op.graphs
            for i, operand in zip(body.inputs, op.operands[-len(body.inputs) :], strict=False)
        }

    def spot(self, step: ListingStep | None) -> Spot:
        """The place of an instruction; a move of an argument is of the module that reads it."""
        stage, part = self.listed.stage, self.listed.part
        if isinstance(step, LocalOp | Loop):
            op = self.op(step)
            origin = op.origin
            return Spot(origin.region, self.module(op), origin.line, stage, part)
        if not isinstance(step, Move):
            return Spot("", "", "", stage, part)
        near = self.makers.get(step.source) or self.reader(step.result)
        module = self.module(near) if near is not None else ""
        line = step.line or (near.origin.line if near is not None else "")
        return Spot(step.region, module, line, stage, part)

    def label(self, step: ListingStep | None, part: int = 0) -> str:
        """An instruction in a few words: dot_general Block/mlp, all-gather params/w1.

        Of a move of several collectives, the one that is such a `part` of it.
        """
        if isinstance(step, LocalOp | Loop):
            op = self.op(step)
            return join_words(op.kind, self.module(op))
        if not isinstance(step, Move):
            return "copy" if step is None else "fence"
        what = step.collectives[part].kind if step.collectives else "copy"
        return f"{what} {self.subject(step.source)}"

    # -- following ---------------------------------------------------------------------------

    def _forward(self, block: Block) -> None:
        for step in block.instructions:
            if isinstance(step, Move):
                self._same(step.source, step.result)
            elif isinstance(step, Fence):
                for source, result in zip(step.sources, step.results, strict=True):
                    self._same(source, result)
            elif isinstance(step, Loop):
                # Into its bodies by what the trips leave as it is, and out by what the last gives.
                op = self.op(step)
                for b, body in enumerate(step.bodies):
                    for name, (outer, changes) in zip(
                        body.inputs, _entering(op, step, b), strict=True
                    ):
                        if outer is not None and not changes:
                            self._same(outer, name)
                    self._forward(body)
                self.makers.update(dict.fromkeys(step.results, op))
                for inner, name in _leaving(step):
                    self.makers[name] = self.makers.get(inner, op)
            else:
                # An op that only shows its operand otherwise also hands on that operand's name.
                op = self.op(step)
                seen = _seen(step, op) if op.origin.region != "update" else None
                for name in step.results:
                    self.makers[name] = op
                    self._same(seen or "", name)

    def _same(self, source: str, result: str) -> None:
        if source in self.paths:
            self.paths[result] = self.paths[source]
        elif source in self.makers:
            self.makers.setdefault(result, self.makers[source])

    def _back(self, block: Block) -> None:
        readers = self.readers
        for step in reversed(block.instructions):
            if isinstance(step, Move):
                self._read(step.source, step.result)
            elif isinstance(step, Fence):
                for source, result in zip(step.sources, step.results, strict=True):
                    self._read(source, result)
            elif isinstance(step, Loop):
                op = self.op(step)
                for inner, name in _leaving(step):
                    self._read(inner, name)
                for b, body in enumerate(step.bodies):
                    self._back(body)
                    for name, (outer, _) in zip(body.inputs, _entering(op, step, b), strict=True):
                        if outer is not None:
                            readers[outer] = readers.get(name, step)
            else:
                # What an op only shows otherwise is read by who reads the result.
                seen = _seen(step, self.op(step))
                users = (readers[r] for r in step.results if seen and r in readers)
                reader = next(users, step)
                readers.update((o, reader) for o in step.operands if o is not None)

    def _read(self, source: str, result: str) -> None:
        if result in self.readers:
            self.readers[source] = self.readers[result]


def flows_of(listings: Sequence[Listed]) -> list[Flow]:
    """Follow the listings in the order in which they first run."""
    flows: list[Flow] = []
    paths, makers = dict[str, str](), dict[str, Op]()
    for listed in listings:
        flow = Flow.of(listed, paths, makers)
        paths |= flow.paths
        makers |= flow.makers
        flows.append(flow)
    return flows


def _seen(run: LocalOp, op: Op) -> str | None:
    """The one value that an op shows otherwise."""
    names = {o for o in run.operands if o is not None}
    return names.pop() if op.kind in _VIEWS and len(names) == 1 else None


def _steps(block: Block, runs: int) -> Iterator[tuple[ListingStep, int]]:
    for step in block.instructions:
        yield step, runs
        if isinstance(step, Loop):
            for body in step.bodies:
                yield from _steps(body, runs * step.runs)


def _leaving(loop: Loop) -> Iterator[tuple[str, str]]:
    """Pairs of what the last body of a loop gives back, and its name outside."""
    outputs = loop.bodies[-1].outputs if loop.bodies else ()
    yield from ((o, r) for o, r in zip(outputs, loop.results, strict=True) if o is not None)


def _entering(op: Op, loop: Loop, b: int) -> Sequence[tuple[str | None, bool]]:
    """For each input of a body, what enters it and whether the loop changes that by and by."""
    flow = op.control_flow
    assert flow is not None
    return [
        (loop.operands[port.operand], port.is_carry)
        for port in flow.inputs[b]
        if port.operand is not None
    ]
