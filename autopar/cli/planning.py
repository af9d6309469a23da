"""Shows a plan being made: which slot on which mesh, and what each mesh came to."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autopar.api import Planned, Watcher
from autopar.ir.layers import LayerSequence
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import StagePlan
from autopar.ir.text import show_seconds

_SLOTS = ("batch", "layer", "stage", "shard", "lower")


class Trail:
    """What every slot gave on every mesh, and a line on a progress display that follows it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("tracing", total=None)
        self._mesh: MeshShape | None = None
        self._given: dict[tuple[MeshShape | None, str], object] = {}
        self._layers: list[LayerSequence] = []

    @property
    def watcher(self) -> Watcher:
        """What to hand to the planner."""
        return Watcher(after=self._after)

    def text_after(self, slot: str, planned: Planned) -> str:
        """What a slot gave on the way to the plan that was made, as it prints."""
        if slot == "graph":
            return str(planned.graph)
        if not planned.plan.is_one_program:
            return self._text_of_stages(slot, planned)
        given = self._given.get((planned.plan.mesh, slot), self._given.get((None, slot)))
        return str(given)

    def _text_of_stages(self, slot: str, planned: Planned) -> str:
        made, placed = planned.programs, planned.programs.placed
        if slot == "layer":  # as they were before those of a stage were merged
            merged = placed.stages.layers
            found = (s for s in reversed(self._layers) if s.graph is merged.graph)
            return str(next(found, merged))
        if slot == "shard":
            return "\n".join(f"mesh{k}: {plan}" for k, plan in enumerate(made.shardings))
        return str({"batch": placed.batching, "stage": placed.stages, "lower": made.program}[slot])

    def _after(self, slot: str, given: object, made: object, seconds: float) -> None:
        if slot == "mesh":
            self._progress.update(self._task, description=f"planning: mesh {given} tried")
        if slot not in _SLOTS:
            return  # a part of a slot, or what came before them
        if slot == _SLOTS[0]:
            self._mesh = None
        if isinstance(made, StagePlan):
            self._mesh = made.submeshes[0].mesh
        if isinstance(made, LayerSequence):
            self._layers.append(made)
        self._given.setdefault((self._mesh, slot), made)  # one program is tried before stages
        if isinstance(made, ShardingPlan) and self._mesh is not None:  # of a whole step
            self._told(made, seconds)
        done = _SLOTS.index(slot)
        following = _SLOTS[(done + 1) % len(_SLOTS)]
        where = f" on ({self._mesh})" if self._mesh is not None else ""
        self._progress.update(self._task, description=f"planning{where}: {following}")

    def _told(self, made: ShardingPlan, seconds: float) -> None:
        if self._progress.console.is_terminal:
            took, costs = show_seconds(seconds), show_seconds(made.outcome.seconds)
            line = f"mesh ({made.mesh}): {costs} a step, found in {took}"
            self._progress.console.print(line, style="bright_black")


@contextmanager
def watched_planning(console: Console) -> Generator[Trail]:
    """A spinner on the console while a plan is made; it vanishes when the plan is there."""
    shown = console.is_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        yield Trail(progress)
