"""Rules that a user writes as an einsum-like text, for primitives we cannot see into."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.errors import InputError
from autopar.ir.graph import Op
from autopar.ir.rule import COMBINERS, Dim, Factor, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.primitive import optional

_NAMING_PARAMS = ("target_name", "name")  # what tells one foreign call from another
_EXAMPLE = '"b k, k n -> b n; k:reduce"'


@dataclass(frozen=True)
class RuleBook:
    """The user's own rules, by primitive name or by "primitive:target".

    `RuleBook({"ffi_call:my_matmul": "b k, k n -> b n; k:reduce"})`. Operands and results are
    parted by commas, dims by spaces; "-" is a scalar, "." a dim that stays whole and "[g c]" a
    dim of two factors, major first. Then come the kinds that are not pass (`k:reduce`,
    `k:reduce-max`, `w:permute`, `t:replicate`), sizes that the shapes do not tell (`g=4`), and
    `linear 0 1` for operands that may be partial sums together. The primitive must compute the
    right piece when it is given pieces.
    """

    extra: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(dict[str, str]()))

    def rule_for(self, op: Op, operands: Sequence[Value]) -> Rule | None:
        """The user's rule for this op, or None. Raises InputError where the text does not fit."""
        # The key with the target's name goes before the plain one.
        names = (optional(op, param) for param in _NAMING_PARAMS)
        keys = (f"{op.kind}:{name}" for name in names if isinstance(name, str))
        for key in (*keys, op.kind):
            if key in self.extra:
                return parse_rule(self.extra[key], operands, op.results)
        return None


def parse_rule(text: str, operands: Sequence[Value], results: Sequence[Value]) -> Rule:
    """A rule from its text, sizes taken from the shapes. Raises InputError."""
    # 1. Both sides: for each tensor its dims, each a list of factor names.
    body, *notes = (part.strip() for part in text.split(";"))
    left, arrow, right = body.partition("->")
    if not arrow:
        raise InputError(f"rule {text!r} has no '->'; write one like {_EXAMPLE}")
    sides = [_tensors(left), _tensors(right)]
    for tensors, values, what in zip(
        sides, (operands, results), ("operands", "results"), strict=True
    ):
        if len(tensors) != len(values):
            raise InputError(f"rule {text!r} has {len(tensors)} {what}, the op {len(values)}")
    # 2. What is said behind the semicolon, and the sizes that the shapes tell.
    kinds, sizes, linear = _notes(text, notes, len(operands))
    tensors = [*sides[0], *sides[1]]
    _solve_sizes(text, tensors, [*operands, *results], sizes)
    names = list(dict.fromkeys(name for dims in tensors for dim in dims for name in dim))
    strangers = sorted((set(kinds) | set(sizes)) - set(names))
    if strangers:
        raise InputError(f"rule {text!r} says something of {strangers}, which no tensor has")
    # 3. Factors by number.
    number = {name: f for f, name in enumerate(names)}

    def dims_of(dims: Sequence[Sequence[str]]) -> tuple[Dim, ...]:
        return tuple(tuple(number[name] for name in dim) for dim in dims)

    factors = tuple(Factor(sizes[name], *kinds.get(name, (Kind.PASS, "sum"))) for name in names)
    return Rule(
        factors,
        tuple(dims_of(t) for t in sides[0]),
        tuple(dims_of(t) for t in sides[1]),
        tuple(linear),
    )


def _tensors(side: str) -> list[list[list[str]]]:
    """For each tensor its dims, each a list of factor names."""
    return [_dims(part) for part in side.split(",")] if side.strip() else []


def _dims(text: str) -> list[list[str]]:
    dims: list[list[str]] = []
    inside = False
    for word in text.replace("[", " [ ").replace("]", " ] ").split():
        if word == "[":
            dims.append([])
        if word in "[]":
            inside = word == "["
        elif inside:
            dims[-1].append(word)
        elif word != "-":
            dims.append([] if word == "." else [word])
    return dims


def _notes(
    text: str, notes: Sequence[str], operand_count: int
) -> tuple[dict[str, tuple[Kind, str]], dict[str, int], list[tuple[int, ...]]]:
    kinds: dict[str, tuple[Kind, str]] = {}
    sizes: dict[str, int] = {}
    linear: list[tuple[int, ...]] = []
    for note in notes:
        name, _, kind = (word.strip() for word in note.partition(":"))
        if note.startswith("linear "):
            words = note.split()[1:]
            if not all(word.isdecimal() and int(word) < operand_count for word in words):
                raise InputError(
                    f"rule {text!r}: {note!r} does not number its operands from 0 to "
                    f"{operand_count - 1}"
                )
            linear.append(tuple(int(word) for word in words))
        elif "=" in note and note.partition("=")[2].strip().isdecimal():
            key, _, size = note.partition("=")
            sizes[key.strip()] = int(size)
        elif kind:
            head, _, combiner = kind.partition("-")
            known = [k.value for k in Kind]
            if head not in known or (combiner or "sum") not in COMBINERS:
                raise InputError(f"rule {text!r}: {kind!r} is no kind; kinds are {known}")
            kinds[name] = Kind(head), combiner or "sum"
        elif note:
            raise InputError(f"rule {text!r}: {note!r} is not understood; see RuleBook")
    return kinds, sizes, linear


def _solve_sizes(
    text: str,
    tensors: Sequence[Sequence[Sequence[str]]],
    values: Sequence[Value],
    sizes: dict[str, int],
) -> None:
    """Fill in the sizes that the shapes tell; a dim of several factors tells its last unknown."""
    dims: list[tuple[Sequence[str], int]] = []
    for tensor, value in zip(tensors, values, strict=True):
        if len(tensor) != len(value.shape):
            raise InputError(f"rule {text!r} gives {len(tensor)} dims to {value.type_text}")
        dims.extend(zip(tensor, value.shape, strict=True))
    # Dims of one factor first: they tell the most.
    for dim, size in sorted(dims, key=lambda pair: len(pair[0])):
        known = math.prod(sizes.get(name, 1) for name in dim)
        unknown = [name for name in dim if name not in sizes]
        if len(unknown) == 1 and size % known == 0:
            sizes[unknown[0]] = size // known
        elif dim and (unknown or known != size):
            raise InputError(f"rule {text!r}: the sizes of {list(dim)} do not make {size}")
