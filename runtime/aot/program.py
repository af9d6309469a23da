"""The folder in which a program goes to a compiler in another process and its answer comes back."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax import export

from autopar.cluster import Cluster, device_order
from autopar.cluster.catalog import chip_named
from autopar.cluster.target import Target, target_within
from autopar.errors import VerifyError
from autopar.hlo.clock import CompilerTimeline, clock_of, read_cycles, read_timeline
from autopar.hlo.collectives import compiled_collectives
from autopar.ir.codec import Codec, Item, format_json, parse_json
from autopar.ir.compiled import Compiled
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Submesh
from autopar.ir.text import show_bytes
from autopar.runtime.aot.extras import check_extras, compiler_of
from autopar.runtime.aot.gpu_specs import gpu_spec
from autopar.runtime.parts import PartSource
from autopar.runtime.parts import abstract_mesh as abstract_mesh
from autopar.runtime.spmd_program import SpmdSource

TICKING = "ticking"  # the folder of the same program with a collective in each loop
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
    ticking = folder / TICKING
    is_gpu = program.target.platform == "gpu"
    # A layout of a TPU has tiles, which the dump writes as if they were dims: no bytes are read.
    chip = chip_named(program.target.chip) if is_gpu else None
    timeline = read_timeline(
        _dumped(ticking if ticking.is_dir() else folder, "*.schedule.txt"),
        chip.memory_bytes_per_second if chip else math.inf,
    )
    if is_gpu:
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


# What of a program is written beside it.
_KNOWN: dict[str, Any] = {
    "mesh": MeshShape, "order": tuple[int, ...], "donated": tuple[int, ...], "target": Target,
    "options": CompilerOptions, "ticks": bool,
}  # fmt: skip
_EXPORTED = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


@dataclass(frozen=True)
class AotProgram:
    """A program, as JAX exports it, with the mesh it is for and what it is compiled to.

    Position i of the mesh (row-major) is device `order[i]` of the target, by our numbers;
    `donated` are flat arguments whose buffers the outputs may take. The compiler gets `options`.
    With `ticks` each loop is given a collective, for the sake of its time (`ticks.py`).
    """

    exported: bytes
    mesh: MeshShape
    order: tuple[int, ...]
    donated: tuple[int, ...]
    target: Target
    options: CompilerOptions = ()
    ticks: bool = False

    def write(self, folder: Path) -> None:
        """The program and all that is known of it."""
        (folder / "program.bin").write_bytes(self.exported)
        known = {n: Codec().write(hint, getattr(self, n)) for n, hint in _KNOWN.items()}
        (folder / "program.json").write_text(format_json(known))

    @classmethod
    def read(cls, folder: Path) -> AotProgram:
        """The program that was written to a folder."""
        known = Item(parse_json((folder / "program.json").read_text())).fields()
        given = {n: Codec().read(hint, known[n]) for n, hint in _KNOWN.items()}
        return cls((folder / "program.bin").read_bytes(), **given)


def export_jitted(
    jitted: Any,
    args: tuple[Any, ...],
    mesh: MeshShape,
    order: tuple[int, ...],
    donated: tuple[int, ...],
    target: Target,
    options: CompilerOptions = (),
) -> AotProgram:
    """The export of any jitted function whose shardings are over `abstract_mesh(mesh)`.

    `args` are shapes, with shardings where the function has none of its own; `donated` counts
    flat arguments. Raises VerifyError where the target's compiler is not installed or JAX cannot
    export the function, ClusterError where the compiler does not know the chip.
    """
    if target.platform != "cpu":
        check_extras(target.platform)
    if target.platform == "gpu":
        gpu_spec(target.chip)
    try:
        exported = export.export(jitted, platforms=[_EXPORTED[target.platform]])(*args)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise VerifyError(
            f"JAX cannot hand the program to the compiler of {target}: {error}. What calls back to "
            "this host (jax.debug.print, callbacks) or asks its libraries (cuDNN attention) must "
            "be left out to compile for hardware that is not here."
        ) from error
    return AotProgram(bytes(exported.serialize()), mesh, order, donated, target, options)


def export_part(source: PartSource, submeshes: Sequence[Submesh], cluster: Cluster) -> AotProgram:
    """The export of a part: the very program that an executor would run.

    It is for the block of the cluster that the part's submesh is, as one by itself. Raises what
    `export_jitted` raises.
    """
    submesh = submeshes[source.program.part.submesh]
    devices = submesh.devices or device_order(cluster, submesh.mesh)
    target, order = target_within(cluster, devices)
    mesh = abstract_mesh(source.mesh)
    given = tuple(t.on(mesh) for t in source.given)
    return export_jitted(
        source.jitted(mesh), given, source.mesh, order, source.donated, target, source.options
    )


def export_spmd(
    source: SpmdSource,
    kept: Collection[tuple[int, int]],
    submeshes: Sequence[Submesh],
    cluster: Cluster,
) -> AotProgram:
    """The export of all stages as one program, for their blocks of the cluster.

    Raises what `export_jitted` raises.
    """
    target, order = target_within(cluster, [d for s in submeshes for d in s.devices])
    mesh, donated = abstract_mesh(source.mesh), source.donated(kept)
    given = tuple(source.given(mesh))
    options = source.sources[0].options
    return export_jitted(
        source.jitted(mesh, donated), given, source.mesh, order, donated, target, options
    )
