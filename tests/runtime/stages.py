"""Programs of stages written by hand for multilayer perceptrons, as small as they can be.

A value with rows is sharded over "data"; a sum over rows stays partial until an update reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontend import StepSpec, trace
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.batching import Accumulator, Rows
from autopar.ir.graph import Graph, Op
from autopar.ir.listing import Block, Listing, LocalOp, Move, MoveStep
from autopar.ir.program import (
    ONCE,
    Feed,
    Fetch,
    Free,
    Instruction,
    Part,
    PartKind,
    PartProgram,
    Program,
    Run,
    Send,
    Start,
    Transfer,
)
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.stages import Submesh
from autopar.ir.values import Input, Literal, Role, Value

Order = Callable[[int, int], Iterator[tuple[PartKind, int, int]]]
_FREE = frozenset({"transpose", "mul", "neg", "convert_element_type", "copy"})
_F, _B, _U = PartKind.FORWARD, PartKind.BACKWARD, PartKind.UPDATE


def serial(p: int, m: int) -> Iterator[tuple[PartKind, int, int]]:
    """One microbatch after the other, there and back."""
    for i in range(m):
        yield from ((_F, s, i) for s in range(p))
        yield from ((_B, s, i) for s in reversed(range(p)))


def one_forward_one_backward(p: int, m: int) -> Iterator[tuple[PartKind, int, int]]:
    """Each stage runs ahead by its distance to the last one, in a global order by clock."""
    for clock in range(m + 2 * p):
        yield from ((_F, s, clock - s) for s in range(p) if 0 <= clock - s < m)
        back = [(s, clock - (2 * p - 1 - s)) for s in reversed(range(p))]
        yield from ((_B, s, i) for s, i in back if 0 <= i < m)


@dataclass(frozen=True)
class Model:
    """A perceptron's step on a batch, with a skip from the first layer to the last if wanted."""

    layers: int = 4
    width: int = 8
    batch: int = 16
    skip: bool = False
    held_up: Callable[[Any], Any] | None = None  # runs on the host in the last forward

    def step(self, weights: list[Any], x: Any, y: Any) -> Any:
        """One step of descent: new weights, the loss and each example's prediction."""

        def loss(weights: list[Any]) -> Any:
            h = first = jnp.tanh(x @ weights[0])
            for w in weights[1:]:
                h = jnp.tanh(h @ w)
            h = h + first if self.skip else h
            if self.held_up is not None:
                kind = jax.ShapeDtypeStruct(h.shape, h.dtype)
                h = h + jax.pure_callback(self.held_up, kind, jax.lax.stop_gradient(h))
            return ((h - y) ** 2).sum() * (1 / self.batch), h

        (value, made), slopes = jax.value_and_grad(loss, has_aux=True)(weights)
        return [w - 0.1 * g for w, g in zip(weights, slopes, strict=True)], value, made

    def weights(self) -> list[np.ndarray[Any, Any]]:
        """The same weights each time, on the host."""
        rng = np.random.default_rng(0)
        shape = (self.layers, self.width, self.width)
        return list(rng.normal(size=shape).astype(np.float32) / 3)

    def rows(self, seed: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Examples and what is wanted of them."""
        x, y = np.random.default_rng(seed).normal(size=(2, self.batch, self.width))
        return x.astype(np.float32), y.astype(np.float32)

    def trace(self, microbatches: int) -> MicrobatchTrace:
        """The step on the batch and on a microbatch: the batch's size is in it as a number."""
        whole, part = (
            trace(StepSpec(self.step), (self.weights(), *(a[:n] for a in self.rows())), {})
            for n in (self.batch, self.batch // microbatches)
        )
        return MicrobatchTrace(whole, part, microbatches)

    def flat(self, state: Sequence[Any], seed: int = 1) -> list[Any]:
        """The step's flat arguments."""
        return [*state, *self.rows(seed)]


@dataclass
class Builder:
    """Cuts the graph of a microbatch into parts, and lists what runs them."""

    graph: Graph
    layers: int
    rows: int
    meshes: tuple[MeshShape, ...]
    microbatches: int
    order: Order = serial
    dtype: str = ""
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    registers: dict[tuple[int, str, int], int] = field(
        default_factory=dict[tuple[int, str, int], int]
    )

    @cached_property
    def stages(self) -> int:
        return len(self.meshes)

    @cached_property
    def place_of(self) -> tuple[tuple[PartKind, int], ...]:
        """The part of each op."""
        home = {
            i.value.name: n * self.stages // self.layers
            for n, i in enumerate(self.graph.inputs[: self.layers])
        }
        kinds = {"forward": _F, "backward": _B, "update": _U}
        places: list[tuple[PartKind, int]] = []
        backward: set[str] = set()
        for op in self.graph.ops:
            kind, given = kinds[op.origin.region], op.value_operands
            known = [home[n] for n in given if n in home]
            after = [home[n] for n in given if n in backward]
            if kind is _B:
                is_product = op.kind in ("dot_general", "transpose")
                stage = min(after) if is_product and after else min(known, default=self.stages - 1)
                backward |= {r.name for r in op.results}
            else:
                stage = max(known, default=0)
            home.update((r.name, stage) for r in op.results)
            places.append((kind, stage))
        return tuple(places)

    @cached_property
    def keys(self) -> tuple[tuple[PartKind, int], ...]:
        return tuple(sorted(set(self.place_of), key=lambda k: (list(PartKind).index(k[0]), k[1])))

    @cached_property
    def maker(self) -> dict[str, tuple[PartKind, int]]:
        return {
            r.name: place
            for op, place in zip(self.graph.ops, self.place_of, strict=True)
            for r in op.results
        }

    def ops_of(self, key: tuple[PartKind, int]) -> list[int]:
        return [i for i, place in enumerate(self.place_of) if place == key]

    def readers(self, name: str) -> list[tuple[PartKind, int]]:
        return [
            k
            for k in self.keys
            if any(name in self.graph.ops[i].value_operands for i in self.ops_of(k))
            and self.maker.get(name) != k
        ]

    def inputs_of(self, key: tuple[PartKind, int]) -> list[str]:
        read = [n for i in self.ops_of(key) for n in self.graph.ops[i].value_operands]
        return list(dict.fromkeys(n for n in read if self.maker.get(n) != key))

    def outputs_of(self, key: tuple[PartKind, int]) -> list[str]:
        made = [r.name for i in self.ops_of(key) for r in self.graph.ops[i].results]
        returned = set(self.graph.outputs)
        return [n for n in made if self.readers(n) or n in returned]

    @cached_property
    def summed(self) -> set[str]:
        """What the loop leaves for an update, or for the user as a sum."""
        loop = [n for n, k in self.maker.items() if k[0] is not _U]
        returned = set(self.graph.outputs)
        return {
            n
            for n in loop
            if any(k[0] is _U for k in self.readers(n))
            or (n in returned and not self.has_rows(self.graph.values[n]))
        }

    def has_rows(self, value: Value) -> bool:
        return bool(value.shape) and value.shape[0] == self.rows

    def plain(self, value: Value) -> Sharding:
        dims = [
            ("data",) if d == 0 and self.has_rows(value) else () for d in range(len(value.shape))
        ]
        return Sharding(tuple(dims))

    def leaves_partial(self, op: Op, partial: set[str]) -> bool:
        """Whether a result is a sum over rows that is not yet reduced."""
        given = [self.graph.values[n] for n in op.value_operands]
        if any(v.name in partial for v in given):
            return op.kind in _FREE
        with_rows = [v for v in given if self.has_rows(v)]
        return bool(with_rows) and not any(self.has_rows(r) for r in op.results)

    @cached_property
    def partial(self) -> set[str]:
        found: set[str] = set()
        for op, place in zip(self.graph.ops, self.place_of, strict=True):
            made = {r.name for r in op.results}
            returned = made & set(self.graph.outputs)
            if place[0] is not _U and not returned and self.leaves_partial(op, found):
                found |= made
        return found

    def lies(self, name: str) -> Sharding:
        value = self.graph.values[name]
        dims = self.plain(value).dims
        return Sharding(dims, ("data",) if name in self.partial else ())

    def part(self, key: tuple[PartKind, int]) -> PartProgram:
        inputs, outputs, ops = self.inputs_of(key), self.outputs_of(key), self.ops_of(key)
        values = self.graph.values
        graph = Graph(
            f"{key[0].value}{key[1]}",
            tuple(Input(values[n], Role.BATCH) for n in inputs),
            tuple(self.graph.ops[i] for i in ops),
            tuple(outputs),
        )
        names: dict[str, str] = {}
        steps: list[Any] = []
        for i, op in enumerate(graph.ops):
            for n in op.value_operands:
                if n in self.partial and not {r.name for r in op.results} <= self.partial:
                    names.setdefault(n, f"{n}.whole")
                    if names[n] not in {s.result for s in steps if isinstance(s, Move)}:
                        steps.append(self.reduce(n, names[n]))
            steps.append(self.run_op(i, op, names))
        block = Block(tuple(inputs), tuple(steps), tuple(outputs))
        listing = Listing(block, tuple(map(self.lies, inputs)), tuple(map(self.lies, outputs)))
        sums = tuple(
            Accumulator(n, 0, "sum", self.dtype if n in self.partial else "")
            for n in outputs
            if n in self.summed and key[0] is not _U
        )
        part = Part(key[0], key[1], key[1], graph, tuple(ops), accumulators=sums)
        return PartProgram(part, listing, self.donated(key, inputs))

    def donated(self, key: tuple[PartKind, int], inputs: Sequence[str]) -> tuple[int, ...]:
        """Inputs that nobody reads after this part on its submesh."""
        state = {i.value.name for i in self.graph.inputs[: self.layers]}
        own = [k for k in self.keys if k[1] == key[1]]
        return tuple(
            i
            for i, n in enumerate(inputs)
            if [k for k in self.readers(n) if k in own][-1] == key
            and (key[0] is _U if n in state else n in self.maker)
            and n not in self.graph.outputs
        )

    def reduce(self, name: str, result: str) -> Move:
        value, before = self.graph.values[name], self.lies(name)
        step = MoveStep("all-reduce", ("data",))
        return Move(value, name, result, before, Sharding(before.dims), (step,))

    def run_op(self, number: int, op: Op, names: dict[str, str]) -> LocalOp:
        keeps = {r.name for r in op.results} <= self.partial
        operands = [None if isinstance(o, Literal) else o for o in op.operands]
        return LocalOp(
            (number,),
            tuple(o if o is None or keeps else names.get(o, o) for o in operands),
            tuple(r.name for r in op.results),
            tuple(
                Sharding(((),) * len(self.graph.value(o).shape))
                if isinstance(o, Literal)
                else self.lies(o)
                if keeps
                else self.plain(self.graph.values[o])
                for o in op.operands
            ),
            tuple(self.lies(r.name) for r in op.results),
        )

    def register(self, mesh: int, name: str, microbatch: int) -> int:
        known = {i.value.name for i in self.graph.inputs[: self.layers]} | self.summed
        once = name in known or self.maker.get(name, (_F, 0))[0] is _U
        key = (mesh, name, ONCE if once else microbatch)
        count = sum(1 for m, _, _ in self.registers if m == mesh)
        return self.registers.setdefault(key, count)

    def program(self) -> Program:
        """The whole step in the wanted order."""
        parts = tuple(map(self.part, self.keys))
        feeds = tuple(self.feeds())
        self.instructions += self.starts(parts)
        for kind, stage, i in self.order(self.stages, self.microbatches):
            self.run(parts, (kind, stage), i)
        for stage in range(self.stages):
            self.run(parts, (_U, stage), ONCE)
        fetches = tuple(self.fetches())
        kept = {(f.submesh, r) for f in fetches for r in f.registers}
        listed = tuple(freed(self.instructions, parts, kept))
        counts = [0] * self.stages
        for mesh, _, _ in self.registers:
            counts[mesh] += 1
        return Program(
            tuple(Submesh(m) for m in self.meshes),
            parts, listed, feeds, fetches, tuple(counts), self.microbatches,
        )  # fmt: skip

    def starts(self, parts: Sequence[PartProgram]) -> Iterator[Start]:
        for p in parts:
            names = [a.value for a in p.part.accumulators]
            if names:
                yield Start(
                    p.part.submesh,
                    p.part.accumulators,
                    tuple(self.graph.values[n] for n in names),
                    tuple(map(self.lies, names)),
                    tuple(self.register(p.part.submesh, n, ONCE) for n in names),
                )

    def run(self, parts: Sequence[PartProgram], key: tuple[PartKind, int], i: int) -> None:
        number, mesh = self.keys.index(key), key[1]
        part = parts[number].part
        summed = [a.value for a in part.accumulators]
        plain = [o for o in part.graph.outputs if isinstance(o, str) and o not in summed]

        def at(names: Sequence[str]) -> tuple[int, ...]:
            return tuple(self.register(mesh, n, i) for n in names)

        given = at([v.value.name for v in part.graph.inputs])
        self.instructions.append(Run(number, i, given, at(summed), at(plain)))
        sent: dict[int, list[Transfer]] = defaultdict(list)
        for n in plain:
            for target in sorted({k[1] for k in self.readers(n)} - {mesh}):
                ends = self.register(mesh, n, i), self.register(target, n, i)
                sent[target].append(
                    Transfer(self.graph.values[n], *ends, self.lies(n), self.lies(n))
                )
        for target, transfers in sent.items():
            self.instructions.append(Send(mesh, target, tuple(transfers), i))

    def feeds(self) -> Iterator[Feed]:
        for number, given in enumerate(self.graph.inputs):
            name = given.value.name
            for mesh in sorted({k[1] for k in self.readers(name)}):
                if number < self.layers:
                    register = self.register(mesh, name, ONCE)
                    yield Feed(number, mesh, self.lies(name), (register,))
                else:
                    registers = [self.register(mesh, name, i) for i in range(self.microbatches)]
                    yield Feed(number, mesh, self.lies(name), tuple(registers), Rows(0))

    def fetches(self) -> Iterator[Fetch]:
        for number, name in enumerate(self.graph.outputs):
            assert isinstance(name, str)
            mesh = self.maker[name][1]
            if self.has_rows(self.graph.values[name]):
                found = [self.register(mesh, name, i) for i in range(self.microbatches)]
                yield Fetch(number, mesh, self.lies(name), tuple(found), Rows(0))
            else:
                yield Fetch(number, mesh, self.lies(name), (self.register(mesh, name, ONCE),))


def freed(
    listed: Sequence[Instruction], parts: Sequence[PartProgram], kept: set[tuple[int, int]]
) -> Iterator[Instruction]:
    """The list with registers dropped after their last use."""
    last: dict[tuple[int, int], int] = {}
    for n, step in enumerate(listed):
        if isinstance(step, Run):
            mesh = parts[step.part].part.submesh
            last.update(((mesh, r), n) for r in (*step.inputs, *step.accumulators, *step.outputs))
        elif isinstance(step, Send):
            last.update(((step.source, p.source), n) for p in step.transfers)
            last.update(((step.target, p.target), n) for p in step.transfers)
    dropped: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (mesh, register), n in last.items():
        if (mesh, register) not in kept:
            dropped[n][mesh].append(register)
    for n, step in enumerate(listed):
        yield step
        yield from (Free(mesh, tuple(r)) for mesh, r in dropped[n].items())
