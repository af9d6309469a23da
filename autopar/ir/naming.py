"""Names of ops, values and shardings in everything that is said of a step or a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.graph import Graph, Op
from autopar.ir.sharding import Assignment, MeshShape, Sharding, spec_text

RENAMING = ("convert_element_type", "transpose", "reshape", "squeeze", "copy", "expand_dims")


_REDUCED = {
    "sum": "summed",
    "max": "reduced to the maximum",
    "min": "reduced to the minimum",
    "and": "reduced by and",
    "or": "reduced by or",
}


def spec(sharding: Sharding, combiner: str = "sum") -> str:
    """A sharding as its user writes it, trailing Nones left out: P('data', None, 'model').

    With the reduction that it waits for, if it does.
    """
    if not sharding.partial:
        return spec_text(sharding)
    return f"{spec_text(sharding)} to be {_REDUCED[combiner]} over {over(sharding.partial)}"


def split(op: Op, choice: Assignment, mesh: MeshShape) -> str:
    """An op's cut in words: the shardings that it reads and what comes of them."""
    assert op.rule is not None
    read = [spec(choice.operand_sharding(op.rule, i, mesh)) for i in range(len(op.operands))]
    by = choice.combiner(op.rule)
    made = spec(choice.result_sharding(op.rule, 0, mesh), by) if op.results else ""
    return f"{' x '.join(read)} -> {made}"


def over(axes: Sequence[str]) -> str:
    """Axes in a sentence: data and model."""
    return " and ".join(axes)


def and_more(items: Sequence[str], shown: int) -> str:
    """The first few of a list, and how many there are besides."""
    rest = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {rest} more" if rest > 0 else "")


def place_of(op: Op) -> str:
    """The module and line of an op, as far as they are known: block/mlp model.py:12."""
    return join_words(op.origin.module, op.origin.line)


def full_name(op: Op) -> str:
    """An op as a question names it: dot_general forward block/mlp model.py:12."""
    return join_words(op.kind, op.origin.region, place_of(op))


def join_words(*words: str) -> str:
    """Words with blanks between them, empty ones left out."""
    return " ".join(word for word in words if word)


class Names:
    """Names of a graph's values: an argument's path, or what makes the value."""

    def __init__(self, graph: Graph) -> None:
        self._paths = {i.value.name: i.path or i.value.name for i in graph.inputs}
        self._makers = {r.name: op for op in graph.walk() for r in op.results}
        self._given = dict(_given(graph))

    def of(self, value: str) -> str:
        """The name of a value; one that is an argument in another form is called as that."""
        source: str | None = value
        while source is not None:
            value, op = source, self._makers.get(source)
            source = self._given.get(value)
            if op is not None and op.kind in RENAMING:
                source = next(iter(op.value_operands), None)
        if value in self._paths:
            return self._paths[value]
        op = self._makers.get(value)
        return f"{op.kind} of {place_of(op)} ({op.origin.region})" if op is not None else value


def _given(graph: Graph) -> Iterator[tuple[str, str]]:
    """Inputs of bodies with the operands that they are given."""
    for op in graph.walk():
        for body in op.graphs:
            if len(body.inputs) == len(op.operands):
                pairs = zip(body.inputs, op.operands, strict=True)
                yield from ((i.value.name, o) for i, o in pairs if isinstance(o, str))
