"""A compiled program, read off its compiler's output: nothing here was predicted by us."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class CheckLevel(Enum):
    """A level of verification; each takes longer than the one before."""

    NUMERICS = "numerics"  # run on virtual CPU devices, beside the plain step
    COLLECTIVES = "collectives"  # compiled for the hardware: what is sent, by kind
    MEMORY = "memory"  # and what a device holds (and, of GPUs, the compiler's timeline)
    FULL = "full"  # code generation as well: of TPUs, the cycles of each kernel


@dataclass(frozen=True)
class CompiledCollective:
    """A collective of a compiled program, `runs` times a step.

    `nbytes` is the whole local buffer of one device and one run, as `ir.listing.Collective` has it.
    `axes` are mesh axes, () where its groups are those of no axes. `op` and `line` are the user's
    module path and file:line as the compiler kept them, "" where it did not.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    runs: int
    op: str = ""
    line: str = ""


@dataclass(frozen=True)
class Span:
    """The span of an instruction by the compiler's timeline: seconds from its computation's start.

    `runs` is how often a step runs the computation. Of an async collective the start and the done
    are two instructions; what lies between them is its time.
    """

    name: str
    opcode: str
    start: float
    end: float
    computation: str
    runs: int

    @property
    def seconds(self) -> float:
        """The length of one run."""
        return self.end - self.start


@dataclass(frozen=True)
class Compiled:
    """A program compiled for hardware that need not exist: figures of one device and one step.

    `peak_bytes` is the memory that the compiler lays out, arguments and gaps included, and
    `memory_bytes` what a device has (0: not known). `out_of_memory` is the sentence that says so
    where the program does not fit; a TPU's program then has no collectives.
    `seconds` is, on GPUs, the makespan of the compiler's own timeline, `exposed_seconds` what of it
    waits for collectives, and `spans` the timeline; on TPUs, at level FULL, it is what the kernels
    take, without collectives. They are None where the compiler says nothing, or nothing of the
    computations in `untimed`. `hlo` is the optimized program.
    """

    target: str
    compiler: str
    argument_bytes: int
    peak_bytes: int
    collectives: tuple[CompiledCollective, ...]
    seconds: float | None = None
    exposed_seconds: float | None = None
    out_of_memory: str = ""
    memory_bytes: int = 0
    untimed: tuple[str, ...] = ()
    spans: tuple[Span, ...] = field(default=(), repr=False)
    hlo: str = field(default="", repr=False)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of all runs of each kind of collective."""
        total = Counter[str]()
        for c in self.collectives:
            total[c.kind] += c.nbytes * c.runs
        return dict(sorted(total.items()))
