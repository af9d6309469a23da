"""The answer that a compiler leaves in a program's folder, read and written."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster.catalog import chip_named
from autopar.errors import VerifyError
from autopar.hlo.clock import CompilerTimeline, clock_of, read_cycles, read_timeline
from autopar.hlo.collectives import compiled_collectives
from autopar.ir.codec import Codec, Item, format_json, parse_json
from autopar.ir.compiled import Compiled
from autopar.ir.text import show_bytes
from autopar.runtime.aot.extras import compiler_of
from autopar.runtime.aot.program import AotProgram

_DUMPED_HLO = ("*after_optimizations_after_buffer_assignment.txt", "*gpu_after_optimizations.txt")
_REPORT = "*memory-usage-report.txt"
_TOTAL = re.compile(r"^Memory Space: default .*\nTotal bytes: (\d+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^allocation \d+: size (\d+), parameter", re.MULTILINE)
_OVERFLOW = re.compile(
    r"(Ran out of memory[^\n]*?\(([\d.]+)([KMGT]?)\) exceeds available HBM \([\d.]+[KMGT]?\))"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class _Answer:
    """The figures that the compiling process leaves; `out_of_memory` is its complaint, or ""."""

    argument_bytes: int
    peak_bytes: int
    has_code: bool
    out_of_memory: str


# -- what the compiling process writes ----------------------------------------------------------


def write_answer(folder: Path, has_code: bool = True) -> None:
    """Figures of a program that was compiled, or was about to be turned into code."""
    total = _TOTAL.search(_dumped(folder, _REPORT))
    if total is None:
        raise VerifyError(f"the compiler's memory report has no total: {folder}")
    arguments = _ARGUMENT.findall(_dumped(folder, "*buffer-assignment.txt"))
    _write(folder, sum(map(int, arguments)), int(total.group(1)), has_code)


def write_overflow(folder: Path, said: str, argument_bytes: int) -> None:
    """The answer of a program that does not fit; raises VerifyError for any other complaint."""
    found = _OVERFLOW.search(said)
    if found is None:
        raise VerifyError(said)
    needed = float(found.group(2)) * _UNITS[found.group(3)]
    _write(folder, argument_bytes, int(needed), False, f"{found.group(1)}.")


def _write(
    folder: Path, argument_bytes: int, peak_bytes: int, has_code: bool, overflow: str = ""
) -> None:
    answer = _Answer(argument_bytes, peak_bytes, has_code, overflow)
    (folder / "answer.json").write_text(format_json(Codec().write(_Answer, answer)))


def is_scheduled(folder: Path) -> bool:
    """True if all is written that is known before code generation: the program and its buffers.

    The entry comes last in a program's text, and nothing in it stands at the start of a line.
    """
    program = _dumped(folder, *_DUMPED_HLO)
    if "\nENTRY " not in program or not program.rstrip().endswith("\n}"):
        return False
    return _TOTAL.search(_dumped(folder, _REPORT)) is not None


def take_schedule(folder: Path) -> None:
    """Make an answer of what a process wrote that was stopped before code generation."""
    (folder / "hlo.txt").write_text(_dumped(folder, *_DUMPED_HLO))
    write_answer(folder, has_code=False)


def _dumped(folder: Path, *patterns: str) -> str:
    """The text of the first file that the compiler dumped under such a name, "" without one."""
    found = (path for p in patterns for path in sorted((folder / "dump").glob(p)))
    path = next(found, None)
    return path.read_text(errors="replace") if path else ""


# -- what is made of it -------------------------------------------------------------------------


def read_answer(program: AotProgram, folder: Path) -> Compiled:
    """The figures that the compiler left in a program's folder."""
    answer = Codec().read(_Answer, Item(parse_json((folder / "answer.json").read_text())))
    path = folder / "hlo.txt"
    text = path.read_text() if path.exists() else ""
    compiled = Compiled(
        target=str(program.target),
        compiler=compiler_of(program.target.platform),
        argument_bytes=answer.argument_bytes,
        peak_bytes=answer.peak_bytes,
        collectives=compiled_collectives(text, program.mesh, program.order) if text else (),
        out_of_memory=answer.out_of_memory,
        memory_bytes=program.target.memory_bytes,
        hlo=text,
    )
    timeline = read_timeline(_dumped(folder, "*.schedule.txt"))
    if program.target.platform == "gpu":
        return _timed_gpu(compiled, timeline)
    # The timeline of a TPU's kernels is from before they were tiled: only its spans are kept.
    compiled = replace(compiled, spans=timeline.spans if timeline else ())
    return _timed_tpu(compiled, program.target.chip) if answer.has_code else compiled


def _timed_gpu(compiled: Compiled, timeline: CompilerTimeline | None) -> Compiled:
    if 0 < compiled.memory_bytes < compiled.peak_bytes:
        compiled = replace(
            compiled,
            out_of_memory=f"The program needs {show_bytes(compiled.peak_bytes)} of memory, and "
            f"{show_bytes(compiled.memory_bytes)} of a device can be used.",
        )
    if timeline is None:
        return compiled
    is_whole = not timeline.untimed
    return replace(
        compiled,
        seconds=timeline.seconds if is_whole else None,
        exposed_seconds=timeline.exposed_seconds if is_whole else None,
        spans=timeline.spans,
        untimed=timeline.untimed,
    )


def _timed_tpu(compiled: Compiled, name: str) -> Compiled:
    chip = chip_named(name)
    assert chip is not None
    streaming = chip.memory_efficiency * chip.memory_bytes_per_second
    kernels = read_cycles(compiled.hlo, clock_of(name), streaming)
    if kernels is None:
        return compiled
    return replace(compiled, seconds=kernels.seconds, untimed=kernels.unpriced)
