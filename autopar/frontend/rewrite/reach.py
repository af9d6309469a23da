"""Values of a program that depend on some of its values, into and out of the bodies of loops.

reached {x}     y = f(x)            y
                c, s = scan(y, w)   into the body by y, round by the carry, out as c and s
                z = g(w)            -
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import GraphError
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, refs
from autopar.ir.control_flow import PortKind


def reached_from(program: FlatProgram, values: Iterable[Ref]) -> frozenset[Ref]:
    """The values, bodies included, that are made of any of these, and these themselves."""
    found = set(values)
    _spread(program, found)
    return frozenset(found)


def _spread(program: FlatProgram, found: set[Ref]) -> None:
    for equation in program.equations:
        if equation.bodies:
            _through(equation, found)
        elif not found.isdisjoint(refs(equation.operands)):
            found.update(equation.results)


def _through(loop: Equation, found: set[Ref]) -> None:
    """Into the bodies and out again, until no trip adds anything."""
    flow = loop.control_flow
    if flow is None:
        raise GraphError(f"{loop.primitive.name} has bodies that are not understood")
    # The set only grows, and a trip that adds nothing is the last.
    before = -1
    while before < len(found):
        before = len(found)
        for b, body in enumerate(loop.bodies):
            for port, inner in zip(flow.inputs[b], body.inputs, strict=True):
                if port.operand is not None:
                    _pass(loop.operands[port.operand], inner, found)
            _spread(body, found)
            for port, left in zip(flow.outputs[b], body.outputs, strict=True):
                # To the results and to the next trip; of a while's test, to all that it makes.
                if port.kind is PortKind.TEST and _is_in(left, found):
                    found.update(loop.results)
                if port.result is not None:
                    _pass(left, loop.results[port.result], found)
                for to, i in port.inputs:
                    _pass(left, loop.bodies[to].inputs[i], found)
        # A loop that never runs gives back its carries as they are. All that a cond makes depends
        # on what chooses its branch.
        for port, given in zip(flow.operands, loop.operands, strict=True):
            if port.result is not None:
                _pass(given, loop.results[port.result], found)
            if port.kind is PortKind.CHOICE and _is_in(given, found):
                found.update(loop.results)


def _pass(given: Ref | Const, inner: Ref, found: set[Ref]) -> None:
    if _is_in(given, found):
        found.add(inner)


def _is_in(given: Ref | Const, found: set[Ref]) -> bool:
    return isinstance(given, int) and given in found
