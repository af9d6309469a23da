"""The seconds that a host takes to issue a step: it has to stay ahead of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.ir.folded import FoldedProgram
from autopar.ir.program import Program, Run, Send

# Measured with benchmarks/bench_lowerings.py; what arrays cost is the same on every backend.
INSTRUCTION_SECONDS = 50e-6
_PROGRAM_SECONDS = 300e-6
_PIECE_SECONDS = 8e-6  # an array of a submesh that goes into one program, or comes out of it


def issue_seconds(
    lowered: Program | FoldedProgram, blocks: Sequence[int], cluster: Cluster
) -> float:
    """Seconds that the busiest host takes; `blocks` are the first devices of the submeshes."""
    of_host = max(1, cluster.device_count // cluster.hosts)
    hosts = [first // of_host for first in blocks]
    issued: Counter[int] = Counter()
    if isinstance(lowered, FoldedProgram):
        for held in (*lowered.feeds, *lowered.fetches):
            issued.update(h for h, r in zip(hosts, held.registers, strict=True) if r >= 0)
        return _PROGRAM_SECONDS + _PIECE_SECONDS * max(issued.values(), default=0)
    for step in lowered.instructions:
        if isinstance(step, Run):
            issued[hosts[lowered.submesh_of(step)]] += 1
        elif isinstance(step, Send):
            issued.update({hosts[step.source], hosts[step.target]})
    return INSTRUCTION_SECONDS * max(issued.values(), default=0)
