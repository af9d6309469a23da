"""Expert parallel: the batch over all axes, the experts of a mixture over one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.errors import InfeasibleError
from autopar.ir.sharding import MeshShape
from autopar.passes.shard.model.decisions import Choice, Place, Reading, ReadKind
from autopar.passes.shard.recipes.data import DataParallel
from autopar.passes.shard.recipes.recipe import (
    PARTIAL,
    REPLICATED,
    AbstractRecipe,
    Choices,
    Slot,
    Slots,
    Test,
    View,
    find_weights,
    shared_factors,
    spread,
)


@dataclass(frozen=True)
class ExpertParallel(AbstractRecipe):
    """Data parallel, but each device holds and computes only some of the experts.

    Their inputs and outputs travel by all-to-alls between the devices of one axis: the last that
    divides the experts. Of a step that `is_part` of one with experts the rest is data parallel.
    """

    name: ClassVar[str] = "expert"
    is_part: bool = False

    def suits(self, reading: Reading) -> bool:
        """True if there is a product with the weights of experts."""
        weights = find_weights(reading)
        view = View(reading, MeshShape((), ()), (), reading.batch, weights)
        return any(_expert_slots(view, index) for index in sorted(weights.readers))

    @property
    def of_parts(self) -> ExpertParallel:
        """The recipe that leaves parts without experts data parallel."""
        return replace(self, is_part=True)

    def restrict(
        self, reading: Reading, choices: Choices, mesh: MeshShape
    ) -> list[tuple[Choice, ...]]:
        """Batch on every axis, but experts on one in their products, weights and state.

        Raises InfeasibleError where the step has no experts, or no axis divides them.
        """
        if self.is_part and not self.suits(reading):
            return DataParallel().restrict(reading, choices, mesh)
        view = View.of(self.name, reading, mesh, mesh.names)
        experts = _Experts.of(view)

        def store(index: int) -> Test:
            return experts.held(index, REPLICATED) if index in experts.state else view.whole

        def work(index: int) -> Test:
            return experts.kept(index) if index in experts.state else view.unsharded

        return view.narrowed(choices, store, work, experts.batch)


@dataclass(frozen=True)
class _Experts:
    """The axis of the experts, and where they are: in their products, their state, all over."""

    view: View
    axis: str
    products: Mapping[int, int]
    state: Slots
    everywhere: Slots

    @classmethod
    def of(cls, view: View) -> _Experts:
        reading = view.reading
        seeds = [s for index in sorted(view.weights.readers) for s in _expert_slots(view, index)]
        if not seeds:
            raise InfeasibleError(
                "expert splits a mixture's experts over an axis, but this step has none. No "
                "product with a weight has a dim that the weight, its input and its result "
                "share. Use another method: 'auto', 'fsdp' or 'megatron'."
            )
        everywhere = spread(reading, seeds)
        products = {
            index: min(shared)
            for index, decision in enumerate(reading.decisions)
            if decision.op is not None
            and (shared := shared_factors(decision.op) & everywhere.get(index, frozenset()))
        }
        # An update computes with each weight for itself: what it sums of one, such as a norm or the
        # rows of a factored moment, is summed where the experts are. Elsewhere ops mix them with
        # tokens.
        state = spread(
            reading,
            _weights(reading, dict(seeds)),
            lambda r: r.kind is not ReadKind.OP or r.region == "update",
        )
        return cls(view, _axis(view, seeds), products, state, everywhere)

    def held(self, index: int, elsewhere: int) -> Test:
        """Experts on their axis, and exactly this on every other."""
        return self._with_others(self.state[index], (elsewhere,))

    def kept(self, index: int) -> Test:
        """Experts on their axis; the others may be partial sums."""
        return self._with_others(self.state[index], (REPLICATED, PARTIAL))

    def batch(self, index: int, carried: int) -> Test:
        """Batch on every axis; on the experts' own axis either, and experts in their products."""
        able = {carried, *self.everywhere.get(index, ())}
        if self.view.reading.decisions[index].op is not None:
            able = {self.products.get(index, carried)}
        return self._with_others(able, (carried,))

    def _with_others(self, own: Iterable[int], others: Iterable[int]) -> Test:
        """The experts' axis at one of its own places, and every other axis at one of others."""
        names = self.view.mesh.names
        return self.view.placed({a: own if a == self.axis else others for a in names})


def _expert_slots(view: View, index: int) -> list[Slot]:
    op = view.reading.decisions[index].op
    assert op is not None
    found = (shared_factors(op) & view.weights.readers[index]) - {view.factor(index)}
    return [(index, min(found))] if found else []


def _weights(reading: Reading, products: Mapping[int, int]) -> list[Slot]:
    """The experts' dims of the weights that their products read."""
    found: list[Slot] = []
    for read in reading.reads:
        factor = products.get(read.reader)
        if factor is None or read.kind is not ReadKind.OP or read.operand < 0:
            continue
        assert read.op is not None
        assert read.op.rule is not None
        where = read.op.rule.operands[read.operand]
        place = read.standing
        if isinstance(place, Place):
            found += [
                (place.decision, place.dims[d]) for d, dim in enumerate(where) if factor in dim
            ]
    return found


def _axis(view: View, seeds: list[Slot]) -> str:
    counts: set[int] = set()
    for index, factor in seeds:
        op = view.reading.decisions[index].op
        assert op is not None
        assert op.rule is not None
        counts.add(op.rule.factors[factor].size)
    for axis in reversed(view.mesh.splitting):
        if all(n % view.mesh.size((axis,)) == 0 for n in counts):
            return axis
    shown = " and ".join(map(str, sorted(counts)))
    raise InfeasibleError(
        f"expert splits experts over an axis, but {shown} experts divide by none of "
        f"({view.mesh}). Use a mesh with an axis that divides {shown}, or method='auto'."
    )
