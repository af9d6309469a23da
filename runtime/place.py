"""Puts the arrays of a call where the compiled step wants them, each in memory of its own.

JAX cannot run a program that is given a buffer twice if it may consume it: at best it raises, and
on several devices the process dies. Two leaves are often one array, as when an average of the
weights starts as the weights themselves. So of leaves that share memory all but one are copied.
Arrays whose memory is gone are refused: a program that is given one may kill the process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError, bulleted
from autopar.frontend.compat import buffers_of
from autopar.frontend.plain_data import type_of
from autopar.frontend.trace.arguments import Argument, StepSpec, leaf_paths
from autopar.frontend.traced import TracedStep
from autopar.runtime.bind import is_key, words_of
from autopar.runtime.cells import InCell, as_array
from autopar.runtime.own_rows import OwnRows
from autopar.runtime.pieces import StackedPieces
from autopar.runtime.spanning import spread

_SHOWN = 4  # arrays that a message names


def deleted(leaves: Sequence[Any]) -> list[int]:
    """The numbers of leaves that were consumed or deleted; what is on the host never is."""
    return [i for i, leaf in enumerate(leaves) if getattr(leaf, "is_deleted", bool)()]


def deleted_arguments(
    spec: StepSpec, arguments: Sequence[Argument], traced: TracedStep | None, donate: bool
) -> ArgumentError:
    """The error of a call with deleted arrays among its arguments.

    `traced` is the step if it was traced for such arguments before, which tells what is state.
    """
    paths, leaves = leaf_paths(arguments), jax.tree_util.tree_leaves([a.tree for a in arguments])
    gone = deleted(leaves)
    is_state = traced is None or not set(gone).isdisjoint(traced.consumed_inputs)
    remedy = (
        f"A step consumes the state that it is given: go on with the state that {spec.name} "
        "returned, or keep the old one alive, at the price of its memory, with "
        "parallelize(..., donate=False)."
        if donate and is_state
        else f"{spec.name} does not consume them: a jax.jit that donates them has, or .delete(). "
        "Pass arrays that are alive."
    )
    faults = [f"{paths[i]} {_type_text(leaves[i])}" for i in gone]
    return _error(f"{spec.name} was given arrays that are deleted:", faults, remedy)


def check_closed_over(held: Sequence[tuple[str, Any]], traced: TracedStep) -> None:
    """Raise ArgumentError where an array that a step closes over, with its path, is deleted."""
    gone = deleted([array for _, array in held])
    if not gone:
        return
    faults = [_closed_over(*held[i], traced) for i in gone]
    remedy = (
        "Another function consumed them, such as a step that was given them as its state. Close "
        "over copies (jnp.copy), or pass them as arguments."
    )
    raise _error(f"{traced.name} closes over arrays that are deleted:", faults, remedy)


def _closed_over(path: str, array: Any, traced: TracedStep) -> str:
    names = {i.path: i.value.name for i in traced.graph.inputs}
    readers = (op for op in traced.graph.walk() if names.get(path) in op.operands)
    line = next((op.origin.line for op in readers if op.origin.line), "")
    return f"{path} {_type_text(array)}" + (f", read at {line}" if line else "")


def _type_text(array: Any) -> str:
    shape, dtype = type_of(array)
    return f"{dtype}[{','.join(map(str, shape))}]"


def _error(headline: str, faults: list[str], remedy: str) -> ArgumentError:
    more = len(faults) - _SHOWN
    shown = [*faults[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return ArgumentError(bulleted(headline, shown, remedy))


Shardings = Sequence[jax.sharding.NamedSharding]


class Placer:
    """Puts leaves as shardings want them; those that are so already, or in a cell, are handed on.

    Host arrays are cut up. Arrays on the mesh change their sharding in one program. `state` is
    copied from elsewhere. State on one device goes by way of the host: cutting it up there would
    compile a program for each leaf. The `aliases` say which leaves a step consumes: of those that
    share memory each gets its own.
    """

    def __init__(
        self, shardings: Shardings, state: Collection[int], aliases: Aliases | None = None
    ) -> None:
        self._shardings: list[Any] = list(shardings)
        self._state = frozenset(state)
        self._aliases = aliases or Aliases((), ())
        self._aliases.trust(self._shardings)

    def __call__(
        self, leaves: Sequence[Any], repeats: Mapping[int, bool] = MappingProxyType({})
    ) -> list[Any]:
        """The leaves in place; `repeats` are those of them that the call has several times."""
        placed, foreign, off = list(leaves), list[int](), list[int]()
        for i, (leaf, wanted) in enumerate(zip(leaves, self._shardings, strict=True)):
            if type(leaf) is InCell or (sharding := getattr(leaf, "sharding", None)) is wanted:
                continue
            is_own = isinstance(leaf, jax.Array) and self._aliases.trusts(sharding)
            if not _lies(leaf, wanted):
                off.append(i)
            elif is_own:
                self._shardings[i] = leaf.sharding  # equal: from now on it is seen at a glance
            if isinstance(leaf, jax.Array) and not is_own:
                foreign.append(i)
        if off:
            self._move(placed, off)
        for i in self._aliases.shared(placed, foreign, repeats):
            placed[i] = copied(as_array(placed[i]))
        return placed

    def _move(self, leaves: list[Any], off: Sequence[int]) -> None:
        """Put some of the leaves in place."""
        shardings = self._shardings
        on_mesh = [i for i in off if _on_mesh(leaves[i], shardings[i])]
        moved = _mover(tuple(shardings[i] for i in on_mesh))(*(leaves[i] for i in on_mesh))
        elsewhere = sorted({*off} - {*on_mesh})
        sent = [_sent(leaves[i], shardings[i], i in self._state) for i in elsewhere]
        for i, leaf in [*zip(on_mesh, moved, strict=True), *zip(elsewhere, sent, strict=True)]:
            leaves[i] = leaf


def _sent(leaf: Any, sharding: jax.sharding.NamedSharding, is_state: bool) -> Any:
    """A leaf from the host or one device; of state a copy, for the step consumes what it gets."""
    if isinstance(leaf, StackedPieces):
        return leaf.gather(sharding)
    if isinstance(leaf, OwnRows):
        return leaf.spread(sharding)
    return spread(_on_host(leaf) if is_state else leaf, sharding, is_copy=is_state)


def _lies(leaf: Any, wanted: jax.sharding.NamedSharding) -> bool:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding == wanted:
        return sharding is not None
    return isinstance(leaf, jax.Array) and bool(sharding.is_equivalent_to(wanted, leaf.ndim))


def _on_mesh(leaf: Any, wanted: jax.sharding.NamedSharding) -> bool:
    """True if a leaf lies on the mesh's devices, in the mesh's order, as one program wants it."""
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, jax.sharding.NamedSharding):
        return False
    here: Any = leaf.sharding.mesh
    there: Any = wanted.mesh
    return tuple(here.devices.flat) == tuple(there.devices.flat)


def _on_host(leaf: Any) -> Any:
    """A leaf as a host array; typed random keys have no such form and are copied where they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key(leaf.dtype):
        return leaf.copy()  # device_put of keys does not heed may_alias
    return np.asarray(leaf)


@lru_cache(maxsize=64)
def _mover(shardings: tuple[jax.sharding.NamedSharding, ...]) -> Callable[..., tuple[Any, ...]]:
    """A program that changes the shardings of many arrays."""
    if not shardings:
        return lambda *given: given

    def move(*given: Any) -> tuple[Any, ...]:
        return given

    return jax.jit(move, out_shardings=shardings)


# -- arrays that share memory ------------------------------------------------------------------


def repeats(leaves: Sequence[Any], consumed: Collection[int]) -> dict[int, bool]:
    """Arrays that are several leaves of a call, by `id`: is one of these not to be consumed?

    Such an array outlives the call, wherever its other leaves are taken to.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return {}
    counts = Counter(map(id, leaves))
    others = {id(leaf) for number, leaf in enumerate(leaves) if number not in consumed}
    return {known: known in others for known, count in counts.items() if count > 1}


class Aliases:
    """The leaves of a step that could share memory: those of one shape and dtype.

    `kinds` are the leaves' types, `consumed` the numbers of those that a step consumes, `held`
    arrays that it is given at every call.
    """

    def __init__(
        self, kinds: Sequence[Any], consumed: Collection[int], held: Sequence[Any] = ()
    ) -> None:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, kind in enumerate((*kinds, *held)):
            groups[_buffer_type(kind)].append(number)
        self._consumed, self._held = frozenset(consumed), tuple(held)
        # Where nothing is consumed, or an array is alone, nothing can go wrong.
        self._groups = [
            own for own in groups.values() if len(own) > 1 and not self._consumed.isdisjoint(own)
        ]
        self._group_of = {number: i for i, own in enumerate(self._groups) for number in own}
        self._own: dict[int, Any] = {}

    def trust(self, shardings: Iterable[Any]) -> None:
        """Take arrays with one of these very objects as sharding for results of the step.

        Those share no memory unless they are the same array: JAX gives an array of another
        sharding, if only by name, to who asks for the same memory under a second array.
        """
        self._own.update((id(s), s) for s in shardings)

    def trusts(self, sharding: Any) -> bool:
        """True if an array of this sharding is the step's own result."""
        return id(sharding) in self._own

    def shared(
        self, arrays: Sequence[Any], foreign: Sequence[int], repeats: Mapping[int, bool]
    ) -> list[int]:
        """The numbers of arrays that a step cannot consume, as another leaf has their memory.

        Of leaves that are all consumed the first keeps the memory. Only of the `foreign`, those
        that are not trusted, and of `repeats` is it looked up where their memory is.
        """
        again = [n for n in sorted(self._consumed) if id(arrays[n]) in repeats] if repeats else []
        outlive = {n for n in again if repeats[id(arrays[n])]}
        suspects = {self._group_of[n] for n in (*foreign, *again) if n in self._group_of}
        every = (*map(as_array, arrays), *self._held) if suspects else ()
        late = {n for i in suspects for n in self._claims(every, self._groups[i])}
        return sorted(outlive | late)

    def _claims(self, every: Sequence[Any], own: Sequence[int]) -> Iterator[int]:
        """The leaves whose memory another has; first those that must live on have theirs."""
        taken: set[int] = set()
        for number in sorted(own, key=lambda n: n in self._consumed):
            buffers = buffers_of(every[number])
            if number in self._consumed and not taken.isdisjoint(buffers):
                yield number
            taken |= buffers


def copied(array: Any) -> Any:
    """The same array in memory of its own, lying as it does."""
    if is_key(array.dtype):
        return array.copy()  # device_put of keys does not heed may_alias
    return jax.device_put(array, array.sharding, may_alias=False)


def _buffer_type(kind: Any) -> Hashable:
    """Shape and dtype of what lies in memory: typed random keys are arrays of words there."""
    if is_key(kind.dtype):
        kind = words_of(kind)
    return tuple(kind.shape), str(kind.dtype)
