"""Findings about a step: what can be sharded and cut up, and what stands in the way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """The weight of a finding."""

    ERROR = "error"  # there will be no plan
    WARNING = "warning"  # the plan will be worse than it needs to be
    NOTE = "note"  # good to know


class Topic(Enum):
    """The topic of a finding; `--json` has these names."""

    NO_RULE = "no rule"  # a primitive that nothing can shard
    INDIVISIBLE = "indivisible dim"  # a dim that no axis of the cluster divides
    GATHER = "gather"  # an op that must have a dim whole, or moves it between devices
    BATCH = "microbatches"  # the rows of the batch cannot be told, or not be taken apart
    BARRIER = "barrier"  # all forwards must come before all backwards
    STATE = "state"  # what should come back does not, or not as it came
    CONSTANT = "constant"  # a large array that the step closes over
    DTYPE = "dtype"  # double precision, or types that change from step to step
    MEMORY = "memory"  # more than all devices together can hold


@dataclass(frozen=True)
class Finding:
    """A thing found: where it is and what to do.

    `line` is the user's file:line, "" for what has none, such as an argument. `count` ops or
    arguments are meant, `nbytes` what they read in a step over all devices, or hold.
    """

    severity: Severity
    topic: Topic
    text: str
    remedy: str
    line: str = ""
    count: int = 1
    nbytes: int = 0

    def __str__(self) -> str:
        where = f"{self.line}: " if self.line else ""
        return f"{where}{self.severity.value}: {self.text} {self.remedy}".rstrip()


@dataclass(frozen=True)
class Coverage:
    """The share of a step's work in ops that can be sharded: FLOPs, and bytes read and made."""

    flops: int
    covered_flops: int
    nbytes: int
    covered_bytes: int

    @property
    def flops_share(self) -> float:
        """The covered share of all FLOPs."""
        return self.covered_flops / self.flops if self.flops else 1.0

    @property
    def bytes_share(self) -> float:
        """The covered share of all bytes."""
        return self.covered_bytes / self.nbytes if self.nbytes else 1.0


@dataclass(frozen=True)
class BatchReading:
    """The microbatches that make up the step exactly, if there are any.

    With `loops` passes over the microbatches the step comes out exactly; 0: not at all. `hoisted`
    counts the sums that are taken of the whole batch first; `rescaled` says that a scalar of the
    whole batch multiplies sums when they are there. `notes` tell each in a sentence.
    """

    rows: int
    microbatches: int
    loops: int = 0
    hoisted: int = 0
    rescaled: bool = False
    barrier: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """Everything found of a step for a cluster, the gravest first."""

    step: str
    cluster: str
    devices: int
    coverage: Coverage
    batch: BatchReading
    found: tuple[Finding, ...]

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings that matter so much."""
        return tuple(f for f in self.found if f.severity is severity)

    def __str__(self) -> str:
        head = f"{self.step} for {self.cluster}: {len(self.found)} findings"
        return "\n".join([head, *(f"  {finding}" for finding in self.found)])
