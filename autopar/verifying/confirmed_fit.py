"""Confirms with a compiler that a plan fits: what does not is planned again within less.

A prediction of memory may be some percent off; what counts is what the compiler lays out.

    within      the plan holds   the compiler holds
    80.0 GiB    79.1 GiB         83.1 GiB   too much: again within 80.0 * 79.1 / 83.1
    76.1 GiB    75.8 GiB         78.9 GiB   fits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from autopar.errors import InfeasibleError, MemoryLimitError, VerifyError
from autopar.ir.codec import Json
from autopar.ir.plan import Plan
from autopar.ir.text import columns, show_bytes, show_seconds
from autopar.ir.verification import Verification
from autopar.planner.planned import Planned
from autopar.verifying.shrink import Called
from autopar.verifying.verify import Inquiry, verify_planned

_MOST_TRIES = 4  # plans that were compiled, and limits within which there is none


@dataclass(frozen=True)
class Trial:
    """A plan within a limit: bytes that a device holds by the plan and by the compiler."""

    limit_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    seconds: float

    @classmethod
    def of(cls, planned: Planned, found: Verification) -> Trial:
        """The trial of a plan.

        Parts of stages are compiled alone, and a device holds more than one of them needs: what
        counts is by how much the worst of them holds more than it was planned to.
        """
        predicted = planned.plan.prediction
        peaks = [f for part in found.parts for f in part.figures if f.name == "peak"]
        more = max(round(f.compiled - f.predicted) for f in peaks)
        return cls(
            planned.request.budget_bytes,
            predicted.peak_bytes,
            predicted.peak_bytes + more,
            predicted.seconds,
        )


@dataclass(frozen=True)
class ConfirmedFit:
    """A plan that its cluster's compiler lays out within the limit, and the trials up to it."""

    planned: Planned
    verification: Verification
    trials: tuple[Trial, ...]

    @property
    def plan(self) -> Plan:
        """The plan that fits."""
        return self.planned.plan

    def __str__(self) -> str:
        told = [("within", "planned", "compiled", "step")]
        for t in self.trials:
            planned, compiled = show_bytes(t.predicted_bytes), show_bytes(t.compiled_bytes)
            told.append((show_bytes(t.limit_bytes), planned, compiled, show_seconds(t.seconds)))
        return "\n".join(columns(told))

    def rows(self) -> list[dict[str, Json]]:
        """The trials as rows of data, in their order."""
        return [asdict(t) for t in self.trials]


def confirm_fit(
    planned: Planned, inquiry: Inquiry, called: Called, plan_within: Callable[[int], Planned]
) -> ConfirmedFit:
    """Ask the compiler about a plan, and about others within less, until one fits its limit.

    `plan_within` plans the same step within so many bytes a device. Raises MemoryLimitError where
    none is found, and VerifyError where the compiler is not installed, gives no answer, or does not
    tell memory, as that for CPUs.
    """
    cluster = planned.request.cluster
    if cluster.chip.platform == "cpu":
        raise VerifyError(
            f"whether a plan fits {cluster.name} cannot be confirmed: XLA for CPUs fuses less and "
            "widens narrow floats, so its peak tells nothing of other devices, and CPU devices "
            "share one memory. Plan for GPUs or TPUs."
        )
    budget = planned.request.budget_bytes
    trials: list[Trial] = []
    refusals: list[str] = []
    while True:
        found = verify_planned(planned, called, inquiry)
        trial = Trial.of(planned, found)
        trials.append(trial)
        if trial.compiled_bytes <= budget:
            return ConfirmedFit(planned, found, tuple(trials))
        # If the compiler holds as many times more of the next plan as of this one, it just fits.
        # Where there is none within so little, one that lies between may do as well.
        limit = budget * trial.predicted_bytes // trial.compiled_bytes
        while True:
            if len(trials) + len(refusals) >= _MOST_TRIES:
                raise _refused(budget, trials, refusals)
            try:
                planned = plan_within(limit)
                break
            except InfeasibleError as error:
                refusals.append(f"Within {show_bytes(limit)}: {str(error).splitlines()[0]}")
                limit = (limit + trial.predicted_bytes) // 2


def _refused(budget: int, trials: list[Trial], refusals: list[str]) -> MemoryLimitError:
    lines = [f"no plan was found that the compiler lays out within {show_bytes(budget)} a device:"]
    for t in trials:
        lines.append(
            f"  planned within {show_bytes(t.limit_bytes)}, a step should hold "
            f"{show_bytes(t.predicted_bytes)}, and compiled it holds {show_bytes(t.compiled_bytes)}"
        )
    advice = "A smaller batch, microbatches or more devices hold less on each."
    return MemoryLimitError("\n".join([*lines, *refusals, advice]))
