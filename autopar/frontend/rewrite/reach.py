"""Values of a program that depend on some of its values, into and out of the bodies of loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, refs

_Operands = Sequence[Ref | Const]


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
    before = -1
    while before < len(found):
        before = len(found)
        for body, given in _entries(loop):
            _pass(given, body.inputs, found)
            _spread(body, found)
        for made, given in _returns(loop):
            _pass(made, given, found)
    if not found.isdisjoint(_deciding(loop)):
        found.update(loop.results)


def _pass(given: _Operands, inner: Sequence[Ref], found: set[Ref]) -> None:
    found.update(r for o, r in zip(given, inner, strict=True) if isinstance(o, int) and o in found)


def _entries(loop: Equation) -> Iterator[tuple[FlatProgram, _Operands]]:
    """Each body with what its inputs are at first."""
    kind, params, operands = loop.primitive.name, loop.params, loop.operands
    if kind == "while":
        tests, rest = params["cond_nconsts"], params["body_nconsts"]
        carry = operands[tests + rest :]
        yield loop.bodies[0], (*operands[:tests], *carry)
        yield loop.bodies[1], (*operands[tests : tests + rest], *carry)
    else:
        yield from ((b, operands[1:] if kind == "cond" else operands) for b in loop.bodies)


def _returns(loop: Equation) -> Iterator[tuple[_Operands, tuple[Ref, ...]]]:
    """The outputs of bodies, with the results of the loop or the inputs of its next trip."""
    kind, params = loop.primitive.name, loop.params
    if kind == "while":
        test, body = loop.bodies
        yield body.outputs, body.inputs[params["body_nconsts"] :]
        yield body.outputs, test.inputs[params["cond_nconsts"] :]
        yield body.outputs, loop.results
        yield loop.operands[params["cond_nconsts"] + params["body_nconsts"] :], loop.results
        return
    yield from ((b.outputs, loop.results) for b in loop.bodies)
    if kind == "scan":
        first, count = params["num_consts"], params["num_carry"]
        body = loop.bodies[0]
        yield body.outputs[:count], body.inputs[first : first + count]
        yield loop.operands[first : first + count], loop.results[:count]


def _deciding(loop: Equation) -> Iterator[Ref]:
    """The value that decides which body runs, or how often."""
    if loop.primitive.name == "while":
        return refs(loop.bodies[0].outputs)
    return refs(loop.operands[:1] if loop.primitive.name == "cond" else ())
