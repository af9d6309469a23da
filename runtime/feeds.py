"""Puts the arguments of a step into the registers that read them, and takes the results out again.

A batch is cut into microbatches where it enters: it is laid out as one array a submesh, and one
program there takes that apart. Results with rows are put together again by one program.

    batch [8, 4]  --stack_rows-->  [2, 4, 4]  --split-->  r0 [4, 4], r1 [4, 4]
    r5, r6 [4, 4] --join, unstack_rows-->  [8, 4]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.ir.batching import Rows
from autopar.ir.program import Feed, Fetch
from autopar.runtime.bind import ArrayType
from autopar.runtime.place import Aliases, Placer, repeats
from autopar.runtime.transport import AbstractTransport, Endpoint, Route

Registers = list[list[Any]]
Held = tuple[int, int, Any]  # submesh, register, array


@dataclass(frozen=True)
class Home:
    """The place of a piece of state from the second step on: as the step gave it back."""

    submesh: int
    kind: ArrayType


@dataclass(frozen=True)
class FeedType:
    """A feed and what each of its registers holds; `home` if its state comes back elsewhere."""

    feed: Feed
    kind: ArrayType
    home: Home | None = None


class Feeder:
    """Fills registers from the step's inputs; what lies right already is handed on.

    Rows of a batch are laid out as one array a submesh, microbatches along a first dim of their
    own, and one program there takes all of them apart. `constants` are inputs that no call gives;
    they and the microbatches' numbers are placed once. Of the `state` a step consumes the inputs
    that are `consumed`. The attribute `constants` has (input, array) as they were placed.
    """

    def __init__(
        self,
        feeds: Sequence[FeedType],
        meshes: Sequence[Mesh],
        state: Collection[int],
        constants: Mapping[int, Any],
        transport: AbstractTransport,
        consumed: Collection[int] = (),
    ) -> None:
        given = [f for f in feeds if f.feed.input not in constants and not f.feed.is_index]
        closed = [f for f in feeds if f.feed.input in constants]
        placed = list(_placed(closed, meshes, constants))
        self._held = [*_numbers(feeds, meshes), *placed]
        self._consumed = frozenset(consumed)
        self._groups = _by_submesh(given, meshes, state, consumed, placed)
        self._bridges = [_Bridge(f, meshes, transport) for f in given if f.home is not None]
        writers = {(f.feed.submesh, r): f.feed.input for f in closed for r in f.feed.registers}
        self.constants = [(writers[s, r], array) for s, r, array in placed]

    def trust(self, results: Sequence[Any]) -> None:
        """Take arrays that lie as these results of the step do for such, too."""
        for _, group in self._groups:
            group.aliases.trust(r.sharding for r in results if isinstance(r, jax.Array))

    def fill(self, inputs: Sequence[Any], registers: Registers) -> None:
        """Write every register that a feed has."""
        for submesh, register, array in self._held:
            registers[submesh][register] = array
        again = repeats(inputs, self._consumed)
        carried: dict[int, dict[int, Any]] = defaultdict(dict)
        for bridge in self._bridges:
            carried[bridge.submesh][bridge.input] = bridge.carried(inputs)
        for submesh, group in self._groups:
            seen = inputs
            if submesh in carried:
                seen = [carried[submesh].get(n, leaf) for n, leaf in enumerate(inputs)]
            group.fill(seen, registers[submesh], again)


def _by_submesh(
    feeds: Sequence[FeedType],
    meshes: Sequence[Mesh],
    state: Collection[int] = (),
    consumed: Collection[int] = (),
    held: Sequence[Held] = (),
) -> list[tuple[int, _SubmeshFeeds]]:
    found: list[tuple[int, _SubmeshFeeds]] = []
    for submesh, mesh in enumerate(meshes):
        own = [f for f in feeds if f.feed.submesh == submesh]
        there = [array for s, _, array in held if s == submesh]
        if own:
            found.append((submesh, _SubmeshFeeds(own, mesh, state, consumed, there)))
    return found


def _numbers(feeds: Sequence[FeedType], meshes: Sequence[Mesh]) -> Iterator[Held]:
    """The microbatches' numbers, for feeds of the index."""
    for f in feeds:
        sharding = f.kind.sharding(meshes[f.feed.submesh])
        for i, register in enumerate(f.feed.registers if f.feed.is_index else ()):
            yield f.feed.submesh, register, jax.device_put(np.asarray(i, f.kind.dtype), sharding)


def _placed(
    feeds: Sequence[FeedType], meshes: Sequence[Mesh], constants: Mapping[int, Any]
) -> Iterator[Held]:
    """The registers that feeds of constants write, at every step alike."""
    for submesh, group in _by_submesh(feeds, meshes):
        written: dict[int, Any] = {}
        group.fill(constants, written)
        yield from ((submesh, register, array) for register, array in written.items())


class _Bridge:
    """Takes state that the last step left on one submesh to another that reads it too."""

    def __init__(
        self, feed: FeedType, meshes: Sequence[Mesh], transport: AbstractTransport
    ) -> None:
        assert feed.home is not None
        home, self.submesh, self.input = feed.home, feed.feed.submesh, feed.feed.input
        self._lies = home.kind.sharding(meshes[home.submesh])
        self._carry = transport.copier(
            [Route(home.kind, feed.kind)],
            Endpoint(meshes[home.submesh]),
            Endpoint(meshes[feed.feed.submesh]),
        )

    def carried(self, inputs: Sequence[Any]) -> Any:
        """The leaf, on the submesh if it came from the last step."""
        leaf = inputs[self.input]
        lies = isinstance(leaf, jax.Array) and leaf.sharding == self._lies
        return self._carry([leaf])[0] if lies else leaf


class _SubmeshFeeds:
    """The feeds of one submesh."""

    def __init__(
        self,
        feeds: Sequence[FeedType],
        mesh: Mesh,
        state: Collection[int],
        consumed: Collection[int],
        held: Sequence[Any],
    ) -> None:
        self._whole = [f for f in feeds if f.feed.rows is None]
        self._cut = [f for f in feeds if f.feed.rows is not None]
        self._mesh = mesh
        kinds = [*(f.kind for f in self._whole), *map(_stack_of, self._cut)]
        consumes = [i for i, f in enumerate(self._whole) if f.feed.input in consumed]
        self.aliases = Aliases(kinds, consumes, held)
        self._place = Placer(
            [kind.sharding(mesh) for kind in kinds],
            [i for i, f in enumerate(self._whole) if f.feed.input in state],
            self.aliases,
        )
        self._split = _splitter([_stack_of(f) for f in self._cut], mesh)
        self._inputs = [f.feed.input for f in self._whole]
        self._registers = [(i, r) for i, f in enumerate(self._whole) for r in f.feed.registers]

    def fill(
        self,
        inputs: Any,
        registers: list[Any] | dict[int, Any],
        repeats: Mapping[int, bool] = MappingProxyType({}),
    ) -> None:
        """Place all leaves at once, then take those with rows apart."""
        leaves = [inputs[n] for n in self._inputs]
        leaves += [self._stacked(inputs[f.feed.input], f) for f in self._cut]
        placed = self._place(leaves, repeats)
        for i, register in self._registers:
            registers[register] = placed[i]
        slices = self._split(*placed[len(self._whole) :])
        for feed, parts in zip(self._cut, slices, strict=True):
            for register, part in zip(feed.feed.registers, parts, strict=True):
                registers[register] = part

    def _stacked(self, leaf: Any, feed: FeedType) -> Any:
        """A leaf with the microbatches along a first dim: on the host, or where it lies.

        An array on this very submesh changes its layout in one program there. From elsewhere it
        comes by way of the host, which cuts without computing.
        """
        rows, count = feed.feed.rows, len(feed.feed.registers)
        assert rows is not None
        if not isinstance(leaf, jax.Array):
            return stack_rows(np.asarray(leaf), rows, count)
        if leaf.sharding.device_set == set(self._mesh.devices.flat):
            sharding = _stack_of(feed).sharding(self._mesh)
            return _stacker(rows, count, sharding)(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            return stack_rows(leaf, rows, count)
        return stack_rows(np.asarray(leaf), rows, count)


def _stack_of(feed: FeedType) -> ArrayType:
    return feed.kind.stacked(len(feed.feed.registers))


def stack_rows(leaf: Any, rows: Rows, count: int) -> Any:
    """[..., outer x batch x inner, ...] -> [count, ..., outer x batch/count x inner, ...].

    Microbatch i has rows i*b .. (i+1)*b of the batch. Of a host array it is a view where no dim
    stands before the rows.
    """
    front, back = leaf.shape[: rows.dim], leaf.shape[rows.dim + 1 :]
    size = leaf.shape[rows.dim] // (rows.outer * count * rows.inner)
    apart = leaf.reshape(*front, rows.outer, count, size, rows.inner, *back)
    place = rows.dim + 1
    first = apart.transpose(place, *(d for d in range(apart.ndim) if d != place))
    return first.reshape(count, *front, rows.outer * size * rows.inner, *back)


def unstack_rows(stack: Any, rows: Rows) -> Any:
    """The inverse of `stack_rows`."""
    count, front, back = stack.shape[0], stack.shape[1 : rows.dim + 1], stack.shape[rows.dim + 2 :]
    size = stack.shape[rows.dim + 1] // (rows.outer * rows.inner)
    apart = stack.reshape(count, *front, rows.outer, size, rows.inner, *back)
    order = [*range(1, rows.dim + 2), 0, *range(rows.dim + 2, apart.ndim)]
    return apart.transpose(order).reshape(*front, rows.outer * count * size * rows.inner, *back)


@lru_cache(maxsize=256)
def _stacker(rows: Rows, count: int, sharding: NamedSharding) -> Callable[[Any], Any]:
    def stack(leaf: Any) -> Any:
        return stack_rows(leaf, rows, count)

    return jax.jit(stack, out_shardings=sharding)


def _splitter(stacks: Sequence[ArrayType], mesh: Mesh) -> Callable[..., Sequence[Sequence[Any]]]:
    """A program that takes stacks apart: a list of microbatches for each."""
    if not stacks:
        return lambda: ()

    def split(*given: Any) -> list[list[Any]]:
        return [[stack[i] for i in range(stack.shape[0])] for stack in given]

    out = [[NamedSharding(mesh, type(t.spec)(*t.spec[1:]))] * t.shape[0] for t in stacks]
    types = [t.on(mesh) for t in stacks]
    return jax.jit(split, out_shardings=out).lower(*types).compile()


# -- results -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FetchType:
    """A fetch, what each of its registers holds, and the array that the user is given."""

    fetch: Fetch
    kind: ArrayType
    whole: ArrayType


class Fetcher:
    """The step's outputs in order; those with rows are put together by one program a submesh."""

    def __init__(self, fetches: Sequence[FetchType], meshes: Sequence[Mesh]) -> None:
        once = (f.fetch for f in fetches if f.fetch.rows is None)
        self._once = [(f.output, f.submesh, f.registers[0]) for f in once]
        self._joins = [
            (s, joined, _joiner(joined, mesh))
            for s, mesh in enumerate(meshes)
            if (joined := [f for f in fetches if f.fetch.submesh == s and f.fetch.rows is not None])
        ]
        self._count = 1 + max((f.fetch.output for f in fetches), default=-1)

    def outputs(self, registers: Registers) -> list[Any]:
        """The outputs, by their numbers."""
        found: list[Any] = [None] * self._count
        for output, submesh, register in self._once:
            found[output] = registers[submesh][register]
        for submesh, fetches, join in self._joins:
            given = [[registers[submesh][r] for r in f.fetch.registers] for f in fetches]
            for joined, whole in zip(fetches, join(given), strict=True):
                found[joined.fetch.output] = whole
        return found


def _joiner(fetches: Sequence[FetchType], mesh: Mesh) -> Callable[[Any], Sequence[Any]]:
    """A program of microbatches' outputs that gives the whole batch's."""
    rows = [f.fetch.rows for f in fetches]

    def join(given: Sequence[Sequence[Any]]) -> list[Any]:
        pairs = zip(given, rows, strict=True)
        return [unstack_rows(jnp.stack(parts), r) for parts, r in pairs if r is not None]

    types = [[f.kind.on(mesh)] * len(f.fetch.registers) for f in fetches]
    out = [f.whole.sharding(mesh) for f in fetches]
    return jax.jit(join, out_shardings=out).lower(types).compile()
