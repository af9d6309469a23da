"""What libtpu's own estimates of a program's kernels add up to, from its optimized HLO text.

After code generation most instructions carry `estimated_cycles`. Those of matmuls, and of what is
fused into them, are good to 15 %. Those of other kernels are 2.5 to 4.5 times the time that their
bytes take, so such a kernel is given the smaller of the two. Collectives carry none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost.hlo_text import CALLS, Computation, Instruction, Module, read_module
from autopar.cost.hlo_trips import trip_count
from autopar.errors import ClusterError

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**60  # and above: what some TPU7x ops hold
# MHz, as the schedules that libtpu dumps have it.
_CLOCKS = {"v4": 1050, "v5e": 1500, "v5p": 1750, "v6e": 1750, "tpu7x": 1900}


@dataclass(frozen=True)
class KernelTime:
    """Seconds of a step's kernels on one device, loops by their trips.

    `matmul_seconds` are matmuls with what is fused into them, `other_seconds` all other kernels.
    `unpriced` are kernels of the user's own (Pallas), of which the compiler says nothing.
    """

    matmul_seconds: float
    other_seconds: float
    unpriced: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """All kernels one after the other; collectives are left out."""
        return self.matmul_seconds + self.other_seconds


def clock_of(chip: str) -> float:
    """Cycles a second of a TPU chip of the catalog; raises ClusterError for any other."""
    if chip not in _CLOCKS:
        raise ClusterError(f"no clock of {chip!r} is known; those of {', '.join(_CLOCKS)} are")
    return _CLOCKS[chip] * 1e6


def read_cycles(
    hlo_text: str, cycles_per_second: float, bytes_per_second: float
) -> KernelTime | None:
    """The time of the kernels of `compiled.as_text()`; None where no kernel has an estimate.

    `bytes_per_second` is what streaming reaches on one device. Of a conditional's branches the one
    that takes longest counts.
    """
    if not _CYCLES.search(hlo_text):
        return None
    module = read_module(hlo_text)
    walk = _Walk(module, cycles_per_second, bytes_per_second)
    return walk.through(module.computations[module.entry])


@dataclass(frozen=True)
class _Walk:
    module: Module
    cycles_per_second: float
    bytes_per_second: float

    def through(self, computation: Computation) -> KernelTime:
        """One run of a computation with all that it calls."""
        return _sum(self._of(i, computation) for i in computation.instructions)

    def _of(self, instruction: Instruction, around: Computation) -> KernelTime:
        if instruction.opcode == "while":
            trips = trip_count(instruction, around, self.module)
            return _times(self._called(instruction, "body"), trips)
        if instruction.opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [self._through(name) for name in instruction.called(*keys)]
            return max(branches, key=lambda b: b.seconds, default=KernelTime(0.0, 0.0))
        if instruction.opcode in ("call", "async-start"):
            return self._called(instruction, *CALLS)
        return self._kernel(instruction, around)

    def _called(self, instruction: Instruction, *keys: str) -> KernelTime:
        return _sum(self._through(name) for name in instruction.called(*keys))

    def _through(self, name: str) -> KernelTime:
        found = self.module.computations.get(name)
        return self.through(found) if found else KernelTime(0.0, 0.0)

    def _kernel(self, instruction: Instruction, around: Computation) -> KernelTime:
        backend = instruction.attributes.get("backend_config", "")
        found = _CYCLES.search(backend)
        if found is None or int(found.group(1)) >= _NO_ESTIMATE:
            is_own = "tpu_custom_call" in instruction.attributes.get("custom_call_target", "")
            return KernelTime(0.0, 0.0, (instruction.name,) if is_own else ())
        seconds = int(found.group(1)) / self.cycles_per_second
        if _is_matmul(instruction, backend):
            return KernelTime(seconds, 0.0)
        streaming = _nbytes(instruction, around) / self.bytes_per_second
        return KernelTime(0.0, min(seconds, streaming))


def _is_matmul(instruction: Instruction, backend: str) -> bool:
    """Whether it is a matmul or convolution, alone or with others fused into its output."""
    return (
        instruction.opcode in ("convolution", "dot")
        or instruction.attributes.get("kind") == "kOutput"
        or "COST_MODEL_TYPE_CLASSIC" in backend
    )


def _nbytes(instruction: Instruction, around: Computation) -> int:
    """Bytes read and written, wherever they lie: what is in VMEM was fetched for this use."""
    read = (around.by_name[o].leaves for o in instruction.operands if o in around.by_name)
    return sum(leaf.nbytes for leaves in (instruction.leaves, *read) for leaf in leaves)


def _sum(times: Iterator[KernelTime]) -> KernelTime:
    matmul, other, unpriced = 0.0, 0.0, list[str]()
    for time in times:
        matmul += time.matmul_seconds
        other += time.other_seconds
        unpriced += time.unpriced
    return KernelTime(matmul, other, tuple(unpriced))


def _times(time: KernelTime, runs: int) -> KernelTime:
    return KernelTime(time.matmul_seconds * runs, time.other_seconds * runs, time.unpriced)
