"""Cuts one scan over layers into scans over fewer, or into straight code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.frontend.build import module_path
from autopar.frontend.pieces import Operand, Pieces, with_rows
from autopar.frontend.splice import Place
from autopar.frontend.traced import Equation, FlatProgram, Ref, refs

Rename = Callable[[str], str]


class Trips:
    """Writes scans as scans of fewer trips; with `inline` one trip is straight code."""

    def __init__(self, have: Pieces, *, inline: bool) -> None:
        self._have, self._inline = have, inline

    def takes(self, scan: Equation) -> bool:
        """Whether a scan is to be cut: all that it takes and makes slice by slice is."""
        slices = refs(scan.operands[_first_slice(scan) :])
        stacked = [*slices, *scan.results[scan.params["num_carry"] :]]
        return bool(stacked) and all(map(self._have.is_cut, stacked))

    def cut(self, scan: Equation) -> None:
        """Write one scan for each piece, in the order of the layers or back."""
        place = Place.beside(scan, self._have.fresh)
        consts, first = scan.params["num_consts"], _first_slice(scan)
        stacked = [*refs(scan.operands[first:]), *scan.results[first - consts :]]
        bounds = self._have.bounds[stacked[0]]
        fixed = tuple(self._have.whole(o, place, scan) for o in scan.operands[:consts])
        carry = tuple(self._have.whole(o, place, scan) for o in scan.operands[consts:first])
        slices = [self._have.cut(o, bounds, place) for o in scan.operands[first:]]
        order = list(range(len(bounds) - 1))
        made: dict[int, tuple[Operand, ...]] = {}
        for k in reversed(order) if scan.params["reverse"] else order:
            start, stop = bounds[k : k + 2]
            shared = replace(scan, operands=(*fixed, *carry, *(s[k] for s in slices)))
            rename = partial(_in_layers, scan, _scope_of(scan), start, stop)
            if self._inline and stop - start == 1:
                out = self._straight(shared, rename)
            else:
                out = self._shorter(shared, stop - start, rename)
            carry, made[k] = out[: first - consts], out[first - consts :]
        for result, last in zip(scan.results, carry, strict=False):
            self._have.name(result, last)
        for i, result in enumerate(scan.results[first - consts :]):
            self._have.split(result, [made[k][i] for k in order])

    def _shorter(self, scan: Equation, trips: int, rename: Rename) -> tuple[Operand, ...]:
        """The scan of so many trips; its results."""
        carries, first = scan.params["num_carry"], _first_slice(scan)
        results = self._have.number(scan.results)
        shapes = scan.operand_shapes
        self._have.written.append(
            replace(
                scan,
                params=scan.params | {"length": trips, "unroll": min(scan.params["unroll"], trips)},
                operand_shapes=(*shapes[:first], *((trips, *s[1:]) for s in shapes[first:])),
                results=results,
                result_avals=(
                    *scan.result_avals[:carries],
                    *(with_rows(a, trips) for a in scan.result_avals[carries:]),
                ),
                bodies=(self._copied(scan.bodies[0], rename),),
                name_stack=rename(scan.name_stack),
            )
        )
        return results

    def _straight(self, scan: Equation, rename: Rename) -> tuple[Operand, ...]:
        """The only trip of the scan as straight code; its results, stacked ones with their dim."""
        place = replace(Place.beside(scan, self._have.fresh), name_stack=rename(scan.name_stack))
        body, first = scan.bodies[0], _first_slice(scan)
        rows = zip(scan.operands[first:], body.input_avals[first:], strict=True)
        given = [*scan.operands[:first], *(self._have.row(o, a, place) for o, a in rows)]
        names = dict(zip(body.inputs, given, strict=True))
        for equation in body.equations:
            self._have.written.append(self._copy(equation, names, rename))
        outputs = [names[o] if isinstance(o, int) else o for o in body.outputs]
        carries = scan.params["num_carry"]
        stacked = zip(outputs[carries:], scan.result_avals[carries:], strict=True)
        return (
            *outputs[:carries],
            *(self._have.stacked(o, a.update(shape=a.shape[1:]), place) for o, a in stacked),
        )

    def _copied(self, program: FlatProgram, rename: Rename) -> FlatProgram:
        """A program with all its values under new numbers."""
        inputs = self._have.copied(program.inputs)
        names: dict[Ref, Operand] = dict(zip(program.inputs, inputs, strict=True))
        equations = tuple(self._copy(e, names, rename) for e in program.equations)
        return FlatProgram(inputs, program.input_avals, equations, _read(program.outputs, names))

    def _copy(self, equation: Equation, names: dict[Ref, Operand], rename: Rename) -> Equation:
        """An equation that reads under `names`, to which it adds what it makes."""
        results = self._have.copied(equation.results)
        copy = replace(
            equation,
            operands=_read(equation.operands, names),
            results=results,
            bodies=tuple(self._copied(b, rename) for b in equation.bodies),
            name_stack=rename(equation.name_stack),
        )
        names.update(zip(equation.results, results, strict=True))
        return copy


def _read(operands: Sequence[Operand], names: Mapping[Ref, Operand]) -> tuple[Operand, ...]:
    return tuple(names[o] if isinstance(o, int) else o for o in operands)


def _first_slice(scan: Equation) -> int:
    return int(scan.params["num_consts"] + scan.params["num_carry"])


# -- names -------------------------------------------------------------------------------------


def _scope_of(scan: Equation) -> str:
    """The module that all of a scan's body is in, as the forward pass names it; else "scan"."""
    steps = {_steps(scan, e.name_stack)[1].split("/")[0] for e in scan.bodies[0].equations}
    inner = {s for s in steps if s}
    return inner.pop() if len(inner) == 1 else "scan"


def _steps(scan: Equation, stack: str) -> tuple[str, str]:
    """What JAX adds to a scan's name stack in its body, and what the user's modules do."""
    rest = stack[len(scan.name_stack) :].strip("/").split("/")
    own = [r in ("checkpoint", "rematted_computation") for r in rest]
    at = own.index(False) if False in own else len(rest)
    modules = "/".join(rest[at:])
    return "/".join(rest[:at]), modules if module_path(modules) else ""


def _in_layers(scan: Equation, scope: str, start: int, stop: int, stack: str) -> str:
    """The name stack of a piece: the module of the layers with the number of the first of them."""
    added, modules = _steps(scan, stack)
    which = f"{scope}[{start}]" if stop - start == 1 else f"{scope}[{start}:{stop}]"
    rest = (
        modules.removeprefix(scope).strip("/") if f"{modules}/".startswith(f"{scope}/") else modules
    )
    return "/".join(s for s in (scan.name_stack, added, which, rest) if s)
