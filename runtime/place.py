"""Puts the arrays of a call where the compiled step wants them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from autopar.runtime.aliases import Aliases, copied
from autopar.runtime.pieces import StackedPieces

Shardings = Sequence[jax.sharding.NamedSharding]


class Placer:
    """Puts leaves as shardings want them; those that are so already are handed on.

    Host arrays are cut up. Arrays on the mesh change their sharding in one program. `state` is
    copied from elsewhere. State on one device goes by way of the host: cutting it up there would
    compile a program for each leaf. The `aliases` say which leaves a step consumes: of those that
    share memory each gets its own.
    """

    def __init__(
        self, shardings: Shardings, state: Collection[int], aliases: Aliases | None = None
    ) -> None:
        self._shardings, self._state = list(shardings), frozenset(state)
        self._aliases = aliases or Aliases((), ())
        self._aliases.trust(self._shardings)

    def __call__(
        self, leaves: Sequence[Any], repeats: Mapping[int, bool] = MappingProxyType({})
    ) -> list[Any]:
        """The leaves in place; `repeats` are those of them that the call has several times."""
        placed, foreign, off = list(leaves), list[int](), list[int]()
        for i, (leaf, wanted) in enumerate(zip(leaves, self._shardings, strict=True)):
            sharding = getattr(leaf, "sharding", None)
            if sharding is wanted:
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
            placed[i] = copied(placed[i])
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
    if is_state:
        return jax.device_put(_on_host(leaf), sharding, may_alias=False)
    return jax.device_put(leaf, sharding)


def _lies(leaf: Any, wanted: jax.sharding.NamedSharding) -> bool:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding == wanted:
        return sharding is not None
    return isinstance(leaf, jax.Array) and bool(sharding.is_equivalent_to(wanted, leaf.ndim))


def _on_mesh(leaf: Any, wanted: jax.sharding.NamedSharding) -> bool:
    """Whether a leaf lies on the mesh's devices, in the mesh's order, as one program wants it."""
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, jax.sharding.NamedSharding):
        return False
    here: Any = leaf.sharding.mesh
    there: Any = wanted.mesh
    return tuple(here.devices.flat) == tuple(there.devices.flat)


def _on_host(leaf: Any) -> Any:
    """A leaf as a host array; typed random keys have no such form and are copied where they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf.copy()  # device_put of keys does not heed may_alias
    return np.asarray(leaf)


@lru_cache(maxsize=64)
def _mover(shardings: tuple[jax.sharding.NamedSharding, ...]) -> Callable[..., tuple[Any, ...]]:
    """One program that changes the shardings of many arrays."""
    if not shardings:
        return lambda *given: given

    def move(*given: Any) -> tuple[Any, ...]:
        return given

    return jax.jit(move, out_shardings=shardings)
