"""Costs of every interval of layers as a stage, as arrays, for one number of microbatches.

Arrays are indexed [o, i, j]: option o runs layers i..j, both included, as one stage. A stage also
makes the others wait once a step, for its bubble term: see `autopar.schedule.table.Bubble`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.cluster.placement import links_in_a_row
from autopar.cost.stage import StageCost
from autopar.passes.stage.prices import BatchPrices, Option, StageTable
from autopar.schedule.table import SCHEDULES

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# The largest number of microbatches in flight that a stage without activations is said to bear.
_ANY_NUMBER = np.int64(1 << 40)


@dataclass(frozen=True, eq=False)
class IntervalCosts:
    """Seconds and bytes of layers i..j under option o; `device_count` is the cluster's.

    `whole` are F, I and W of one microbatch and the dispatch of two tasks, F and a backward.
    `seconds` are these and an (m-1)-th of what is done once a step, so that m - 1 of them hold it
    all (with one microbatch, `whole` holds it too); infinite for no stage. `forward` and `weight`
    are F and W alone. `fixed`, `activation`, of which `late`, `working` and `once` are bytes on one
    device, as in `StageCost`. `submesh[o]` numbers the option's submesh.
    Across the cut before layer i a stage on submesh u moves a microbatch in `cut[0, u, i]` seconds
    one way, and keeps wires busy for `cut[1, u, i]`.
    """

    batch: BatchPrices
    device_count: int
    task_seconds: float  # of the dispatch of one task
    options: tuple[Option, ...]
    submesh: Ints
    seconds: Floats
    whole: Floats
    forward: Floats
    weight: Floats
    fixed: Ints
    activation: Ints
    late: Ints
    working: Ints
    once: Ints
    cut: Floats
    _stages: dict[object, StageCost] = field(default_factory=dict[object, StageCost], repr=False)

    @property
    def microbatches(self) -> int:
        """m, microbatches of a step."""
        return self.batch.microbatches

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return len(self.seconds[0])

    def stage(self, option: int, first: int, last: int, tasks: StageCost) -> StageCost:
        """The cost of a stage and its tasks' dispatch; equal layers are added up once."""
        chosen = self.options[option]
        layers = chosen.layers[first : last + 1]
        key = tasks, chosen.spare_bytes, *map(id, layers)
        if key not in self._stages:
            spare = StageCost(fixed_bytes=chosen.spare_bytes)
            self._stages[key] = StageCost.of_layers((tasks, *layers, spare))
        return self._stages[key]

    def under(self, schedule: str) -> IntervalCosts:
        """The costs under a schedule: W is dispatched by itself, or nothing waits for it."""
        return self._split if SCHEDULES[schedule].needs_split else self._unsplit

    @cached_property
    def _split(self) -> IntervalCosts:
        task = self.task_seconds
        return replace(self, seconds=self.seconds + task, whole=self.whole + task)

    @cached_property
    def _unsplit(self) -> IntervalCosts:
        return replace(self, activation=self.activation - self.late, late=np.zeros_like(self.late))

    def bytes_at(self, in_flight: int) -> Ints:
        """Bytes of each stage on one device with so many microbatches in flight."""
        held: Ints = self.fixed + np.maximum(in_flight * self.activation + self.working, self.once)
        return held

    def most_in_flight(self, memory_bytes: int, chunks: int = 1) -> Ints:
        """The most microbatches in flight that each stage bears; less than 0 if not even none.

        Several chunks of a device have equal parts of its memory, and one room to work in.
        """
        spare = (memory_bytes - self.working) // chunks - self.fixed
        most = spare // np.maximum(self.activation, 1)
        most = np.where((self.activation == 0) & (spare >= 0), _ANY_NUMBER, most)
        return np.where(memory_bytes // chunks - self.fixed < self.once, -1, most)

    def only(self, options: Sequence[int]) -> IntervalCosts:
        """The costs of some of the options alone, by their numbers."""
        mine = list(options)
        return replace(
            self,
            options=tuple(self.options[o] for o in mine),
            submesh=self.submesh[mine],
            seconds=self.seconds[mine],
            whole=self.whole[mine],
            forward=self.forward[mine],
            weight=self.weight[mine],
            fixed=self.fixed[mine],
            activation=self.activation[mine],
            late=self.late[mine],
            working=self.working[mine],
            once=self.once[mine],
        )


def interval_costs(table: StageTable, batch: BatchPrices) -> IntervalCosts:
    """Cost the intervals of a table for one of its numbers of microbatches."""
    options = tuple(option for options in batch.options for option in options)
    owners = [u for u, options in enumerate(batch.options) for _ in options]
    rows = _layer_rows(options)
    # Once-a-step work is spread over m - 1 microbatches: (m - 1) of a stage hold it all.
    whole, once = _sums(rows.whole) + 2 * table.task_seconds, _sums(rows.once)
    alone = batch.microbatches == 1
    spare = np.array([option.spare_bytes for option in options], dtype=np.int64)
    seconds = whole + once / (1 if alone else batch.microbatches - 1)
    return IntervalCosts(
        batch=batch,
        device_count=table.cluster.device_count,
        task_seconds=table.task_seconds,
        options=options,
        submesh=np.array(owners, dtype=np.int64),
        seconds=np.where(_stages(table), seconds, np.inf),
        whole=whole + once if alone else whole,
        forward=_sums(rows.forward),
        weight=_sums(rows.weight),
        fixed=_sums(rows.fixed).astype(np.int64) + spare[:, None, None],
        activation=_sums(rows.activation).astype(np.int64),
        late=_sums(rows.late).astype(np.int64),
        working=_largest(rows.working).astype(np.int64),
        once=_sums(rows.once_bytes).astype(np.int64),
        cut=_cuts(table, batch),
    )


@dataclass(frozen=True)
class _Rows:
    """The summands of `IntervalCosts`, over [option, layer]."""

    whole: Floats
    once: Floats
    forward: Floats
    weight: Floats
    fixed: Floats
    activation: Floats
    late: Floats
    working: Floats
    once_bytes: Floats


def _layer_rows(options: tuple[Option, ...]) -> _Rows:
    # Equal layers share their cost, so that each is read once.
    read: dict[int, tuple[float, ...]] = {}

    def figures(cost: StageCost) -> tuple[float, ...]:
        if id(cost) not in read:
            held = cost.activation_bytes, cost.late_bytes
            nbytes = cost.fixed_bytes, *held, cost.working_bytes, cost.once_bytes
            parts = cost.forward.total, cost.weight_gradient.total
            read[id(cost)] = (cost.each.total, cost.once.total, *parts, *nbytes)
        return read[id(cost)]

    cube = np.array([[figures(cost) for cost in option.layers] for option in options])
    return _Rows(*np.moveaxis(cube, 2, 0))


def _sums(rows: Floats) -> Floats:
    """Sums over i..j of rows [option, layer]; equal layers give equal sums wherever they start."""
    count = rows.shape[1]
    sums = np.zeros((*rows.shape, count))
    for i in range(count):
        # Summed from i on, not as a difference of prefix sums, so that equal layers give equal
        # sums.
        sums[:, i, i:] = np.cumsum(rows[:, i:], axis=1)
    return sums


def _largest(rows: Floats) -> Floats:
    """The largest over i..j of rows [option, layer]."""
    count = rows.shape[1]
    largest = np.zeros((*rows.shape, count))
    for i in range(count):
        largest[:, i, i:] = np.maximum.accumulate(rows[:, i:], axis=1)
    return largest


def _stages(table: StageTable) -> npt.NDArray[np.bool_]:
    """True at (i, j) that may be a stage: in order, and not ending at a joined boundary."""
    count = table.layer_count
    legal = np.triu(np.ones((count, count), dtype=np.bool_))
    legal[:, list(table.joined)] = False
    return legal


def _cuts(table: StageTable, batch: BatchPrices) -> Floats:
    """`IntervalCosts.cut`, as if all stages had one submesh: mean link, and slowest wires."""
    cut = np.zeros((2, len(table.submeshes), table.layer_count + 1))
    nbytes = np.array(batch.cut_bytes, dtype=np.float64)
    for u, submesh in enumerate(table.submeshes):
        links = links_in_a_row(table.cluster, submesh)
        if links:
            starts = np.array([link.start_seconds for link in links])
            rates = np.array([link.bytes_per_second for link in links])
            cut[0, u, 1:-1] = starts.mean() * (nbytes > 0) + nbytes * (1 / rates).mean()
            cut[1, u, 1:-1] = nbytes / rates.min()
    return cut
