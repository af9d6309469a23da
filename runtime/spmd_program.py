"""Runs an SPMD program: all submeshes run one jitted function, which takes its ticks by itself.

    cells, sharded over "stage" --one jit--> cells

A cell is one array over the devices of all submeshes (`Cells`). In the function each device asks
which submesh it is of, and runs that one's parts; devices of a submesh take the same branch, so
that collectives between them meet.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.frontend import compat
from autopar.ir.listing import Move
from autopar.ir.program import ONCE, Feed, Fetch, PartKind, Program, Run
from autopar.ir.sharding import MeshShape
from autopar.ir.spmd_program import NONE, Held, Lane, Loop, Source, SpmdProgram, Turn, Wave
from autopar.runtime.actions import Action
from autopar.runtime.bind import ArrayType, is_key, processes_of, words_of
from autopar.runtime.cells import Cells, CellType, Place
from autopar.runtime.compile import CompileReport, program_cache_key, telling_options
from autopar.runtime.feeds import FeedType, FetchType, Registers
from autopar.runtime.moves import run_move
from autopar.runtime.parts import PartSource, neutral
from autopar.runtime.transport.abstract import limit_in_flight

Env = dict[int, Any]  # cell -> a device's piece; a ring has its microbatches along a first dim


# -- the function of one device --------------------------------------------------------------------


@dataclass(frozen=True)
class SpmdSource:
    """The source of an SPMD program: its parts' equations, and the dtypes that JAX knows."""

    spmd: SpmdProgram
    sources: tuple[PartSource, ...]

    @property
    def axis(self) -> str:
        """The name of the axis along which submeshes lie: one that their mesh has not."""
        names = self.sources[0].mesh.names
        return next(n for n in ("stage", "stages", "stage_") if n not in names)

    @cached_property
    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shape of each cell on a device, and its dtype; of a ring that of one microbatch."""
        found: dict[int, Any] = {}
        for part, source in zip(self.spmd.parts, self.sources, strict=True):
            typed = zip(
                (*(s.cell for s in part.inputs), *part.sums, *part.outputs),
                (*source.inputs, *source.accumulators, *source.outputs),
                strict=True,
            )
            found.update({c: kind.dtype for c, kind in typed if c != NONE})
        for segment in self.spmd.segments:
            for shift in segment.shifts if isinstance(segment, Wave) else ():
                # What is sent home, or read by nobody where it is sent from.
                known = found.get(shift.source, found.get(shift.target))
                found.setdefault(shift.source, known)
                found.setdefault(shift.target, known)
        return tuple(
            jax.ShapeDtypeStruct(cell.shape, found[n]) for n, cell in enumerate(self.spmd.cells)
        )

    @cached_property
    def _locals(self) -> tuple[Callable[..., tuple[Any, ...]], ...]:
        return tuple(replace(s, has_token=False).local() for s in self.sources)

    def local(self, *given: Any) -> tuple[Any, ...]:
        """The whole step on a device's pieces: of the feeds' cells, to those of the fetches."""
        env: Env = {
            h.cell: _with_words(piece, self.types[h.cell])
            for h, piece in zip(self.spmd.feeds, given, strict=True)
        }
        for segment in self.spmd.segments:
            if isinstance(segment, Wave):
                self._run_wave(segment, env)
            else:
                self._run_loop(segment, env)
        made = [
            self._ring(env, h.cell)[: self.spmd.program.microbatches]
            if self.spmd.cells[h.cell].depth
            else self._read(env, h.cell)
            for h in self.spmd.fetches
        ]
        return (*(_raw(piece)[0] for piece in made), jnp.zeros((), bool))

    # -- the program of all devices ----------------------------------------------------------

    @property
    def mesh(self) -> MeshShape:
        """The mesh of all submeshes, along an axis of their own in front."""
        own = self.sources[0].mesh
        count = len(self.spmd.program.submeshes)
        return MeshShape((self.axis, *own.names), (count, *own.sizes))

    def given(self, mesh: Any) -> list[jax.ShapeDtypeStruct]:
        """The arguments on a mesh of all submeshes, which may be an abstract one."""
        return [self._layout(held, mesh) for held in self.spmd.feeds]

    def made(self, mesh: Any) -> list[jax.ShapeDtypeStruct]:
        """The results on such a mesh."""
        return [self._layout(held, mesh) for held in self.spmd.fetches]

    def _layout(self, held: Held, mesh: Any) -> jax.ShapeDtypeStruct:
        """A cell as one array: on each device its piece of its submesh's array."""
        kind, cell = _words(self.types[held.cell]), self.spmd.cells[held.cell]
        shape = (self.spmd.program.microbatches, *kind.shape) if cell.depth else kind.shape
        spec = PartitionSpec(self.mesh.names)
        if not shape:  # each device has its own, whatever others have
            spec = PartitionSpec()
        else:
            shape = (shape[0] * self.mesh.device_count, *shape[1:])
        return jax.ShapeDtypeStruct(shape, kind.dtype, sharding=NamedSharding(mesh, spec))

    def donated(self, kept: Collection[tuple[int, int]]) -> tuple[int, ...]:
        """The arguments that the step consumes; `kept` are registers that outlive it."""
        return tuple(
            n
            for n, held in enumerate(self.spmd.feeds)
            if held.is_consumed and not any((s, r) in kept for s, r in enumerate(held.registers))
        )

    def jitted(self, mesh: Any, donated: Sequence[int]) -> Any:
        """A jitted function of cells on a mesh, which may be an abstract one."""
        given, made = self.given(mesh), self.made(mesh)
        token = NamedSharding(mesh, PartitionSpec())
        mapped: Any = jax.shard_map(
            self.local,
            mesh=mesh,
            in_specs=tuple(t.sharding.spec for t in given),
            out_specs=(*(t.sharding.spec for t in made), PartitionSpec()),
            check_vma=False,
        )
        mapped.__name__ = "spmd_step"
        return jax.jit(
            mapped,
            in_shardings=tuple(t.sharding for t in given),
            out_shardings=(*(t.sharding for t in made), token),
            donate_argnums=tuple(donated),
            compiler_options=compat.compiler_options(self.sources[0].options),
        )

    # -- cells -------------------------------------------------------------------------------

    def _read(self, env: Env, cell: int) -> Any:
        """The value of a cell; nothing but zeros before it is written."""
        if cell not in env:
            env[cell] = _zeros(self.types[cell])
        return env[cell]

    def _ring(self, env: Env, cell: int) -> Any:
        """A ring with one more place at its end, for what is of no microbatch."""
        if cell not in env:
            env[cell] = _zeros(self.types[cell], self.spmd.cells[cell].depth + 1)
        return env[cell]

    def _is_ring(self, cell: int) -> bool:
        return self.spmd.cells[cell].depth > 0

    def _input(self, source: Source, env: Mapping[int, Any], fresh: Any, i: Any, dtype: Any) -> Any:
        if source.part != NONE:
            return fresh[source.part][source.output]
        if source.cell == NONE:
            return jnp.asarray(i, dtype)
        held = env[source.cell]
        if not self._is_ring(source.cell):
            return held
        return _row(held, i % self.spmd.cells[source.cell].depth)

    def _parts(
        self, parts: Sequence[int], env: Mapping[int, Any], i: Any
    ) -> tuple[dict[int, Any], dict[int, Sequence[Any]]]:
        """Run parts in a row: their sums by cell, and of each all that it makes."""
        sums: dict[int, Any] = {}
        fresh: dict[int, Sequence[Any]] = {}
        for k in parts:
            part, source = self.spmd.parts[k], self.sources[k]
            given = [
                self._input(s, env, fresh, i, kind.dtype)
                for s, kind in zip(part.inputs, source.inputs, strict=True)
            ]
            held = [sums.get(c, env[c]) for c in part.sums]
            made = self._locals[k](*given, *held)
            fresh[k] = made[: len(part.outputs)]
            sums.update(zip(part.sums, made[len(part.outputs) :], strict=True))
        return sums, fresh

    def _cells_read(self, parts: Sequence[int]) -> set[int]:
        own = [self.spmd.parts[k] for k in parts]
        read = {s.cell for p in own for s in p.inputs} | {c for p in own for c in p.sums}
        return read - {NONE}

    def _branch(
        self, rows: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Submesh -> branch, and of each branch the parts of the first submesh that takes it."""
        known: dict[Hashable, int] = {}
        branches: list[tuple[int, ...]] = []
        of: list[int] = []
        for parts in rows:
            key = tuple(self._part_key(k, parts) for k in parts)
            if key not in known:
                known[key] = len(branches)
                branches.append(parts)
            of.append(known[key])
        members = [tuple(s for s, b in enumerate(of) if b == n) for n in range(len(branches))]
        return of, branches, members

    def _part_key(self, k: int, parts: Sequence[int]) -> Hashable:
        """The key of a part's program and its cells: equal parts are one branch."""
        part = self.spmd.parts[k]
        inputs = tuple(
            (s.cell, parts.index(s.part) if s.part != NONE else NONE, s.output) for s in part.inputs
        )
        return self.keys[k], inputs, part.sums, part.outputs

    @cached_property
    def keys(self) -> tuple[Hashable, ...]:
        """The key of each part's program: equal parts have equal keys."""
        return tuple(map(program_cache_key, self.sources))

    def _sent(self, value: Any, move: Move | None, pairs: Sequence[tuple[int, int]]) -> Any:
        """The value that arrives where some submeshes send one; all of them move it first."""
        if move is not None:
            value = run_move(value, move, self.sources[0].mesh)
        return _permuted(value, self.axis, pairs)

    # -- waves -------------------------------------------------------------------------------

    def _run_wave(self, wave: Wave, env: Env) -> None:
        for shift in wave.shifts:
            there = self._sent(self._read(env, shift.source), shift.move, shift.pairs)
            # Other submeshes may have something in the cell already.
            receives = np.isin(np.arange(len(self.spmd.program.submeshes)), _seconds(shift.pairs))
            mine = jnp.asarray(receives)[lax.axis_index(self.axis)]
            env[shift.target] = _select(mine, there, self._read(env, shift.target))
        rows = [() if k == NONE else (k,) for k in wave.parts]
        of, branches, _ = self._branch(rows)
        written = sorted({c for p in branches for k in p for c in self.spmd.parts[k].outputs})
        if not written:
            return
        read = sorted({c for p in branches for c in self._cells_read(p)})
        operands = [self._read(env, c) for c in read]

        def branch(parts: tuple[int, ...]) -> Callable[..., list[Any]]:
            def run(*given: Any) -> list[Any]:
                _, fresh = self._parts(parts, dict(zip(read, given, strict=True)), 0)
                made = {
                    c: value
                    for k in parts
                    for c, value in zip(self.spmd.parts[k].outputs, fresh[k], strict=True)
                }
                return [made[c] if c in made else _zeros(self.types[c]) for c in written]

            return run

        which = jnp.asarray(of, jnp.int32)[lax.axis_index(self.axis)]
        results = _switch(which, [branch(p) for p in branches], operands)
        # A cell may hold something of submeshes that do not write it now.
        for n, cell in enumerate(written):
            if cell in env:
                writes = [any(cell in self.spmd.parts[k].outputs for k in row) for row in rows]
                mine = jnp.asarray(writes)[lax.axis_index(self.axis)]
                env[cell] = _select(mine, results[n], env[cell])
            else:
                env[cell] = results[n]

    # -- loops -------------------------------------------------------------------------------

    def _run_loop(self, loop: Loop, env: Env) -> None:
        for cell in loop.sums:
            kind = ArrayType(self.types[cell].shape, self.types[cell].dtype, PartitionSpec())
            env[cell] = neutral(self.spmd.cells[cell].combiner, kind)
        carried = set(loop.sums)
        for turn in loop.turns:
            running = {k for parts in turn.parts for k in parts}
            for c in self._cells_read(sorted(running)):
                self._ring(env, c) if self._is_ring(c) else self._read(env, c)
            written = {c for k in running for c in self.spmd.parts[k].outputs if c != NONE}
            carried |= written | {lane.target for lane in turn.lanes}
        for c in carried:
            self._ring(env, c) if self._is_ring(c) else self._read(env, c)
        order = sorted(carried)
        lasting = {c: v for c, v in env.items() if c not in carried}
        tables = [jnp.asarray(turn.ticks, jnp.int32) for turn in loop.turns]

        def tick(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], None]:
            held = {**lasting, **dict(zip(order, carry, strict=True))}
            arrived = [
                self._run_turn(turn, row, held, loop.sums)
                for turn, row in zip(loop.turns, rows, strict=True)
            ]
            for turn, row, fresh in zip(loop.turns, rows, arrived, strict=True):
                self._pass_on(turn, row, held, fresh)
            return [held[c] for c in order], None

        final, _ = lax.scan(tick, [env[c] for c in order], tables)
        env.update(zip(order, final, strict=True))

    def _run_turn(self, turn: Turn, row: Any, held: Env, every_sum: Collection[int]) -> list[Any]:
        """Run a turn's parts: sums and rings are updated, and what lanes send is given back."""
        microbatch = row[lax.axis_index(self.axis)]
        of, branches, members = self._branch(turn.parts)
        running = sorted({k for parts in turn.parts for k in parts})
        if not running:
            return []
        sums = sorted({c for k in running for c in self.spmd.parts[k].sums} & set(every_sum))
        rings = sorted({c for k in running for c in self.spmd.parts[k].outputs} - {NONE})
        read = sorted({c for p in branches for c in self._cells_read(p)} - set(sums))
        operands = [microbatch, [held[c] for c in sums], [held[c] for c in read]]

        def branch(parts: tuple[int, ...], own: tuple[int, ...]) -> Callable[..., Any]:
            def run(i: Any, summed: Sequence[Any], given: Sequence[Any]) -> Any:
                env = dict(zip((*sums, *read), (*summed, *given), strict=True))
                added, fresh = self._parts(parts, env, i)
                made = {
                    c: value
                    for k in parts
                    for c, value in zip(self.spmd.parts[k].outputs, fresh[k], strict=True)
                }
                sent = [
                    next(
                        (
                            fresh[parts[turn.parts[a].index(k)]][o]
                            for a, _, k, o in lane.senders
                            if a in own
                        ),
                        None,
                    )
                    for lane in turn.lanes
                ]
                return (
                    [added.get(c, env[c]) for c in sums],
                    [made[c] if c in made else _zeros(self.types[c]) for c in rings],
                    [
                        _zeros(self._sent_type(lane)) if value is None else value
                        for lane, value in zip(turn.lanes, sent, strict=True)
                    ],
                )

            return run

        idle = branch((), ())
        runs = [idle, *(branch(p, m) for p, m in zip(branches, members, strict=True))]
        which = jnp.asarray([n + 1 for n in of], jnp.int32)[lax.axis_index(self.axis)]
        active = jnp.where(microbatch >= 0, which, 0)
        added, made, sent = lax.switch(active, runs, *operands)
        held.update(zip(sums, added, strict=True))
        for cell, value in zip(rings, made, strict=True):
            writes = [any(cell in self.spmd.parts[k].outputs for k in own) for own in turn.parts]
            mine = jnp.asarray(writes)[lax.axis_index(self.axis)]
            self._put(held, cell, value, jnp.where(mine, microbatch, NONE))
        return sent

    def _sent_type(self, lane: Lane) -> jax.ShapeDtypeStruct:
        """The type of what a lane's senders make, before it is moved."""
        kind = self.types[lane.target]
        if lane.move is None:
            return kind
        mesh = self.sources[0].mesh
        shape = lane.move.before.shard_shape(lane.move.value.shape, mesh)
        return jax.ShapeDtypeStruct(shape, kind.dtype)

    def _put(self, held: Env, cell: int, value: Any, microbatch: Any) -> None:
        """Put a value into its place in a ring; what is of no microbatch goes to the last place."""
        depth = self.spmd.cells[cell].depth
        place = jnp.where(microbatch >= 0, microbatch % depth, depth)
        held[cell] = _with_row(held[cell], value, place)

    def _pass_on(self, turn: Turn, row: Any, held: Env, sent: Sequence[Any]) -> None:
        count = len(self.spmd.program.submeshes)
        for lane, value in zip(turn.lanes, sent, strict=True):
            pairs = [(a, b) for a, b, _, _ in lane.senders]
            from_ = [NONE] * count
            for a, b in pairs:
                from_[b] = a
            sender = jnp.asarray(from_, jnp.int32)[lax.axis_index(self.axis)]
            microbatch = jnp.where(sender >= 0, row[sender], NONE)
            self._put(held, lane.target, self._sent(value, lane.move, pairs), microbatch)


def _seconds(pairs: Sequence[tuple[int, int]]) -> list[int]:
    return [b for _, b in pairs]


def _switch(which: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
    return branches[0](*operands) if len(branches) == 1 else lax.switch(which, branches, *operands)


def _raw(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A value as an array of numbers, and how to make such a value of one."""
    if not is_key(value.dtype):
        return value, lambda raw: raw
    impl = jax.random.key_impl(value)
    return jax.random.key_data(value), lambda raw: jax.random.wrap_key_data(raw, impl=impl)


def _with_words(raw: Any, kind: Any) -> Any:
    """A piece as the step knows it: typed random keys come and go as words."""
    if not is_key(kind.dtype):
        return raw
    return jax.random.wrap_key_data(raw, impl=compat.key_impl(kind.dtype))


def _zeros(kind: jax.ShapeDtypeStruct, rows: int = 0) -> Any:
    shape = (rows, *kind.shape) if rows else tuple(kind.shape)
    if not is_key(kind.dtype):
        return jnp.zeros(shape, kind.dtype)
    words = words_of(jax.ShapeDtypeStruct(shape, kind.dtype))
    zeros = jnp.zeros(words.shape, words.dtype)
    return jax.random.wrap_key_data(zeros, impl=compat.key_impl(kind.dtype))


def _row(ring: Any, place: Any) -> Any:
    raw, back = _raw(ring)
    return back(lax.dynamic_index_in_dim(raw, place, 0, keepdims=False))


def _with_row(ring: Any, value: Any, place: Any) -> Any:
    raw, back = _raw(ring)
    return back(lax.dynamic_update_index_in_dim(raw, _raw(value)[0], place, 0))


def _select(mine: Any, value: Any, other: Any) -> Any:
    raw, back = _raw(value)
    return back(jnp.where(mine, raw, _raw(other)[0]))


def _permuted(value: Any, axis: str, pairs: Sequence[tuple[int, int]]) -> Any:
    raw, back = _raw(value)
    return back(lax.ppermute(raw, axis, list(pairs)))


# -- the program on its devices --------------------------------------------------------------------


class SpmdStep:
    """An SPMD program, compiled for the devices of its submeshes, as one action of a step."""

    def __init__(
        self,
        source: SpmdSource,
        meshes: Sequence[Mesh],
        kept: Collection[tuple[int, int]],
        limit: int,
    ) -> None:
        self._source, self._meshes = source, meshes
        self._admit = limit_in_flight(limit)
        spmd, mesh = source.spmd, joint_mesh(meshes, source.axis)
        given, donated = source.given(mesh), source.donated(kept)
        start = time.perf_counter()
        with telling_options(source.sources[0].options):
            self.compiled = source.jitted(mesh, donated).lower(*given).compile()
        distinct = len(set(source.keys))
        self.report = CompileReport(len(spmd.parts), distinct, 1, 0, time.perf_counter() - start)
        self._donated, self._lying = frozenset(donated), (given, source.made(mesh))
        self._types: dict[CellType, CellType] = {}

    def bind(
        self, feeds: Sequence[FeedType], fetches: Sequence[FetchType], stacked: Collection[int]
    ) -> Cells:
        """The cells of arguments and results; the `stacked` outputs are pieces of leaves."""
        (given, made), spmd = self._lying, self._source.spmd
        fed = {(f.feed.submesh, f.feed.registers[0]): _stacked(f.feed, f.kind) for f in feeds}
        left = {(f.fetch.submesh, f.fetch.registers[0]): _stacked(f.fetch, f.kind) for f in fetches}
        lazy = {
            (f.fetch.submesh, f.fetch.registers[0]) for f in fetches if f.fetch.output in stacked
        }
        return Cells(
            [self._cell(h, k, fed) for h, k in zip(spmd.feeds, given, strict=True)],
            [self._cell(h, k, left) for h, k in zip(spmd.fetches, made, strict=True)],
            self._donated,
            list(self._places(feeds)),
            lazy,
        )

    def _cell(
        self, held: Held, whole: jax.ShapeDtypeStruct, kinds: Mapping[tuple[int, int], ArrayType]
    ) -> tuple[CellType, Sequence[int]]:
        """The type of a cell, the same object for equal ones, and its registers."""
        own = tuple(kinds[s, r] if r != NONE else None for s, r in enumerate(held.registers))
        kind = CellType(whole, tuple(self._meshes), own)
        return self._types.setdefault(kind, kind), held.registers

    def _places(self, feeds: Sequence[FeedType]) -> Iterator[Place]:
        """The places of inputs that one submesh reads, and has."""
        counts = Counter(f.feed.input for f in feeds)
        for f in feeds:
            alone = counts[f.feed.input] == 1 and f.feed.rows is None and not f.feed.is_index
            mesh = self._meshes[f.feed.submesh]
            if alone and f.home is None and jax.process_index() in processes_of(mesh):
                yield Place(f.feed.input, f.feed.submesh, f.kind.sharding(mesh))

    def action(self, cells: Cells) -> Action:
        """The step as an action on registers, which leaves in them what is fetched."""
        gathers, spreads, call = cells.gathers, cells.spreads, compat.direct(self.compiled)

        def act(registers: Registers) -> Any:
            *results, token = call(*[gather(registers) for gather in gathers])
            for spread, result in zip(spreads, results, strict=True):
                spread(result, registers)
            self._admit(token)
            return token

        return act


def _stacked(place: Feed | Fetch, kind: ArrayType) -> ArrayType:
    """The type of a register: rows are not cut into microbatches here."""
    return kind if place.rows is None else kind.stacked(len(place.registers))


def _words(kind: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of what lies in memory: keys are words there."""
    return words_of(kind) if is_key(kind.dtype) else kind


def joint_mesh(meshes: Sequence[Mesh], axis: str) -> Mesh:
    """The mesh of all submeshes, along an axis of their own in front."""
    devices = np.stack([m.devices for m in meshes])
    names = (axis, *map(str, meshes[0].axis_names))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def walked(program: Program) -> Program:
    """The program as it is walked: one run of everything, for whoever looks at it in time."""
    first = program.parts[0]
    whole = replace(first.part, kind=PartKind.WHOLE, stage=0, submesh=0)
    parts = (replace(first, part=whole),)
    return replace(program, parts=parts, instructions=(Run(0, ONCE, (), (), ()),))
