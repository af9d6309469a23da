"""The writer of a block's body: values with their shapes and batch axis, parameters, statements.

Legend: a value's `rows` is the axis that holds the rows of the batch, None where no axis does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.fuzz.draw import Draw

# All names that a program's text may use.
NAMES: Mapping[str, Any] = {
    "jax": jax, "jnp": jnp, "np": np, "lax": lax, "optax": optax, "partial": partial,
}  # fmt: skip
MOST_ITEMS = 40_000

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int32", "uint32", "int8", "uint8", "int16", "uint16")


class Unfit(Exception):
    """An op that cannot be applied to this value."""


@dataclass(frozen=True)
class Value:
    """A value of the program: its name, shape, dtype and the axis that holds the batch's rows."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    rows: int | None = None

    @property
    def rank(self) -> int:
        """The number of its axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of its items."""
        return int(np.prod(self.shape))

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return self.dtype in FLOATS

    @property
    def is_int(self) -> bool:
        """Whether it holds whole numbers."""
        return self.dtype in INTS

    def dim(self, axis: int) -> str:
        """The length of an axis as the program writes it: that of the rows is never a number."""
        axis %= self.rank
        return f"{self.name}.shape[{axis}]" if axis == self.rows else str(self.shape[axis])

    def dims(self) -> str:
        """Its shape as the program writes it."""
        return "".join(f"{self.dim(a)}, " for a in range(self.rank))


@dataclass(frozen=True)
class Param:
    """A parameter of a block: its shape, and what its entries are about."""

    shape: tuple[int, ...]
    scale: float
    mean: float = 0.0


class Writer:
    """Writes the body of one block, statement by statement, and knows every value's shape.

    `mixes` allows ops along the axis of the batch; `batch` names the arrays of the batch that the
    body may read.
    """

    def __init__(self, start: Value, like: Value, mixes: bool, batch: Mapping[str, Value]) -> None:
        self.mixes, self.batch = mixes, batch
        self.lines: list[str] = []
        self.params: dict[str, Param] = {}
        self._made = 0
        self._known: dict[str, Any] = {"key": jax.eval_shape(lambda: jax.random.key(0))}
        self._learn(start)
        self._learn(like)
        self._known["batch"] = {k: _struct(v) for k, v in batch.items()}
        self._texts: list[str] = []

    def _learn(self, value: Value) -> None:
        self._known[value.name] = _struct(value)

    # -- what an op asks for ---------------------------------------------------------------

    def name(self, stem: str = "x") -> str:
        """A name that nothing has yet."""
        self._made += 1
        return f"{stem}{self._made}"

    def param(self, *shape: int, scale: float | None = None, mean: float = 0.0) -> str:
        """A new parameter of that shape, as the body writes it."""
        fan = shape[-2] if len(shape) > 1 else 4
        name = self.name("w")
        self.params[name] = Param(shape, scale if scale is not None else fan**-0.5, mean)
        return f'p["{name}"]'

    def key(self) -> str:
        """A random key of its own."""
        return f"jax.random.fold_in(key, {self._made})"

    def axes(self, value: Value) -> list[int]:
        """The axes along which an op may combine items."""
        return [a for a in range(value.rank) if self.mixes or a != value.rows]

    def axis(self, value: Value, draw: Draw, least: int = 1) -> int:
        """One of them with at least so many items."""
        fit = [a for a in self.axes(value) if value.shape[a] >= least]
        if not fit:
            raise Unfit
        return draw.one(fit)

    # -- writing ---------------------------------------------------------------------------

    def define(self, text: str) -> None:
        """Write a function that later statements call."""
        self._texts.append(text)
        self.lines += text.splitlines()

    def forget(self) -> None:
        """Drop the functions whose lines are written no more."""
        written = "\n".join(self.lines)
        self._texts = [text for text in self._texts if text in written]

    def let(self, text: str, rows: int | None = None) -> Value:
        """Write `name = text` and find out the shape; raises Unfit where the value is too large."""
        made = self.abstract(text)
        if not isinstance(made, jax.ShapeDtypeStruct):
            raise TypeError(f"{text} makes {made}, not one array")
        if made.size > MOST_ITEMS or made.size == 0:
            raise Unfit
        value = Value(self.name(), tuple(made.shape), str(made.dtype), rows)
        self.lines.append(f"{value.name} = {text}")
        self._learn(value)
        return value

    def abstract(self, text: str) -> Any:
        """The shape and dtype that an expression has; raises what JAX raises where it has none."""
        known = {
            **self._known,
            "p": {
                name: jax.ShapeDtypeStruct(made.shape, np.float32)
                for name, made in self.params.items()
            },
        }

        def run(known: dict[str, Any]) -> Any:
            names = {**NAMES, **known}
            for made in self._texts:
                exec(made, names)
            return eval(text, names)

        return jax.eval_shape(run, known)

    # -- bringing values together ----------------------------------------------------------

    def floating(self, value: Value) -> Value:
        """The value as float32 numbers of moderate size."""
        x = value.name
        if value.dtype == "float32":
            return value
        if value.dtype == "bool":
            return self.let(f"jnp.where({x}, 0.5, -0.5)", value.rows)
        if value.dtype == "complex64":
            return self.let(f"jnp.real({x}) + 0.5 * jnp.imag({x})", value.rows)
        if value.is_int:
            return self.let(f"({x} % 11).astype(jnp.float32) / 8", value.rows)
        return self.let(f"{x}.astype(jnp.float32)", value.rows)

    def fitted(self, value: Value, like: Value) -> Value:
        """The value made float32 and brought to another's shape and rows."""
        value = self.floating(value)
        if value.shape == like.shape and value.rows == like.rows:
            return value
        rest = [s for a, s in enumerate(like.shape) if a != like.rows]
        wanted = int(np.prod(rest))
        if value.rows is not None and like.rows == 0:
            flat = self.let(
                f"jnp.moveaxis({value.name}, {value.rows}, 0).reshape({value.dim(value.rows)}, -1)",
                0,
            )
            if flat.shape[1] == wanted:
                made = flat
            elif flat.shape[1] <= 256:
                made = self.let(f"{flat.name} @ {self.param(flat.shape[1], rest[-1])}", 0)
            else:
                made = self.let(f"jnp.mean({flat.name}, 1, keepdims=True)", 0)
        else:
            made = self.let(f"{value.name}.reshape(-1)")
            if made.shape[0] == like.size and like.rows is None:
                return self.let(f"{made.name}.reshape({like.dims()})")
            if made.shape[0] <= 256:
                made = self.let(f"{made.name} @ {self.param(made.shape[0], like.shape[-1])}")
            else:
                made = self.let(f"jnp.mean({made.name})")
            return self.let(f"jnp.broadcast_to({made.name}, ({like.dims()}))", like.rows)
        if made.shape[1] == wanted:
            return self.let(f"{made.name}.reshape({like.dims()})", 0)
        ones = "1, " * (like.rank - 2)
        made = self.let(f"{made.name}.reshape({made.dim(0)}, {ones}-1)", 0)
        return self.let(f"jnp.broadcast_to({made.name}, ({like.dims()}))", 0)


Emit = Callable[[Writer, Value, Draw], Value]


@dataclass(frozen=True)
class Op:
    """An op kind: its name, and how it is written for a value."""

    name: str
    emit: Emit


OPS: dict[str, Op] = {}


def op(name: str) -> Callable[[Emit], Emit]:
    """Enter a function as the op kind of that name."""

    def enter(emit: Emit) -> Emit:
        if name in OPS:
            raise ValueError(f"two op kinds are called {name}")
        OPS[name] = Op(name, emit)
        return emit

    return enter


def _struct(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
