"""The order of XLA's list scheduler: of what is ready, what frees the most memory."""

from __future__ import annotations

import heapq
from dataclasses import replace

from autopar.cost.kernels import Stored


def least_first(stored: Stored) -> Stored:
    """The same kernels in the order of XLA's list scheduler.

    Of the kernels that could run next it takes the one that frees the most bytes beside those it
    makes, then the one with the most readers, then the one that has been ready for the least time.
    """
    ready = _Ready(stored)
    return replace(stored, kernels=tuple(stored.kernels[k] for k in ready.order()))


class _Ready:
    """The kernels that could run next, by what they free."""

    def __init__(self, stored: Stored) -> None:
        kernels, nbytes = stored.kernels, stored.nbytes
        made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
        self._readers: dict[str, list[int]] = {name: [] for name in made}
        self._reads: list[tuple[str, ...]] = []
        self._waits: list[int] = []
        for k, kernel in enumerate(kernels):
            own = tuple(sorted(r for r in kernel.reads if r in made and made[r] != k))
            for name in own:
                self._readers[name].append(k)
            self._reads.append(own)
            self._waits.append(len({made[name] for name in own}))
        self._left = {
            name: len(readers) + (name in stored.kept) for name, readers in self._readers.items()
        }
        self._users = [
            sorted({j for name in kernel.makes for j in self._readers[name]}) for kernel in kernels
        ]
        self._nbytes = nbytes
        self._makes = [sum(nbytes[name] for name in kernel.makes) for kernel in kernels]
        self._heap: list[tuple[int, int, int, int]] = []
        self._keys: dict[int, tuple[int, int]] = {}
        self._pushed = 0

    def order(self) -> list[int]:
        """The kernels in order, each after those that it needs."""
        for k, waits in enumerate(self._waits):
            if not waits:
                self._push(k)
        order: list[int] = []
        while self._heap:
            frees, users, _, k = heapq.heappop(self._heap)
            if self._keys.get(k) == (frees, users):
                del self._keys[k]
                order.append(k)
                self._ran(k)
        return order

    def _push(self, k: int) -> None:
        left, nbytes = self._left, self._nbytes
        grows = self._makes[k] - sum(nbytes[r] for r in self._reads[k] if left[r] == 1)
        key = (grows, -len(self._users[k]))
        if self._keys.get(k) != key:
            self._pushed += 1
            self._keys[k] = key
            heapq.heappush(self._heap, (*key, -self._pushed, k))

    def _ran(self, k: int) -> None:
        """Marks what waited for a kernel as ready, and frees pieces after their last reader."""
        last: list[int] = []
        for name in self._reads[k]:
            self._left[name] -= 1
            if self._left[name] == 1:
                last += self._readers[name]
        for user in self._users[k]:
            self._waits[user] -= 1
            if not self._waits[user]:
                self._push(user)
        for reader in last:
            if reader in self._keys:
                self._push(reader)
