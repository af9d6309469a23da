"""Joins a program to the step that was traced: the equations, types and literals of its parts.

A `Program` numbers values and says how they lie; the trace has the equations and the dtypes that
JAX knows. Before anything is compiled the instructions are walked once with types in place of
arrays, so that no register is read that holds nothing, or not what its reader is compiled for.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from autopar.errors import GraphError
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.frontend.rewrite.subprogram import part_program
from autopar.frontend.traced import FlatProgram
from autopar.ir.compiler_options import CompilerOptions, options_on
from autopar.ir.program import Feed, Fetch, PartKind, PartProgram, Program, Run, Send, Start
from autopar.ir.projection import Host
from autopar.ir.sharding import MeshShape
from autopar.runtime.bind import ArrayType
from autopar.runtime.callbacks import HostCalls
from autopar.runtime.feeds import FeedType, FetchType, Home, rows_read
from autopar.runtime.own_rows import Ranges
from autopar.runtime.parts import PartSource, dtype_of, held_in, output_avals
from autopar.runtime.pieces import Sizes, cut_leaves, piece_sizes
from autopar.runtime.transport.abstract import Route


@dataclass(frozen=True)
class Interface:
    """A step as it was traced, and the program of stages that was made of it.

    Inputs are counted as the microbatch's program counts them: arguments, closed-over arrays, and
    among them the number of the microbatch where there is one.
    """

    trace: MicrobatchTrace
    program: Program
    meshes: tuple[MeshShape, ...]

    @cached_property
    def index(self) -> int | None:
        """The input that holds the microbatch's number."""
        name = self.trace.index
        refs = self.trace.part.program.inputs
        return refs.index(int(name.removeprefix("%"))) if name else None

    @cached_property
    def input_sizes(self) -> tuple[Sizes, ...]:
        """The rows of the pieces of each of the user's leaves, then of the closed-over arrays."""
        return piece_sizes(self.trace.whole.input_pieces)

    @cached_property
    def output_sizes(self) -> tuple[Sizes, ...]:
        """The rows of the pieces of each of the user's results."""
        return piece_sizes(self.trace.whole.output_pieces)

    @cached_property
    def stacked_outputs(self) -> frozenset[int]:
        """The outputs that are pieces of a result."""
        numbers = itertools.count()
        of_leaves = [(own, [next(numbers) for _ in own or (0,)]) for own in self.output_sizes]
        return frozenset(n for own, outputs in of_leaves if own for n in outputs)

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """The step's inputs from its flat arguments; the closed-over arrays, the last, left out."""
        return self.with_index(cut_leaves(leaves, self.input_sizes[: len(leaves)]))

    @cached_property
    def constants(self) -> dict[int, Any]:
        """The closed-over arrays by input."""
        values = self.trace.whole.constants
        held = cut_leaves(values, self.input_sizes[len(self.input_sizes) - len(values) :])
        first = len(self.trace.whole.program.inputs) - len(held)
        numbers = self.with_index(range(first + len(held)), -1)
        return {numbers.index(first + i): value for i, value in enumerate(held)}

    def with_index(self, given: Sequence[Any], index: Any = None) -> list[Any]:
        """Entries for the inputs of the step, with one for the microbatch's number."""
        listed = list(given)
        if self.index is not None:
            listed.insert(self.index, index)
        return listed

    # -- parts -----------------------------------------------------------------------------

    def sources(
        self,
        platform: str,
        donate_state: bool,
        calls: HostCalls | None = None,
        is_watched: bool = False,
        host: Host | None = None,
        options: CompilerOptions = (),
    ) -> tuple[PartSource, ...]:
        """Each part with the equations that it runs; a hoist's are of the whole batch.

        `calls` hear what the Python that parts call raises. Where a step `is_watched` its only
        program gives a token, too. What leaves a process of the `host`'s job is not donated: it
        may not have been fetched yet. Of the plan's `options` each part has the platform's.
        """
        kept, sums, calls = self._kept(donate_state, host), self._sums, calls or HostCalls()
        used = options_on(platform, options).used
        return tuple(
            PartSource(
                self._flat(number, part),
                part,
                self.meshes[part.part.submesh],
                platform,
                frozenset(kept[number]),
                sums[number],
                calls,
                is_watched or part.part.kind is not PartKind.WHOLE,
                used,
            )
            for number, part in enumerate(self.program.parts)
        )

    def _kept(self, donate_state: bool, host: Host | None) -> dict[int, set[int]]:
        """Of each part the inputs that the user, the next step or a process still has a use for."""
        held = self.lasting(donate_state)
        if host is not None:
            sends = (s for s in self.program.instructions if isinstance(s, Send))
            crossing = (s for s in sends if host.is_crossing(s.source, s.target))
            held |= {(s.source, t.source) for s in crossing for t in s.transfers}
        kept: dict[int, set[int]] = defaultdict(set)
        for step in self.program.instructions:
            if isinstance(step, Run):
                submesh = self.program.submesh_of(step)
                kept[step.part] |= {i for i, r in enumerate(step.inputs) if (submesh, r) in held}
        return kept

    def lasting(self, donate_state: bool) -> set[Place]:
        """The registers with what outlives a step: arguments that it may not consume."""
        state = self.trace.part.consumed_inputs if donate_state else ()
        return {
            (f.submesh, r)
            for f in self.program.feeds
            if f.input in self.constants or (f.rows is None and f.input not in state)
            for r in f.registers
        }

    @cached_property
    def _sums(self) -> dict[int, dict[int, str]]:
        """Of each part the inputs that are sums in a dtype of their own."""
        held = {
            (s.submesh, r): a.dtype
            for s in self.program.instructions
            if isinstance(s, Start)
            for r, a in zip(s.registers, s.accumulators, strict=True)
            if a.dtype
        }
        found: dict[int, dict[int, str]] = defaultdict(dict)
        for step in self.program.instructions:
            if isinstance(step, Run):
                places = [(self.program.submesh_of(step), r) for r in step.inputs]
                found[step.part] |= {i: held[p] for i, p in enumerate(places) if p in held}
        return found

    def _flat(self, number: int, program: PartProgram) -> FlatProgram:
        part, traced = program.part, self.trace.part
        inputs = [i.value.name for i in part.graph.inputs]
        if part.kind is PartKind.HOIST:  # of the whole batch, whose inputs it knows by their paths
            traced = self.trace.whole
            refs = dict(zip(traced.input_paths, traced.program.inputs, strict=True))
            inputs = [f"%{refs[i.path]}" for i in part.graph.inputs]
        literals = self._literals.get(number, {})
        outputs = [
            o if isinstance(o, str) else literals[i] for i, o in enumerate(part.graph.outputs)
        ]
        return part_program(traced.program, part.equations, inputs, outputs)

    @cached_property
    def _literals(self) -> dict[int, dict[int, int]]:
        """Of parts that return literals: which output of the step each of their outputs is."""
        fetched = {(f.submesh, r): f.output for f in self.program.fetches for r in f.registers}
        found: dict[int, dict[int, int]] = {}
        for step in self.program.instructions:
            if isinstance(step, Run):
                submesh = self.program.submesh_of(step)
                registers = zip(self._plain_outputs(step.part), step.outputs, strict=True)
                found[step.part] = {
                    i: fetched[submesh, r] for i, r in registers if (submesh, r) in fetched
                }
        return found

    def _plain_outputs(self, number: int) -> list[int]:
        part = self.program.parts[number].part
        summed = {a.value for a in part.accumulators}
        return [i for i, o in enumerate(part.graph.outputs) if o not in summed]

    # -- feeds and fetches -----------------------------------------------------------------

    @cached_property
    def feeds(self) -> tuple[FeedType, ...]:
        """Each feed with what its registers hold."""
        homes = dict(self._homes())
        return tuple(self._feed(f, homes.get(f.input)) for f in self.program.feeds)

    def _feed(self, feed: Feed, home: Home | None) -> FeedType:
        one = self.trace.part.program.input_avals
        all_rows = self.with_index(self.trace.whole.program.input_avals, one[self.index or 0])
        aval = one[feed.input] if feed.rows is not None else all_rows[feed.input]
        elsewhere = home if home is not None and home.submesh != feed.submesh else None
        return FeedType(feed, self._lying(aval, feed), elsewhere)

    def _homes(self) -> Iterator[tuple[int, Home]]:
        """Input -> where the state that it holds is left by a step."""
        avals = list(output_avals(self.trace.whole.program))
        fetches = {f.output: f for f in self.program.fetches if f.rows is None}
        for output, given in self.trace.part.donated:
            if output in fetches:
                fetch = fetches[output]
                yield given, Home(fetch.submesh, self._lying(avals[output], fetch))
        # State that is read and not returned stays where it is: at its first feed.
        inputs = self.with_index(self.trace.whole.program.input_avals)
        lasting = {*self.trace.part.state_inputs} - self.trace.part.consumed_inputs
        for feed in reversed(self.program.feeds):
            if feed.input in lasting:
                yield feed.input, Home(feed.submesh, self._lying(inputs[feed.input], feed))

    def fetches(self, types: RegisterTypes) -> tuple[FetchType, ...]:
        """Each fetch with what its registers hold at the end, and what the user is given.

        Raises GraphError where the user would be given partial sums.
        """
        avals = list(output_avals(self.trace.whole.program))
        for fetch in self.program.fetches:
            if fetch.sharding.partial:
                raise GraphError(
                    f"output {fetch.output} is left as a partial sum: {fetch.sharding}"
                )
        return tuple(
            FetchType(f, types.of_fetch(f), self._lying(avals[f.output], f))
            for f in self.program.fetches
        )

    def rows_of(self, process: int, meshes: Sequence[Mesh]) -> dict[str, Ranges]:
        """The rows that a process's devices read of each argument with rows, by its path."""
        read: dict[int, list[FeedType]] = defaultdict(list)
        for f in self.feeds:
            read[f.feed.input].append(f)
        paths, state = self.trace.part.input_paths, self.trace.part.state_inputs
        return {
            paths[number]: rows_read(own, meshes, process)
            for number, own in sorted(read.items())
            if not (number in state or number in self.constants or number == self.index)
            and own[0].kind.shape
        }

    def places(self, meshes: Sequence[Mesh]) -> list[list[frozenset[Any]]]:
        """For each of the user's leaves the device sets on which the program takes it as it is."""
        devices = [frozenset(m.devices.flat) for m in meshes]
        read: dict[int, list[frozenset[Any]]] = defaultdict(list)
        for f in self.feeds:
            read[f.feed.input].append(devices[f.feed.submesh])
        count = len(self.trace.whole.program.inputs)
        numbered = enumerate(self.with_index(range(count), -1))
        places = iter([read[number] for number, leaf in numbered if leaf >= 0])
        found: list[list[frozenset[Any]]] = []
        for sizes in self.input_sizes or ((),) * count:
            own = [next(places) for _ in range(max(1, len(sizes)))]
            found.append([] if sizes else own[0])  # pieces are cut on the host
        return found

    def _lying(self, aval: Any, place: Feed | Fetch) -> ArrayType:
        mesh = self.meshes[place.submesh]
        return ArrayType.lying(tuple(aval.shape), aval.dtype, place.sharding, mesh)


# -- the types of registers --------------------------------------------------------------------


Place = tuple[int, int]  # submesh, register


@dataclass
class RegisterTypes:
    """The types that a walk found: of sends by instruction, of starts, and at the end of all."""

    held: dict[Place, ArrayType] = field(default_factory=dict[Place, ArrayType])
    routes: dict[int, tuple[Route, ...]] = field(default_factory=dict[int, tuple[Route, ...]])
    starts: dict[int, tuple[ArrayType, ...]] = field(
        default_factory=dict[int, tuple[ArrayType, ...]]
    )

    def of_fetch(self, fetch: Fetch) -> ArrayType:
        """The type in an output's registers; raises GraphError where nothing is there."""
        return self.read(fetch.submesh, fetch.registers[0], f"output {fetch.output}")

    def read(self, submesh: int, register: int, reader: str) -> ArrayType:
        """The type in a register when `reader` comes to it."""
        if (submesh, register) not in self.held:
            raise GraphError(f"{reader} reads r{register} of mesh{submesh}, which holds nothing")
        return self.held[submesh, register]


def register_types(
    program: Program,
    sources: Sequence[PartSource],
    feeds: Iterable[FeedType],
    meshes: Sequence[MeshShape],
) -> RegisterTypes:
    """Walks the list with types in place of arrays.

    Raises GraphError where an instruction reads a register that holds nothing, or not what it is
    compiled for, and where a send would have to combine partial sums.
    """
    types = RegisterTypes()
    for f in feeds:
        types.held.update(((f.feed.submesh, r), f.kind) for r in f.feed.registers)
    for number, step in enumerate(program.instructions):
        if isinstance(step, Run):
            _run_types(step, program, sources[step.part], types)
        elif isinstance(step, Send):
            types.routes[number] = _send_routes(step, meshes, types)
        elif isinstance(step, Start):
            kinds = types.starts[number] = _start_types(step, meshes[step.submesh])
            places = ((step.submesh, r) for r in step.registers)
            types.held.update(zip(places, kinds, strict=True))
        else:
            for register in step.registers:
                types.held.pop((step.submesh, register), None)
    return types


def _run_types(run: Run, program: Program, source: PartSource, types: RegisterTypes) -> None:
    submesh, name = program.parts[run.part].part.submesh, source.name
    expected = zip(
        (*run.inputs, *run.accumulators), (*source.inputs, *source.accumulators), strict=True
    )
    for register, wanted in expected:
        held = types.read(submesh, register, name)
        if held != wanted:
            raise GraphError(
                f"{name} is compiled for {wanted} in r{register} of mesh{submesh}, "
                f"which holds {held}"
            )
    places = ((submesh, register) for register in run.outputs)
    types.held.update(zip(places, source.outputs, strict=True))


def _send_routes(
    send: Send, meshes: Sequence[MeshShape], types: RegisterTypes
) -> tuple[Route, ...]:
    routes: list[Route] = []
    for transfer in send.transfers:
        name = f"the send of {transfer.value.type_text} {transfer.value.name}"
        held = types.read(send.source, transfer.source, name)
        before, after = (
            ArrayType.lying(transfer.value.shape, held.dtype, s, meshes[m])
            for s, m in ((transfer.before, send.source), (transfer.after, send.target))
        )
        if before.shape != after.shape or len(transfer.before.partial) != len(
            transfer.after.partial
        ):
            raise GraphError(
                f"{name} from {transfer.before} to {transfer.after} would have to combine"
            )
        if held != before:
            raise GraphError(f"{name} is of {before}, but r{transfer.source} holds {held}")
        routes.append(Route(before, after))
        types.held[send.target, transfer.target] = after
    return tuple(routes)


def _start_types(start: Start, mesh: MeshShape) -> tuple[ArrayType, ...]:
    return tuple(
        held_in(a.dtype, ArrayType.lying(v.shape, dtype_of(v.dtype), s, mesh))
        for a, v, s in zip(start.accumulators, start.values, start.shardings, strict=True)
    )
