"""Finds arrays of one call that share memory, of which a step may consume only one.

JAX cannot run a program that is given a buffer twice if it may consume it: at best it raises, and
on several devices the process dies. Two leaves are often one array, as when an average of the
weights starts as the weights themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar.frontend.compat import buffers_of


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
        """Whether an array of this sharding is the step's own result."""
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
        every = (*arrays, *self._held) if suspects else ()
        late = {n for i in suspects for n in self._claims(every, self._groups[i])}
        return sorted(outlive | late)

    def _claims(self, every: Sequence[Any], own: Sequence[int]) -> Iterator[int]:
        """Who comes too late: first those that must live on have their memory, then in order."""
        taken: set[int] = set()
        for number in sorted(own, key=lambda n: n in self._consumed):
            buffers = buffers_of(every[number])
            if number in self._consumed and not taken.isdisjoint(buffers):
                yield number
            taken |= buffers


def copied(array: Any) -> Any:
    """The same array in memory of its own, lying as it does."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return array.copy()  # device_put of keys does not heed may_alias
    return jax.device_put(array, array.sharding, may_alias=False)


def _buffer_type(kind: Any) -> Hashable:
    """Shape and dtype of what lies in memory: typed random keys are arrays of words there."""
    if jax.dtypes.issubdtype(kind.dtype, jax.dtypes.extended):
        kind = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(kind.shape, kind.dtype))
    return tuple(kind.shape), str(kind.dtype)
