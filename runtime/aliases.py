"""Finds arrays of one call that share memory, of which a step may consume only one.

JAX cannot run a program that is given a buffer twice if it may consume it: at best it raises, and
on several devices the process dies. Two leaves are often one array, as when an average of the
weights starts as the weights themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax

from autopar.frontend.compat import buffers_of


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

    def shared(self, arrays: Sequence[Any], foreign: Sequence[int]) -> Iterator[int]:
        """The numbers of arrays that a step cannot consume, as another leaf has their memory.

        Of leaves that are all consumed the first keeps the memory. Only of the `foreign`, those
        that are not trusted, is it looked up where their memory is.
        """
        if not self._groups:
            return
        every = (*arrays, *self._held)
        suspects = {self._group_of[i] for i in foreign if i in self._group_of}
        if len(set(map(id, every))) < len(every):
            suspects.update(self._repeated(every))
        for group in sorted(suspects):
            yield from self._claims(every, self._groups[group])

    def _repeated(self, every: Sequence[Any]) -> Iterator[int]:
        """The groups in which an object stands twice."""
        for i, own in enumerate(self._groups):
            if len({id(every[number]) for number in own}) < len(own):
                yield i

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
