"""Cuts scans over layers, so that stages can take their shares of the layers.

A scan becomes several that hand on the carry, a backward one in reverse order, and every stack of
layers several stacks: parameters, moments, gradients, and what the forward scan leaves for the
backward one. What mixes the layers reads the stacks joined again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.errors import ArgumentError
from autopar.frontend.build import build
from autopar.frontend.cutter import Cutter
from autopar.frontend.inline import live
from autopar.frontend.layer_scans import LayerScan, all_values, layer_scans
from autopar.frontend.microbatch import MicrobatchTrace
from autopar.frontend.pieces import Bounds
from autopar.frontend.traced import FlatProgram, Piece, Ref, TracedStep


@dataclass(frozen=True)
class Cuts:
    """Where the layers of each of a step's `layer_scans` are cut: before these, in rising order.

    A scan without cuts stays whole. With `inline` a single layer becomes straight code.
    """

    layers: tuple[tuple[int, ...], ...]
    inline: bool = True

    @classmethod
    def everywhere(cls, scans: Sequence[LayerScan], *, inline: bool = True) -> Cuts:
        """Each layer by itself."""
        return cls(tuple(tuple(range(1, s.length)) for s in scans), inline)


def cut_scans(traced: TracedStep, cuts: Cuts) -> TracedStep:
    """The step with its scans over layers cut; it computes the same.

    `input_pieces` and `output_pieces` of the result tell which rows of which leaf its inputs and
    outputs are; `notes` name what had to be joined again. The key stays that of the step as it
    was traced. Raises ArgumentError for cuts that are not between the layers of the step.
    """
    return _cut(traced, layer_scans(traced), cuts, next(traced.program.fresh()))[0]


def cut_microbatch(trace: MicrobatchTrace, cuts: Cuts) -> MicrobatchTrace:
    """Both traces of a step cut at the same layers; raises what `cut_scans` raises.

    Values that JAX makes with rows of the batch in dim 0 are made whole.
    """
    scans = layer_scans(trace.whole)
    rows = {int(name.removeprefix("%")): rows for name, rows in trace.sources}
    kept = frozenset(ref for ref, own in rows.items() if own.dim == 0)
    first = max(next(t.program.fresh()) for t in (trace.whole, trace.part))
    whole, _ = _cut(trace.whole, scans, cuts, first, kept)
    part, now = _cut(trace.part, scans, cuts, first, kept)
    sources = tuple((f"%{r}", own) for ref, own in rows.items() for r in now(ref))
    return replace(trace, whole=whole, part=part, sources=sources)


def _check(traced: TracedStep, scans: Sequence[LayerScan], cuts: Cuts) -> None:
    lengths = [s.length for s in scans]
    if len(cuts.layers) != len(scans):
        raise ArgumentError(
            f"{traced.name} has {len(scans)} scans over layers (of {lengths} layers), but cuts are "
            f"given for {len(cuts.layers)}. Give a tuple for each, () to leave it whole."
        )
    for layers, scan in zip(cuts.layers, scans, strict=True):
        if any(a >= b for a, b in pairwise((0, *layers, scan.length))):
            raise ArgumentError(
                f"{layers} are no cuts between the {scan.length} layers that {traced.name} scans: "
                f"give rising numbers from 1 to {scan.length - 1}."
            )


def _bounds(
    traced: TracedStep, scans: Sequence[LayerScan], cuts: Cuts
) -> Iterator[tuple[Ref, Bounds]]:
    """Where dim 0 of every value of the cut scans is cut, from 0 to its size."""
    avals = dict(all_values(traced.program))
    for scan, layers in zip(scans, cuts.layers, strict=True):
        for ref in sorted(scan.values) if layers else ():
            rows, rest = divmod(avals[ref].shape[0], scan.length)
            if rows and not rest:
                yield ref, tuple(rows * layer for layer in (0, *layers, scan.length))


def _cut(
    traced: TracedStep,
    scans: Sequence[LayerScan],
    cuts: Cuts,
    first: Ref,
    kept: frozenset[Ref] = frozenset(),
) -> tuple[TracedStep, Callable[[Ref], list[Ref]]]:
    """The step cut but for the values `kept`, and what stands for a value of the old one.

    New values are numbered from `first` on.
    """
    _check(traced, scans, cuts)
    bounds = {r: b for r, b in _bounds(traced, scans, cuts) if r not in kept}
    if not bounds:
        return traced, lambda ref: [ref]
    program = traced.program
    cutter = Cutter(program, bounds, first, inline=cuts.inline)
    stacked = bounds.keys() & {program.inputs[i] for s in scans for i in s.inputs}
    given = [ref in stacked for ref in program.inputs]
    returned = [bounds.get(o) if isinstance(o, int) else None for o in program.outputs]
    cut = cutter.program(program, given, returned)
    cut = replace(cut, equations=live(cut.equations, cut.outputs))
    inputs = [bounds[r] if g else None for r, g in zip(program.inputs, given, strict=True)]
    return _resealed(traced, cut, inputs, returned, cutter.notes), cutter.now


def _resealed(
    traced: TracedStep,
    program: FlatProgram,
    given: Sequence[Bounds | None],
    returned: Sequence[Bounds | None],
    notes: tuple[str, ...],
) -> TracedStep:
    """The step of a cut program: paths, state and pairs for every piece."""
    inputs, outputs = list(_pieces(given)), list(_pieces(returned))
    where = {(p.leaf, p.start): i for i, p in enumerate(inputs)}
    targets = dict(traced.donated)
    pairs = tuple(
        (o, where[targets[p.leaf], p.start]) for o, p in enumerate(outputs) if p.leaf in targets
    )
    state = frozenset(traced.state_inputs)
    again = replace(
        traced,
        program=program,
        input_paths=tuple(_path(traced.input_paths[p.leaf], p) for p in inputs),
        output_paths=tuple(_path(traced.output_paths[p.leaf], p) for p in outputs),
        state_inputs=tuple(i for i, p in enumerate(inputs) if p.leaf in state),
        donated=pairs,
        input_pieces=tuple(inputs),
        output_pieces=tuple(outputs),
        notes=(*traced.notes, *notes),
    )
    return replace(again, graph=build(again))


def _pieces(leaves: Sequence[Bounds | None]) -> Iterator[Piece]:
    for leaf, bounds in enumerate(leaves):
        if bounds is None:
            yield Piece(leaf)
        else:
            yield from (Piece(leaf, start, stop) for start, stop in pairwise(bounds))


def _path(path: str, piece: Piece) -> str:
    return path if piece.stop is None else f"{path}[{piece.start}:{piece.stop}]"
