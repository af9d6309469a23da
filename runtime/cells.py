"""The cells of stages that are one program: an array of each submesh, all in one array.

    arrays of mesh0, mesh1 --Gather--> cell --one jit--> cell --Spread--> arrays of mesh0, mesh1
                                        ^                 |
                                        +-----------------+  state that nobody changed in between

On each device a cell is the very piece that the submesh's own array has there, so that nothing is
copied on the way in or out. But to make arrays takes the host longer than to run the program. So
what a step leaves stays in its cell: an array of it is made when someone asks for one, and a cell
whose arrays all come back to where they were is taken as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend.compat import assembler, key_impl, local_pieces
from autopar.runtime.bind import ArrayType, is_key, words_of

Make = Callable[[Sequence[Any]], Any]


# -- a cell, and an array in it --------------------------------------------------------------------


@dataclass(frozen=True)
class CellType:
    """A cell's array over all `meshes`, and what it is on each: of some submeshes nothing."""

    whole: jax.ShapeDtypeStruct
    meshes: tuple[Mesh, ...]
    kinds: tuple[ArrayType | None, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of this process's devices of each submesh."""
        index = jax.process_index()
        return tuple(sum(d.process_index == index for d in m.devices.flat) for m in self.meshes)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The submeshes on which there is something that this process has a part of."""
        return tuple(s for s, kind in enumerate(self.kinds) if kind is not None and self.counts[s])

    @cached_property
    def shardings(self) -> tuple[NamedSharding | None, ...]:
        """The sharding of what there is on each submesh."""
        pairs = zip(self.kinds, self.meshes, strict=True)
        return tuple(kind.sharding(mesh) if kind is not None else None for kind, mesh in pairs)

    @cached_property
    def lying(self) -> dict[int, tuple[NamedSharding, tuple[int, ...], Any]]:
        """The sharding, shape and dtype of each submesh's array."""
        found: dict[int, tuple[NamedSharding, tuple[int, ...], Any]] = {}
        for s, (kind, sharding) in enumerate(zip(self.kinds, self.shardings, strict=True)):
            if kind is not None and sharding is not None:
                found[s] = sharding, kind.shape, kind.dtype
        return found

    @cached_property
    def make(self) -> Make:
        """A function that makes the whole of its pieces."""
        return assembler(self.whole.shape, self.whole.dtype, self.whole.sharding)

    @cached_property
    def makes(self) -> dict[int, Make]:
        """Functions that make a submesh's array of its pieces."""
        return {s: _maker(self.kinds[s], self.shardings[s]) for s in self.own}

    @cached_property
    def zeros(self) -> tuple[Callable[[], Any], ...]:
        """Programs that fill a submesh's pieces with zeros."""
        return tuple(map(self._zeros, self.meshes))

    def _zeros(self, mesh: Mesh) -> Callable[[], Any]:
        shape, spec = tuple(self.whole.shape), PartitionSpec()
        if shape:
            rows = shape[0] // sum(m.size for m in self.meshes)
            shape = (rows * mesh.size, *shape[1:])
            spec = PartitionSpec(tuple(map(str, mesh.axis_names)))
        dtype = self.whole.dtype
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(mesh, spec))


def _maker(kind: ArrayType | None, sharding: NamedSharding | None) -> Make:
    assert kind is not None
    if not kind.is_key:
        return assembler(kind.shape, kind.dtype, sharding)
    words = words_of(kind)
    make = assembler(words.shape, words.dtype, sharding)
    impl = key_impl(kind.dtype)
    return lambda pieces: jax.random.wrap_key_data(make(pieces), impl=impl)


class Cell:
    """A cell that a step has left."""

    def __init__(self, array: jax.Array, kind: CellType) -> None:
        self.array, self.kind = array, kind
        self._arrays: dict[int, Any] = {}

    @cached_property
    def pieces(self) -> list[list[Any]]:
        """The pieces on this process's devices, by submesh."""
        found: list[list[Any]] = []
        pieces, start = local_pieces(self.array), 0
        for count in self.kind.counts:
            found.append(list(pieces[start : start + count]))
            start += count
        return found

    def made(self, submesh: int) -> Any:
        """A new array of the submesh."""
        return self.kind.makes[submesh](self.pieces[submesh])

    def on(self, submesh: int) -> Any:
        """The submesh's array, always the same one."""
        if submesh not in self._arrays:
            self._arrays[submesh] = self.made(submesh)
        return self._arrays[submesh]

    def is_deleted(self, submesh: int) -> bool:
        """True if the submesh's part of it has been consumed."""
        if "pieces" not in self.__dict__:
            return bool(self.array.is_deleted())
        return any(piece.is_deleted() for piece in self.pieces[submesh])


class InCell:
    """The array of a submesh, in its cell: to trees and to steps what the array is."""

    # Read several times a step, of each piece of the state: to ask the cell takes the host longer.
    __slots__ = ("cell", "dtype", "shape", "sharding", "submesh")

    def __init__(self, cell: Cell, submesh: int) -> None:
        self.cell, self.submesh = cell, submesh
        self.sharding, self.shape, self.dtype = cell.kind.lying[submesh]

    @property
    def array(self) -> Any:
        """The array itself, always the same one."""
        return self.cell.on(self.submesh)

    def is_deleted(self) -> bool:
        """True if a step, or anything else, has consumed it."""
        return self.cell.is_deleted(self.submesh)

    def block_until_ready(self) -> InCell:
        """Itself, once it has been computed."""
        self.cell.array.block_until_ready()
        return self

    def __reduce__(self) -> Any:
        return as_array, (self.array,)


def as_array(leaf: Any) -> Any:
    """An array of its own for what lies in a cell; anything else stays as it is."""
    return leaf.array if type(leaf) is InCell else leaf


# -- into cells and out of them --------------------------------------------------------------------

_Known = dict[int, tuple["weakref.ref[Any]", InCell]]  # by the id of an array


@dataclass(frozen=True)
class Place:
    """The only place that an input of the step is read in: a register of a submesh."""

    number: int  # of the input
    submesh: int
    sharding: NamedSharding


class Cells:
    """The cells that a step takes and leaves, each with its registers.

    It sees which inputs at `places` are in a cell still. Outputs in the `lazy` registers stay in
    theirs: those that are pieces of leaves. Others the user has as arrays, and a cell is known by
    them for as long as all of them are alive.
    """

    def __init__(
        self,
        taken: Sequence[tuple[CellType, Sequence[int]]],
        left: Sequence[tuple[CellType, Sequence[int]]],
        donated: Collection[int],
        places: Sequence[Place],
        lazy: Collection[tuple[int, int]],
    ) -> None:
        self._places = places
        self._known: _Known = {}
        idle = {kind: list[Cell]() for kind, _ in taken}
        self.gathers = [
            _Gather(kind, registers, n in donated, idle[kind])
            for n, (kind, registers) in enumerate(taken)
        ]
        self.spreads = [
            _Spread(kind, registers, lazy, self._known if kind in idle else None, idle.get(kind))
            for kind, registers in left
        ]

    def seen(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, those still in a cell as they are there."""
        kept: dict[int, InCell] = {}
        for place in self._places:
            leaf = inputs[place.number]
            if type(leaf) is not InCell:
                entry = self._known.get(id(leaf))
                if entry is None or entry[0]() is not leaf:
                    continue
                leaf = entry[1]
            lies = leaf.sharding is place.sharding or leaf.sharding == place.sharding
            if leaf.submesh == place.submesh and lies:
                kept[place.number] = leaf
        return [kept[n] if n in kept else as_array(leaf) for n, leaf in enumerate(inputs)]


class _Gather:
    """Makes one array of what the submeshes have in a register; where one has none, of anything."""

    def __init__(
        self,
        kind: CellType,
        registers: Sequence[int],
        is_donated: bool,
        idle: list[Cell],
    ) -> None:
        self._kind, self._is_donated, self._idle = kind, is_donated, idle
        self._places = [(s, registers[s]) for s in kind.own]
        self._empty: dict[int, list[Any]] = {}

    def __call__(self, registers: list[list[Any]]) -> Any:
        held = [registers[s][r] for s, r in self._places]
        cell = self._cell_of(held[0]) if held else self._idle.pop() if self._idle else None
        if cell is not None and all(type(p) is InCell and p.cell is cell for p in held):
            return cell.array
        pieces: list[Any] = []
        arrays = dict(zip(self._kind.own, held, strict=True))
        for s in range(len(self._kind.meshes)):
            pieces += self._pieces(as_array(arrays[s]), s) if s in arrays else self._any(s, cell)
        return self._kind.make(pieces)

    def _cell_of(self, leaf: Any) -> Cell | None:
        """The cell that something is in, if it is of this type."""
        if type(leaf) is not InCell:
            return None
        kind = leaf.cell.kind
        return leaf.cell if kind is self._kind or kind == self._kind else None

    def _pieces(self, array: Any, submesh: int) -> Sequence[Any]:
        """An array's pieces in the order of the submesh's devices."""
        wanted, mesh = self._kind.meshes[submesh], getattr(array.sharding, "mesh", None)
        if mesh is wanted or mesh == wanted:
            return _pieces_of(array)
        own = {piece.device: piece for piece in _pieces_of(array)}
        return [own[d] for d in wanted.devices.flat if d in own]

    def _any(self, submesh: int, cell: Cell | None) -> Sequence[Any]:
        """Pieces for a submesh that has no use for them: what is consumed is not used again."""
        if not self._kind.counts[submesh]:
            return ()
        if cell is not None:
            return cell.pieces[submesh]
        if self._is_donated:
            return local_pieces(self._kind.zeros[submesh]())
        if submesh not in self._empty:
            self._empty[submesh] = list(local_pieces(self._kind.zeros[submesh]()))
        return self._empty[submesh]


class _Spread:
    """Gives each submesh what it has in an array that a step has left."""

    def __init__(
        self,
        kind: CellType,
        registers: Sequence[int],
        lazy: Collection[tuple[int, int]],
        known: _Known | None,
        idle: list[Cell] | None,
    ) -> None:
        self._kind, self._known, self._idle = kind, known, idle
        places = [(s, registers[s]) for s in kind.own]
        self._lazy = [p for p in places if p in lazy]
        self._plain = [p for p in places if p not in lazy]

    def __call__(self, whole: jax.Array, registers: list[list[Any]]) -> None:
        cell, arrays = Cell(whole, self._kind), list[tuple[Any, int]]()
        for s, r in self._lazy:
            registers[s][r] = InCell(cell, s)
        for s, r in self._plain:
            registers[s][r] = array = cell.made(s)  # the cell must not keep it alive
            arrays.append((array, s))
        if self._known is not None and arrays:
            _remember(self._known, cell, arrays)
        if self._idle is not None and not self._kind.own:
            self._idle.append(cell)


def _remember(known: _Known, cell: Cell, arrays: Sequence[tuple[Any, int]]) -> None:
    """Know a cell by its arrays until the first of them dies: it would keep the memory of all."""
    group: list[int] = []
    forget = partial(_forget, known, group)
    for array, submesh in arrays:
        group.append(id(array))
        known[id(array)] = weakref.ref(array, forget), InCell(cell, submesh)


def _forget(known: _Known, group: list[int], dead: weakref.ref[Any]) -> None:
    del dead
    while group:
        known.pop(group.pop(), None)


def _pieces_of(array: Any) -> Sequence[Any]:
    """An array's pieces on this process's devices; typed random keys as words."""
    return local_pieces(jax.random.key_data(array) if is_key(array.dtype) else array)
