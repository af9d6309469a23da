"""The choices of decisions on one mesh, and what they mean for the values that ops read and make.

Look-alikes have the same choices, within a step and in other forms, layers and recipes of it. So
every tuple of them is kept once, and its id stands for it in the tables of what follows from it:

    of(reading)      decision -> its choices             (all that its sizes, or its op, allow)
    lying            choices, dims of a value -> row     a row has the sharding for each choice
    wanted, asked    choices, a read -> row
    made             choices, a result -> row, with how partial results combine
    pieces           row -> in how many pieces each cuts a value
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopar.ir.rule import Rule
from autopar.ir.sharding import Assignment, MeshShape, Sharding, operand_of_result
from autopar.ir.values import Value
from autopar.passes.shard.model.decisions import (
    Choice,
    Decision,
    Place,
    Read,
    Reading,
    ReadKind,
    Rematerializable,
    Standing,
    canonical_shardings,
    group_choices,
    op_choices,
    required,
)
from autopar.passes.shard.solver.problem import Ints

Row = tuple[Sharding, ...]
Options = tuple[Choice, ...]

_OptionsKey = tuple[tuple[int, ...], bool, tuple[tuple[str, ...] | None, ...] | None]
_WantedKey = tuple[ReadKind, int, int, tuple[int, ...], bool, int]


class MeshChoices:
    """The tuples and tables of one mesh, for all that is planned there."""

    def __init__(self, mesh: MeshShape) -> None:
        self.mesh = mesh
        # Tuples and rules are kept, for the id of one that was gone would be another's.
        self._options: dict[Options, Options] = {}
        self._rows: dict[Row, Row] = {}
        self._skeletons: dict[tuple[object, ...], int] = {}
        self._numbers: dict[int, tuple[Rule, int]] = {}
        self._of_rules: dict[Rule, Options] = {}
        self._of_values: dict[_OptionsKey, Options] = {}
        self._states: dict[tuple[int, ...], Options] = {}
        self._lying: dict[tuple[int, tuple[int, ...]], Row] = {}
        self._wanted: dict[_WantedKey, Row] = {}
        self._asked: dict[tuple[int, int, int], Row] = {}
        self._made: dict[tuple[int, int, int], tuple[Row, tuple[str, ...]]] = {}
        self._pieces: dict[int, Ints] = {}

    # -- tuples --------------------------------------------------------------------------------

    def options(self, choices: Sequence[Choice]) -> Options:
        """The one tuple of these choices."""
        given = tuple(choices)
        return self._options.setdefault(given, given)

    def row(self, shardings: Sequence[Sharding]) -> Row:
        """The one tuple of these shardings."""
        given = tuple(shardings)
        return self._rows.setdefault(given, given)

    def of(self, reading: Reading) -> list[Options]:
        """The choices of each decision of a reading."""
        return [self._of(decision) for decision in reading.decisions]

    def _of(self, decision: Decision) -> Options:
        rule = decision.op.rule if decision.op is not None else None
        if rule is not None:
            if rule not in self._of_rules:
                self._of_rules[rule] = self.options(op_choices(rule, self.mesh))
            return self._of_rules[rule]
        key = tuple(decision.sizes), decision.allows_partial, decision.fixed
        if key not in self._of_values:
            self._of_values[key] = self.options(group_choices(decision, self.mesh))
        return self._of_values[key]

    def states(self, value: Value) -> Options:
        """The ways in which a value may lie as several ops read it."""
        sizes = tuple(1 if value.dtype.startswith("key") else n for n in value.shape)
        if sizes not in self._states:
            self._states[sizes] = self.options(tuple(canonical_shardings(sizes, self.mesh, False)))
        return self._states[sizes]

    # -- what follows from choices -------------------------------------------------------------

    def lying(self, options: Options, dims: tuple[int, ...]) -> Row:
        """The sharding of a value with these dims for each choice of its group."""
        key = id(options), dims
        if key not in self._lying:
            place = Place(-1, dims)
            self._lying[key] = self.row(
                [place.sharding(c) for c in options if isinstance(c, Sharding)]
            )
        return self._lying[key]

    def wanted(self, read: Read, options: Options) -> Row:
        """The sharding in which a value is read for each choice of the reader."""
        rule = read.op.rule if read.op is not None else None
        number = self._number(rule) if rule is not None else -1
        key = read.kind, number, read.operand, read.dims, read.partial_ok, id(options)
        if key not in self._wanted:
            self._wanted[key] = self.row(required(read, options, self.mesh))
        return self._wanted[key]

    def sources(
        self, standing: Standing, value: Value, wanted: Row
    ) -> Iterator[tuple[Value, Place, Row]]:
        """The placed values that a need comes down to, and the shardings asked of each.

        A value made on demand asks its own operands for what its sharding implies; a partial sum
        of it is made by masking, so its operands are asked for no partial sums.
        """
        if isinstance(standing, Place):
            yield value, standing, wanted
        elif isinstance(standing, Rematerializable):
            rule = standing.op.rule
            assert rule is not None
            for i, inner in enumerate(standing.operands):
                if inner is not None:
                    asked = self._asked_of(rule, i, wanted)
                    yield from self.sources(inner, standing.operand_values[i], asked)

    def _asked_of(self, rule: Rule, operand: int, wanted: Row) -> Row:
        key = self._number(rule), operand, id(wanted)
        if key not in self._asked:
            asked = [operand_of_result(rule, operand, s, False) for s in wanted]
            self._asked[key] = self.row(asked)
        return self._asked[key]

    def made(self, rule: Rule, position: int, options: Options) -> tuple[Row, tuple[str, ...]]:
        """The raw result of an op for each of its choices, and how its partial sums combine."""
        key = self._number(rule), position, id(options)
        if key not in self._made:
            given = [c for c in options if isinstance(c, Assignment)]
            raw = self.row([c.result_sharding(rule, position, self.mesh) for c in given])
            self._made[key] = raw, tuple(c.combiner(rule) for c in given)
        return self._made[key]

    def pieces(self, row: Row) -> Ints:
        """The number of pieces that each sharding of a row cuts a value into."""
        if id(row) not in self._pieces:
            counts = [s.pieces(self.mesh) for s in row]
            self._pieces[id(row)] = np.array(counts, dtype=np.int64)
        return self._pieces[id(row)]

    def _number(self, rule: Rule) -> int:
        """The number of a rule, which is the same for those through which shardings pass alike."""
        if id(rule) not in self._numbers:
            number = self._skeletons.setdefault(rule.skeleton, len(self._skeletons))
            self._numbers[id(rule)] = rule, number
        return self._numbers[id(rule)][1]
