"""Says why nothing fits: what cannot be kept together, what is largest, what would help.

The conflict is irreducible: of pins, constraints and recipe only those are named without any one of
which the others could be kept (the deletion filter of Chinneck and Dravnieks, 1991).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import InfeasibleError, MemoryLimitError, PinError, bulleted
from autopar.ir.text import limit_gib, show_bytes
from autopar.passes.base import Setting
from autopar.passes.shard.model.assemble import Assembled
from autopar.passes.shard.model.decisions import Decision, Reading
from autopar.passes.shard.model.pins import CONSTRAINT, Pins, show_spec
from autopar.passes.shard.recipes import AbstractRecipe, Free
from autopar.passes.shard.solver.heuristic import Least, light_answers, min_memory

_SHOWN = 5


@dataclass(frozen=True)
class Posed:
    """A problem with what it was read from."""

    reading: Reading
    assembled: Assembled


# The problem under some pins and a recipe, without the step's own constraints at some lines.
Pose = Callable[[Pins, AbstractRecipe, frozenset[str]], Posed]
# Bytes that an assignment of a problem is known to need, with all that the rows leave out.
WeighChoice = Callable[[Posed, tuple[int, ...]], float]


def lightest(posed: Posed, weigh: WeighChoice) -> tuple[tuple[int, ...], float]:
    """The assignment that is known to need the least, and how much: () and infinity for none."""
    problem = posed.assembled.problem
    answers = light_answers(problem, posed.assembled.copies)
    counted = sorted({(problem.peak_bytes(c), c) for c in answers})
    nbytes, choice = float("inf"), tuple[int, ...]()
    for peak, light in counted:
        if peak >= nbytes:
            break
        nbytes, choice = min((nbytes, choice), (max(peak, weigh(posed, light)), light))
    return choice, nbytes


@dataclass(frozen=True)
class Culprit:
    """A demand of the user, in words, and its kind: a pin, a line of the step, the recipe."""

    text: str
    pin: tuple[str, tuple[tuple[str, ...], ...]] | None = None
    line: str | None = None


@dataclass(frozen=True)
class Refused:
    """A request that cannot be met, and how it could be posed with less in it."""

    setting: Setting
    recipe: AbstractRecipe
    posed: Posed
    pose: Pose
    weigh: WeighChoice
    recomputes: bool = False

    def error(self) -> InfeasibleError | PinError:
        """The error that names the conflict, the values at the peak and the limit that would do."""
        trials = _Trials(self, tuple(self._culprits()))
        if not trials.least(trials.every).choice:
            return trials.contradiction()
        return trials.too_large()

    def _culprits(self) -> Iterator[Culprit]:
        for pin in self.setting.pins:
            yield Culprit(f"pin {pin[0]!r} = {show_spec(pin[1])}", pin=pin)
        lines = {d.line for d in self.posed.reading.decisions if d.fixed and d.label == CONSTRAINT}
        for line in sorted(lines):
            yield Culprit(f"{CONSTRAINT} at {line}", line=line)
        if not isinstance(self.recipe, Free):
            yield Culprit(f"method={self.recipe.name!r}")


class _Trials:
    """The request with some of its culprits only: what that holds at least, asked once each."""

    def __init__(self, refused: Refused, culprits: tuple[Culprit, ...]) -> None:
        self._refused, self._culprits = refused, culprits
        self.every = frozenset(range(len(culprits)))
        self._posed: dict[frozenset[int], Posed] = {self.every: refused.posed}
        self._found: dict[frozenset[int], Least] = {}
        self._enough: dict[frozenset[int], float] = {}

    def posed(self, kept: frozenset[int]) -> Posed:
        """The problem with these culprits."""
        if kept not in self._posed:
            given = [self._culprits[i] for i in sorted(kept)]
            lost = [self._culprits[i] for i in sorted(self.every - kept)]
            pins = tuple(c.pin for c in given if c.pin is not None)
            own = any(c.pin is None and c.line is None for c in given)
            loose = frozenset(c.line for c in lost if c.line is not None)
            recipe = self._refused.recipe if own else Free()
            self._posed[kept] = self._refused.pose(pins, recipe, loose)
        return self._posed[kept]

    def least(self, kept: frozenset[int]) -> Least:
        """The assignment that holds the least with these culprits."""
        if kept not in self._found:
            self._found[kept] = min_memory(self.posed(kept).assembled.problem)
        return self._found[kept]

    def enough(self, kept: frozenset[int]) -> float:
        """A limit under which there is a plan with these culprits."""
        if kept not in self._enough:
            posed = self.posed(kept)
            self._enough[kept] = lightest(posed, self._refused.weigh)[1]
        return self._enough[kept]

    def _conflict(self, able: Callable[[frozenset[int]], bool]) -> list[int]:
        """Culprits that cannot be kept together; none where dropping them all would not help."""
        if not able(frozenset()):
            return []
        kept = self.every
        for i in sorted(self.every):
            if not able(kept - {i}):
                kept = kept - {i}
        return sorted(kept)

    def contradiction(self) -> InfeasibleError | PinError:
        """The error where no assignment is possible, whatever the memory."""
        mesh = self._refused.setting.mesh
        found = self._conflict(lambda kept: bool(self.least(kept).choice))
        if not found:
            return InfeasibleError(f"no sharding of this step is possible on ({mesh})")
        faults = [self._culprits[i].text for i in found]
        headline = f"these cannot be kept together on ({mesh}):"
        return PinError(bulleted(headline, faults, "Drop any one of them."))

    def too_large(self) -> MemoryLimitError:
        """The error where the memory is too small."""
        limit = self._refused.setting.memory_bytes
        conflict = self._conflict(lambda kept: self.enough(kept) <= limit)
        kept = self.every if conflict else frozenset[int]()
        named = [self._culprits[i] for i in conflict]
        faults = [*self._remedies(conflict), *_largest(self.posed(kept))]
        asked = _how(self._culprits, self._refused.recipe) if self._culprits else ""
        has_bytes = self._refused.setting.cluster.memory_bytes
        advice = _advice(named, self.enough(self.every), asked, has_bytes)
        return MemoryLimitError(bulleted(self._headline(kept, named), faults, advice))

    def _headline(self, kept: frozenset[int], named: Sequence[Culprit]) -> str:
        setting, least = self._refused.setting, self.least(kept)
        over = least.bound_bytes - setting.memory_bytes
        again = ", with all made again that saves memory," if self._refused.recomputes else ""
        text = (
            f"no plan on ({setting.mesh}) fits {show_bytes(setting.memory_bytes)} a device: at its "
            f"peak the step{again} holds {show_bytes(_unsharded(self.posed(kept)))} unsharded, and "
            f"at least {show_bytes(least.bound_bytes)} a device {_how(named, self._refused.recipe)}"
        )
        if over > 0:
            return f"{text}, {show_bytes(over)} too much."
        over = self.enough(kept) - setting.memory_bytes
        return f"{text}; the least that was found is {show_bytes(over)} too much."

    def _remedies(self, conflict: Sequence[int]) -> Iterator[str]:
        """The limits that would do without each culprit, the others kept."""
        for i in conflict:
            enough = self.enough(self.every - {i})
            fits = ", which fits" if enough <= self._refused.setting.memory_bytes else ""
            yield f"{self._culprits[i].text}: without it {show_bytes(enough)} would do{fits}"


def _how(named: Sequence[Culprit], recipe: AbstractRecipe) -> str:
    if not named:
        return "however it is sharded"
    fixed = sum(c.pin is not None or c.line is not None for c in named)
    under = f"under {recipe.name}" if fixed < len(named) else ""
    pinned = ("with this pin" if fixed == 1 else "with these pins") if fixed else ""
    return " ".join(part for part in (under, pinned) if part)


def _advice(named: Sequence[Culprit], enough: float, asked: str, has_bytes: int) -> str:
    """The remedies that were found, and no others."""
    ways = ["fewer pins"] * any(c.pin is not None or c.line is not None for c in named)
    whole = any(c.pin is None and c.line is None for c in named)
    ways += ["method='auto', which may shard more"] * whole
    gib = limit_gib(enough)
    limit = f"a limit of {show_bytes(gib * 2**30)} or more (memory_gb={gib:g})"
    if enough > has_bytes:
        limit = f"devices with {show_bytes(gib * 2**30)} or more each"
    ways.append(" ".join(part for part in (limit, asked) if part))
    return f"Use {' or '.join(ways)}."


def _unsharded(posed: Posed) -> float:
    """The most that would be held at once if nothing was cut up."""
    most = posed.assembled.problem.over_time(lambda u: u.nbytes.max())
    return float(most.max(initial=0.0))


def _largest(posed: Posed) -> Iterator[str]:
    """The values held when the smallest choices hold the most, the largest first."""
    problem, decisions = posed.assembled.problem, posed.reading.decisions
    worst = int(problem.over_time(lambda u: u.nbytes.min()).argmax())
    live = [u for u in problem.usages if u.first <= worst <= u.last]
    live.sort(key=lambda u: (-float(u.nbytes.min()), -float(u.nbytes.max()), u.node))
    for usage in live[:_SHOWN]:
        if usage.node < len(decisions):
            yield _item(decisions[usage.node], float(usage.nbytes.min()), float(usage.nbytes.max()))


def _item(decision: Decision, least: float, most: float) -> str:
    value = decision.value.type_text if decision.value is not None else ""
    line = f" ({decision.line})" if decision.line else ""
    held = f"{show_bytes(least)} to {show_bytes(most)} a device, by how it is sharded"
    if least == most:
        held = f"{show_bytes(most)} a device, however it is sharded"
    return f"{decision.label} {value}: {held}{line}"
