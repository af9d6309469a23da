"""The contract of a recipe, and a reading as recipes see it.

A recipe narrows each decision's choices, and the solver takes what is left. It asks a `View` of the
reading for the batch and its axes, the state, and what is split together.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from autopar.errors import InfeasibleError
from autopar.ir.graph import Op
from autopar.ir.sharding import Assignment, MeshShape
from autopar.ir.values import Role
from autopar.passes.shard.model.decisions import (
    Choice,
    Decision,
    DecisionKind,
    Place,
    Read,
    Reading,
    ReadKind,
)
from autopar.rules.propagation import BatchTags, Part

Choices = Sequence[tuple[Choice, ...]]  # of each decision


@dataclass(frozen=True)
class AbstractRecipe(abc.ABC):
    """Narrows the choices of a reading's decisions."""

    name: ClassVar[str]

    @abc.abstractmethod
    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Choices that agree with the recipe; a decision that none would be left to keeps all.

        Raises InfeasibleError where the recipe makes no sense for this step on this mesh.
        """

    def suits(self, reading: Reading) -> bool:
        """True if there is something in a step, or a part of one, that the recipe is for."""
        del reading
        return True

    @property
    def of_parts(self) -> AbstractRecipe:
        """The recipe for the parts of a step that it suits, though it may not suit each of them."""
        return self


@dataclass(frozen=True)
class Free(AbstractRecipe):
    """No restriction: the whole space."""

    name: ClassVar[str] = "auto"

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """The choices as they are."""
        del reading, mesh
        return list(choices)


# -- a reading as recipes see it -------------------------------------------------------------------

Test = Callable[[Choice], bool]
REPLICATED, PARTIAL = -1, -2
_UNSPLIT = (REPLICATED, PARTIAL)
_SHOWN = 4  # numbers of devices that a message names


def place_of(choice: Choice, axis: str, number: int) -> int:
    """The dim or factor that an axis, the `number`-th, splits in a choice; or -1, or -2."""
    if isinstance(choice, Assignment):
        return choice.factors[number]
    if axis in choice.partial:
        return PARTIAL
    return next((d for d, axes in enumerate(choice.dims) if axis in axes), REPLICATED)


@dataclass(frozen=True)
class Placed:
    """The test that each of some axes, with its number, is at one of its places in a choice."""

    where: tuple[tuple[str, int, frozenset[int]], ...]

    def __call__(self, choice: Choice) -> bool:
        return all(place_of(choice, axis, n) in places for axis, n, places in self.where)


@dataclass(frozen=True)
class Split:
    """The test that the devices of some axes, with their numbers and sizes, make so many pieces."""

    axes: tuple[tuple[str, int, int], ...]
    pieces: int

    def count(self, choice: Choice) -> int:
        """The number of pieces that these axes make."""
        return math.prod(size for a, n, size in self.axes if place_of(choice, a, n) >= 0)

    def __call__(self, choice: Choice) -> bool:
        return self.count(choice) == self.pieces


@dataclass(frozen=True)
class View:
    """A reading seen by a recipe: which axes carry the batch, and where it is."""

    reading: Reading
    mesh: MeshShape
    batch_axes: tuple[str, ...]
    tags: BatchTags
    weights: Weights
    # What tests leave of choices: look-alikes have the very same choices, and equal tests.
    _left: dict[tuple[int, Test], tuple[Choice, ...]] = field(
        default_factory=dict[tuple[int, Test], tuple[Choice, ...]],
        init=False, repr=False, compare=False,
    )  # fmt: skip

    @classmethod
    def of(cls, name: str, reading: Reading, mesh: MeshShape, axes: tuple[str, ...]) -> View:
        tags = reading.batch
        count = mesh.size(axes)
        if tags.size is not None and tags.size % count:
            fewer = [str(n) for n in range(count - 1, 1, -1) if tags.size % n == 0][:_SHOWN]
            raise InfeasibleError(
                f"{name} splits the batch over {' x '.join(axes)}, {count} devices, but "
                f"the batch has {tags.size} rows ({tags.path}), which is not divisible by {count}. "
                f"Use a batch that is a multiple of {count}, fewer devices for it"
                f"{f' ({listed} divide it)' if (listed := ', '.join(fewer)) else ''}, or "
                "method='auto', which may shard other dims."
            )
        return cls(reading, mesh, axes, tags, find_weights(reading))

    # -- tests on choices --------------------------------------------------------------------

    def placed(self, where: Mapping[str, Iterable[int]]) -> Test:
        """Each of these axes at one of its places: a dim or factor, REPLICATED or PARTIAL.

        An axis of one device has no place: it splits nothing.
        """
        number, splitting = self.mesh.names.index, self.mesh.splitting
        placed = ((a, places) for a, places in where.items() if a in splitting)
        return Placed(tuple((a, number(a), frozenset(places)) for a, places in placed))

    @property
    def whole(self) -> Test:
        """Neither sharded nor partial."""
        return self.placed(dict.fromkeys(self.mesh.names, (REPLICATED,)))

    @property
    def unsharded(self) -> Test:
        """No dim split by a batch axis; a partial sum is fine."""
        return self.off(self.batch_axes)

    @property
    def anything(self) -> Test:
        """No restriction."""
        return self.placed({})

    def off(self, axes: Sequence[str]) -> Test:
        """No dim or factor split by any of these axes, but a partial sum is fine."""
        return self.placed(dict.fromkeys(axes, _UNSPLIT))

    def most_sharded(self, choices: Sequence[Choice], axes: Sequence[str]) -> Test:
        """Split over as many devices of these axes as any choice."""
        split = self._split(axes, 1)
        return replace(split, pieces=max(map(split.count, choices)))

    def sharded_optimizer(self, index: int) -> Test:
        """Optimizer state as sharded as it divides, parameters whole."""
        if index in self.weights.parameters:
            return self.whole
        value = self.reading.decisions[index].value
        assert value is not None
        able = [n for n in value.shape if n % self.mesh.device_count == 0]
        if not able:
            return self.anything
        return self._split(self.mesh.names, self.mesh.device_count)

    def _split(self, axes: Sequence[str], pieces: int) -> Split:
        names, sizes = self.mesh.names, self.mesh.sizes
        numbers = [(a, names.index(a)) for a in axes]
        return Split(tuple((a, n, sizes[n]) for a, n in numbers), pieces)

    # -- narrowing -----------------------------------------------------------------------------

    def narrowed(
        self,
        choices: Choices,
        store: Callable[[int], Test],
        work: Callable[[int], Test],
        batch: Callable[[int, int], Test] | None = None,
    ) -> list[tuple[Choice, ...]]:
        """Batch where the batch is; `store` for state, `work` for the rest and for other axes.

        `batch`, given a decision and its batch dim or factor, says where the batch axes may be.
        """
        carrying = batch or self.on_batch
        return [
            self._kept(options, self._tests(i, decision, store, work, carrying))
            for i, (decision, options) in enumerate(
                zip(self.reading.decisions, choices, strict=True)
            )
        ]

    def on_batch(self, index: int, carried: int) -> Test:
        """Puts all batch axes on the batch."""
        del index
        return self.placed(dict.fromkeys(self.batch_axes, (carried,)))

    def _kept(self, options: tuple[Choice, ...], tests: Iterator[Test]) -> tuple[Choice, ...]:
        """The choices that pass each of the tests in turn that any passes."""
        for test in tests:
            key = id(options), test
            if key not in self._left:
                self._left[key] = tuple(c for c in options if test(c)) or options
            options = self._left[key]
        return options

    def _tests(
        self,
        index: int,
        decision: Decision,
        store: Callable[[int], Test],
        work: Callable[[int], Test],
        batch: Callable[[int, int], Test],
    ) -> Iterator[Test]:
        if decision.kind is DecisionKind.INPUT and index in self.weights.state:
            yield store(index)
            return
        carried = self.factor(index)
        if carried is None:
            yield work(index)
            return
        yield batch(index, carried)
        if set(self.batch_axes) != set(self.mesh.names):
            yield work(index)

    def factor(self, index: int) -> int | None:
        """The dim or factor of a decision that carries the batch.

        Of several that hold parts of it, the first that the batch axes divide.
        """
        parts = self._parts(self.reading.decisions[index])
        count = self.mesh.size(self.batch_axes)
        whole = [part.at for part in parts if part.rows % count == 0]
        return next(iter((*whole, *(part.at for part in parts))), None)

    def _parts(self, decision: Decision) -> tuple[Part, ...]:
        if decision.op is not None:
            return self.tags.factors(decision.op)
        for member in decision.members:  # a port's own name stands for a slice of a stacked value
            dims = self.tags.dims(member.value.name)
            at = ((member.place.dims[dim], rows) for dim, rows in dims)
            if parts := tuple(Part(d, rows) for d, rows in at if d >= 0):
                return parts
        return ()


def need_axes(name: str, mesh: MeshShape, what: str) -> None:
    """Raise InfeasibleError unless the mesh has two axes or more."""
    if len(mesh.names) < 2:
        raise InfeasibleError(
            f"{name} {what}, but the mesh ({mesh}) has "
            f"{'only one' if mesh.names else 'none'}. Use a mesh of two axes, such as mesh='2,4'."
        )


@dataclass(frozen=True)
class Weights:
    """Decisions by what they are: all state, the parameters among it, and ops that read one.

    For each op that reads a weight, the factors that stand in the weight's dims.
    """

    state: frozenset[int]
    parameters: frozenset[int]
    readers: Mapping[int, frozenset[int]]


def find_weights(reading: Reading) -> Weights:
    """Parameters are state that forward or backward ops read; the rest is the optimizer's."""
    state: set[int] = set()
    for given in reading.graph.inputs:
        place = reading.standings[given.value.name]
        if given.role is not Role.BATCH and isinstance(place, Place):
            state.add(place.decision)
    through = _through_ports(reading, state)
    parameters: set[int] = set()
    readers: dict[int, frozenset[int]] = {}
    for read in reading.reads:
        if not isinstance(read.standing, Place):
            continue
        origin = through.get(read.standing.decision)
        if origin is None:
            continue
        if read.region != "update":
            parameters.add(origin)
        heavy = read.op is not None and read.op.kind in ("dot_general", "conv_general_dilated")
        if heavy and read.kind is ReadKind.OP and read.operand >= 0:
            assert read.op is not None
            assert read.op.rule is not None
            standing = {f for dim in read.op.rule.operands[read.operand] for f in dim}
            readers[read.reader] = readers.get(read.reader, frozenset()) | standing
    return Weights(frozenset(state), frozenset(parameters), readers)


def _through_ports(reading: Reading, state: set[int]) -> dict[int, int]:
    """State decisions, and the loop ports that pass state in, with the state they hold."""
    origin = {d: d for d in state}
    for read in reading.reads:
        if read.kind is ReadKind.EXACT and isinstance(read.standing, Place):
            source = origin.get(read.standing.decision)
            if source is not None and read.reader not in origin and read.region != "update":
                origin[read.reader] = source
    return origin


Slot = tuple[int, int]  # a decision, and a dim of it, or a factor if it is an op's
Slots = Mapping[int, frozenset[int]]


def spread(
    reading: Reading, seeds: Iterable[Slot], through: Callable[[Read], bool] = lambda r: True
) -> Slots:
    """The slots that are reached from the seeds by reads that `through` lets pass."""
    near: dict[Slot, list[Slot]] = {}
    for read in reading.reads:
        if through(read):
            for left, right in _links(read):
                near.setdefault(left, []).append(right)
                near.setdefault(right, []).append(left)
    found = dict.fromkeys(seeds)
    queue = list(found)
    for slot in queue:
        fresh = [n for n in near.get(slot, ()) if n not in found]
        found.update(dict.fromkeys(fresh))
        queue.extend(dict.fromkeys(fresh))
    slots: dict[int, frozenset[int]] = {}
    for decision, at in found:
        slots[decision] = slots.get(decision, frozenset()) | {at}
    return slots


def _links(read: Read) -> Iterator[tuple[Slot, Slot]]:
    if isinstance(read.standing, Place):
        for d, home in enumerate(read.standing.dims):
            other = _in_reader(read, d)
            if home >= 0 and other is not None:
                yield (read.standing.decision, home), (read.reader, other)


def _in_reader(read: Read, dim: int) -> int | None:
    """The reader's dim or factor that goes with a dim of the value."""
    if read.kind is ReadKind.EXACT:
        return read.dims[dim] if read.dims[dim] >= 0 else None
    assert read.op is not None
    assert read.op.rule is not None
    rule = read.op.rule
    dims = rule.results[-1 - read.operand] if read.operand < 0 else rule.operands[read.operand]
    factor = rule.major(dims[dim])
    if read.kind is ReadKind.OP or factor is None:
        return factor
    result = next((r for r, there in enumerate(rule.results[0]) if factor in there), None)
    if result is None or rule.major(rule.results[0][result]) != factor:
        return None
    return read.dims[result] if read.dims[result] >= 0 else None


def shared_factors(op: Op) -> frozenset[int]:
    """The factors of a product that stand in both operands and in the result: batch dims."""
    if op.kind != "dot_general" or op.rule is None:
        return frozenset()
    dims = (*op.rule.operands, op.rule.results[0])
    left, right, out = ({f for dim in tensor for f in dim} for tensor in dims)
    return frozenset(f for f in left & right & out if op.rule.factors[f].size > 1)
