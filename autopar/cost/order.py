"""In which order a compiler runs kernels, and which collectives it combines into one."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.kernels import COMBINED, NUMBER_BYTES, Kernel, Stored

# Collectives of a kind, axes and dtype are combined up to so many bytes.
COMBINED_BYTES = 30 * 2**20

# How many collectives before its reader a gather starts; wide models on H100s, whose wires are busy
# throughout, show three.
_AHEAD = 3
_MUCH = 16  # times more that a light kernel reads than it makes
_SUMMED = 2  # numbers: more are a sum of many


def combined(stored: Stored) -> Stored:
    """The same kernels with collectives combined that do not wait for each other.

    A combined one stands in the place of its first; `depth_first` puts all in an order that can
    run. An all-reduce copies what it is given into one buffer.
    """
    kernels = list(stored.kernels)
    gone: set[int] = set()
    for group in _groups(stored):
        first, *others = group
        if not others:
            continue
        kernel, of_group = kernels[first], [stored.kernels[k] for k in group]
        gone.update(others)
        kernels[first] = replace(
            kernel,
            makes=tuple(m for k in of_group for m in k.makes),
            reads=frozenset[str]().union(*(k.reads for k in of_group)),
            scratch_bytes=sum(
                k.moved_bytes if _is_all_reduce(kernel) else k.scratch_bytes for k in of_group
            ),
        )
    if not gone:
        return stored
    left = tuple(kernel for k, kernel in enumerate(kernels) if k not in gone)
    return replace(stored, kernels=left)


def _groups(stored: Stored) -> list[list[int]]:
    """Collectives that run as one, by their indices: as many equal ones in turn as may.

    XLA combines gathers, then all-reduces, then what sums and scatters. Of those that are left it
    takes the first one that it visits, and those alike until one does not fit. That all which they
    read is then visited before them may change the order of the others. One that is too large for
    any other stays alone.
    """
    kernels = stored.kernels
    collectives = [k for k, kernel in enumerate(kernels) if kernel.group is not None]
    behind = _waited_for(kernels)  # of each collective, those that it waits for, as bits
    visits = _Visits(stored)
    groups: list[list[int]] = []
    for kind in COMBINED:
        left, alike = list[int](), Counter[object]()
        for c, k in enumerate(collectives):
            kernel = kernels[k]
            if kernel.group and kernel.group[0] == kind and kernel.moved_bytes <= COMBINED_BYTES:
                left.append(c)
                alike[kernel.group] += 1
        is_sorted = max(alike.values(), default=0) < 2
        while left:
            if not is_sorted:
                places = visits.places()
                left.sort(key=lambda c: places[collectives[c]])
                is_sorted = True
            taken, bits, waits, nbytes = list[int](), 0, 0, 0
            for c in left:
                kernel = kernels[collectives[c]]
                if kernel.group != kernels[collectives[left[0]]].group:
                    continue
                moved = kernel.moved_bytes
                if nbytes + moved > COMBINED_BYTES or behind[c] & bits or waits >> c & 1:
                    break
                taken.append(c)
                bits |= 1 << c
                waits |= behind[c]
                nbytes += moved
            left = [c for c in left if not bits >> c & 1]
            groups.append(sorted(collectives[c] for c in taken))
            if len(taken) > 1:
                _wait_for_all(behind, bits, waits | bits)
                for c in taken:
                    behind[c] = (behind[c] | waits | bits) & ~(1 << c)
                visits.join([collectives[c] for c in taken])
                is_sorted = not any(waits >> c & 1 for c in left)
    return groups


class _Visits:
    """The order in which XLA visits kernels: operands before results, the first output's first.

    A kernel has numbers as its first operands, and of a sum of many numbers, such as a global norm,
    the last: each sum that is fused into the next one brings what it adds up behind the others.

        ((a + b) + c) + d    is read as    d, c, a, b

    What runs as one is visited in the place of its first, and its operands in turn.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._needs: list[list[int]] = []
        self._first = list(range(len(stored.kernels)))  # of those that each one runs with

    def places(self) -> Sequence[int]:
        """The place of each kernel; in the order of the listing where nothing tells of visits."""
        if not self._stored.visits:
            return range(len(self._first))
        if not self._needs:
            self._read()
        first = self._first
        needs = [list(dict.fromkeys(first[n] for n in need)) for need in self._needs]
        places = [0] * len(first)
        for place, k in enumerate(_visited(needs, [first[k] for k in self._starts])):
            places[k] = place
        return places

    def join(self, kernels: Sequence[int]) -> None:
        """Have kernels run as one from now on."""
        one, *others = kernels
        for k in others:
            self._first[k] = one
            if self._needs:
                self._needs[one] += self._needs[k]

    def _read(self) -> None:
        stored, kernels = self._stored, self._stored.kernels
        visits = [(stored.visit(kernel.makes[0])[0], k) for k, kernel in enumerate(kernels)]
        numbers = [sum(stored.nbytes.get(m, 0) for m in k.makes) <= NUMBER_BYTES for k in kernels]
        read = set[int]()
        for k, need in enumerate(needed(kernels)):
            adds_up = numbers[k] and len(need) > _SUMMED
            found = sorted(need, key=visits.__getitem__, reverse=adds_up)
            self._needs.append(sorted(found, key=lambda n: not numbers[n]))
            read.update(need)
        order = sorted(range(len(kernels)), key=visits.__getitem__)
        self._starts = [*(k for k in order if k not in read), *order]
        # The loss of logits that are split over devices is summed up by what works out, of most of
        # the same sums of rows, the gradients' shares.
        for k, need in enumerate(self._needs):
            if numbers[k] and len(need) > 1 and all(_is_all_reduce(kernels[n]) for n in need):
                rows = {*need}
                others = [o for o in order if not numbers[o]]
                shared = [len(rows.intersection(self._needs[o])) for o in others]
                if any(shared):
                    other = others[shared.index(max(shared))]
                    self._needs[other] = list(dict.fromkeys([*self._needs[other], *need]))


def _is_all_reduce(kernel: Kernel) -> bool:
    return kernel.group is not None and kernel.group[0] == "all-reduce"


def _waited_for(kernels: Sequence[Kernel]) -> dict[int, int]:
    """The collectives that each one waits for, in the order of the listing, as bits."""
    found: dict[int, int] = {}
    after: dict[str, int] = {}  # of each piece, the collectives that it was made after
    for kernel in kernels:
        waits = 0
        for name in kernel.reads:
            waits = either(waits, after.get(name, 0))
        if kernel.group is not None:
            own = 1 << len(found)
            found[len(found)] = waits
            waits |= own
        if waits:
            after.update(dict.fromkeys(kernel.makes, waits))
    return found


def either(one: int, other: int) -> int:
    """The bits of both: the same object where one has them all, as most of a deep step do."""
    both = one | other
    return one if both == one else other if both == other else both


def _wait_for_all(waits: dict[int, int], joined: int, for_these: int) -> None:
    """Has what waits for one of the joined, as bits, wait for all of them and what these wait for.

    Who waits for all of them already waits for the rest, too.
    """
    for k, before in waits.items():
        known = before & joined
        if known and known != joined:
            waits[k] = before | for_these


def as_one(stored: Stored, groups: Iterable[Sequence[int]]) -> Stored:
    """The same kernels, those of each group joined to its first, in an order that can run."""
    kernels = list(stored.kernels)
    for first, *others in groups:
        members = [kernels[first], *(kernels[k] for k in others)]
        made = tuple(name for k in members for name in k.makes)
        reads = frozenset[str]().union(*(k.reads for k in members)).difference(made)
        kernels[first] = replace(members[0], makes=made, reads=reads)
        for k in others:
            kernels[k] = replace(kernels[k], makes=())
    left = [kernel for kernel in kernels if kernel.makes]
    if len(left) == len(kernels):
        return stored
    return in_order(replace(stored, kernels=tuple(left)))


def in_order(stored: Stored) -> Stored:
    """The same kernels, each after all that it needs."""
    kernels = stored.kernels
    order = _visited(needed(kernels), range(len(kernels)))
    return replace(stored, kernels=tuple(kernels[k] for k in order))


@dataclass(frozen=True)
class RowWork:
    """A kernel that goes along rows: the shape it goes over, and if it sums rows up."""

    shape: tuple[int, ...]
    sums: bool


def moved_along_rows(
    kernels: Sequence[Kernel],
    work: Sequence[RowWork | None],
    kept: Collection[str],
    once: bool = False,
) -> dict[int, frozenset[str]]:
    """By kernel, the pieces that it loads and stores, where Triton makes one of several.

    XLA for GPUs runs sums over rows, and the work that reads both the rows and their sums, as one
    kernel by Triton, if all that reads the sums goes along such rows: a softmax, a norm, and their
    gradients. Where several kernels read a sum each computes it, and nothing stores it.

        max = m(x)   sum = s(x, max)   y = f(x, max, sum)     loads x, stores y

    What only one such kernel reads is computed in it, too:

        x = a + b    mean = m(x)   y = f(x, mean)             loads a and b, stores y

    `work` tells of each kernel if it goes along rows that are short enough, and `kept` are pieces
    that are read elsewhere. Kernels that run by themselves are left out; what others compute moves
    nothing. Sums are computed `once`, or by each kernel that reads them.
    """
    # 1. From the last to the first, what is computed by those that read it, and by which.
    readers: dict[str, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for name in kernel.reads:
            readers.setdefault(name, []).append(k)
    ends: dict[int, frozenset[int]] = {}
    joins: set[int] = set()  # the kernels that compute sums of others
    for k in range(len(kernels) - 1, -1, -1):
        own, makes = work[k], kernels[k].makes
        if own is None or len(makes) != 1 or makes[0] in kept:
            continue
        by = readers.get(makes[0], [])
        if not by or any((other := work[r]) is None or other.shape != own.shape for r in by):
            continue
        found = frozenset[int]().union(*(ends.get(r, (r,)) for r in by))
        if own.sums and (len(found) == 1 or not once):
            ends[k] = found
            joins |= found
        elif not own.sums and len(found) == 1 and found <= joins:
            ends[k] = found
    # 2. What they load in its place.
    makers = {kernels[k].makes[0]: k for k in ends}
    moved: dict[int, frozenset[str]] = dict.fromkeys(ends, frozenset())
    for k in sorted(joins):
        loaded, waiting = set[str](), [*kernels[k].reads]
        while waiting:
            name = waiting.pop()
            if name in makers:
                waiting += kernels[makers[name]].reads
            else:
                loaded.add(name)
        moved[k] = frozenset(loaded.union(kernels[k].makes))
    return moved


def along_rows(stored: Stored, work: Sequence[RowWork | None]) -> Stored:
    """The same kernels, those of which Triton makes one joined; see `moved_along_rows`.

    Sums that several of them read are stored here, as they are where the kernels lie far apart.
    """
    kernels, kept = stored.kernels, stored.kept
    moved = moved_along_rows(kernels, work, kept, once=True)
    by_triton = {k for k, pieces in moved_along_rows(kernels, work, kept).items() if pieces}
    if not by_triton:
        return stored
    left: list[Kernel] = []
    for k, kernel in enumerate(kernels):
        pieces = moved.get(k)
        if k in by_triton:  # what it sums up is read before, and so nothing may lie in its place
            reads = kernel.reads if pieces is None else pieces.difference(kernel.makes)
            left.append(replace(kernel, reads=reads, in_place=False, alone=True))
        elif pieces is None:
            left.append(kernel)
    return replace(stored, kernels=tuple(left))


def known_before(
    kernels: Sequence[Kernel], carries: Collection[str], is_light: Sequence[bool]
) -> Iterator[int]:
    """The kernels that can run before a trip begins: no carry leads to them, nor heavy work."""
    late = set(carries)
    for k, kernel in enumerate(kernels):
        is_late = not late.isdisjoint(kernel.reads)
        if not is_late:
            yield k
        if is_late or not is_light[k]:
            late.update(kernel.makes)


def depth_first(stored: Stored, outputs: Sequence[str | None]) -> Stored:
    """The same kernels in the order of XLA's depth-first scheduler.

    What an output needs runs first for the one that has the most behind it; among what a kernel
    needs, that with the most shared and the largest subtree first. It puts off what only a later
    output needs: weight gradients wait until the gradients of activations are through.
    """
    kernels = stored.kernels
    made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
    needs = needed(kernels)
    rank = _ranks(kernels, needs, _visited(needs, range(len(needs))), stored.nbytes)
    for need in needs:
        need.sort(key=rank.__getitem__)
    ends = sorted(set(_ends(stored, outputs, made)), key=rank.__getitem__)
    order = _visited(needs, [*ends, *range(len(kernels))])
    return lightened(replace(stored, kernels=tuple(kernels[k] for k in order)))


def needed(kernels: Sequence[Kernel]) -> list[list[int]]:
    """The kernels whose results each kernel reads."""
    made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
    return [
        sorted({made[r] for r in kernel.reads if r in made and made[r] != k})
        for k, kernel in enumerate(kernels)
    ]


def post_order(stored: Stored, outputs: Sequence[str | None]) -> Stored:
    """The same kernels as XLA visits them: operands before results, the first output's first."""
    kernels = stored.kernels
    made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
    needs = list[list[int]]()
    for k, kernel in enumerate(kernels):
        found = (made[name] for name in stored.read_by(kernel) if name in made)
        needs.append([n for n in dict.fromkeys(found) if n != k])
    order = _visited(needs, [*_ends(stored, outputs, made), *range(len(kernels))])
    return lightened(replace(stored, kernels=tuple(kernels[k] for k in order)))


def _ends(stored: Stored, outputs: Sequence[str | None], made: Mapping[str, int]) -> Iterator[int]:
    """The kernels that make what stands for each output, the first one's first."""
    for o in outputs:
        for name in () if o is None else sorted(stored.behind.get(o, (o,))):
            if name in made:
                yield made[name]


def _ranks(
    kernels: Sequence[Kernel],
    needs: Sequence[Sequence[int]],
    order: Sequence[int],
    nbytes: Mapping[str, int],
) -> list[tuple[int, int, int]]:
    """The rank of each kernel among its like: the least shared and smallest subtree comes last."""
    users = [0] * len(kernels)
    for need in needs:
        for k in need:
            users[k] += 1
    shared, behind, total = [0] * len(kernels), [0] * len(kernels), 0
    for k in order:
        need = needs[k]
        # What is shared counts more than once, which the two bounds keep in check.
        own = sum(nbytes[m] for m in kernels[k].makes)
        total += own
        shared[k] = min(len(kernels), max(0, users[k] - 1) + sum(shared[n] for n in need))
        behind[k] = min(total, own + sum(behind[n] for n in need))
    return [(-shared[k], -behind[k], k) for k in range(len(kernels))]


def _visited(needs: Sequence[Sequence[int]], starts: Sequence[int]) -> list[int]:
    """The kernels depth first, each after all that it needs."""
    seen = bytearray(len(needs))
    order: list[int] = []
    for start in starts:
        if seen[start]:
            continue
        seen[start] = 1
        path = [(start, iter(needs[start]))]
        while path:
            k, rest = path[-1]
            for n in rest:
                if not seen[n]:
                    seen[n] = 1
                    path.append((n, iter(needs[n])))
                    break
            else:
                order.append(k)
                path.pop()
    return order


def lightened(stored: Stored) -> Stored:
    """The same kernels, light ones that read much more than they make moved up.

    A compiler fuses a reduction, or the look-up of a few items, with the element-wise work that
    makes what it reads, or that reads it too, so that the piece need not wait for it. What a
    product or a collective makes, and only such as these read, waits. A look-up of which only
    collectives read runs by itself: XLA fuses it with work of its own shape alone, which is what
    its readers are else.
    """
    kernels = stored.kernels
    made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
    place = list(range(len(kernels)))
    for k, read in _light_behind(stored, made).items():
        place[k] = max(place[made[r]] for r in read)
    return _placed(stored, place)


def begun_by_makers(stored: Stored) -> Sequence[Kernel]:
    """The kernels, sums reading what those that make it have summed up in part.

    XLA for GPUs sums in two kernels where much is summed up to little. The first is fused with the
    element-wise work that makes what it reads, which then comes in a tuple with its sums.
    """
    kernels, nbytes = list(stored.kernels), stored.nbytes
    made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
    for k, read in _light_behind(stored, made).items():
        most = max(nbytes[name] for name in read)
        for name in read if not kernels[k].picks else ():
            maker = kernels[made[name]]
            if nbytes[name] == most and maker.is_light and not maker.alone and maker.at >= 0:
                part = f"{name} in part for {k}"
                kernels[made[name]] = replace(maker, makes=(*maker.makes, part))
                reads = kernels[k].reads.difference((name,)).union((part,))
                kernels[k] = replace(kernels[k], reads=reads)
    return kernels


def _light_behind(stored: Stored, made: Mapping[str, int]) -> dict[int, list[str]]:
    """Light kernels that read much more than they make and need not wait, with what they read."""
    kernels, nbytes = stored.kernels, stored.nbytes
    alone = looked_up_alone(kernels)
    few = dict[int, tuple[list[str], int]]()  # what such kernels read, the bytes of the largest
    for k, kernel in enumerate(kernels):
        if not kernel.is_light or k in alone:
            continue
        read = [r for r in kernel.reads if r in made]
        most = max((nbytes[r] for r in read), default=0)
        if most and most >= _MUCH * sum(nbytes[m] for m in kernel.makes):
            few[k] = read, most
    passing = set[str]()  # pieces that element-wise work makes or reads
    for k, kernel in enumerate(kernels):
        if kernel.is_light and not kernel.alone and kernel.at >= 0 and k not in few:
            passing.update(kernel.makes, kernel.reads)
    return {
        k: read
        for k, (read, most) in few.items()
        if kernels[k].picks or all(r in passing for r in read if nbytes[r] == most)
    }


def looked_up_alone(kernels: Sequence[Kernel]) -> set[int]:
    """The look-ups of which only collectives read, or nothing does."""
    computed = frozenset[str]().union(*(k.reads for k in kernels if k.group is None))
    return {k for k, own in enumerate(kernels) if own.picks and computed.isdisjoint(own.makes)}


def ahead(stored: Stored) -> Stored:
    """The same kernels, early ones some collectives before their readers.

    XLA's latency-hiding scheduler lets gathers run beside the work before they are needed; what
    they gather is held from then on.
    """
    kernels = stored.kernels
    made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
    place, before = list(range(len(kernels))), [-1] * _AHEAD
    for k, kernel in enumerate(kernels):
        if kernel.is_early:
            after = before[-_AHEAD]
            place[k] = max((place[made[r]] for r in kernel.reads if r in made), default=after)
            place[k] = max(place[k], after)
        if kernel.group is not None or kernel.is_early:
            before.append(k)
    return _placed(stored, place)


def _placed(stored: Stored, place: Sequence[int]) -> Stored:
    """The kernels by their places, each behind the one whose place it has."""
    order = sorted(
        range(len(place)), key=place.__getitem__
    )  # which keeps those of a place in order
    return replace(stored, kernels=tuple(stored.kernels[k] for k in order))


# -- least first -----------------------------------------------------------------------------------


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
