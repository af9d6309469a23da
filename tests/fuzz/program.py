"""Random train steps: what a seed draws, and the Python text that it stands for.

A program has one or two streams of values. Each block is a chain of ops that reads a stream and
gives it back with the same shape, under any number of transforms; so a block or an op can be left
out, and what remains is a program still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz import elementwise, layers, numerics, reductions, shapes
from tests.fuzz.draw import Draw
from tests.fuzz.steps import GRADIENTS, LOSSES, OPTIMIZERS, STATES, whole_text
from tests.fuzz.writing import OPS, Param, Unfit, Value, Writer

FAMILIES = (elementwise, shapes, reductions, layers, numerics)

# Transforms of `f(h, p, key) -> h` as they are written; {f} is the function, {g} what they make.
TRANSFORMS = {
    "remat": "{g} = jax.checkpoint({f})",
    "remat_policy": (
        "{g} = jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)"
    ),
    "jit": "{g} = jax.jit({f})",
    "cond": "{g} = lambda h, p, k: lax.cond(count % 2 == 0, {f}, lambda h, p, k: 0.5 * h, h, p, k)",
    "cond_data": (
        "{g} = lambda h, p, k: lax.cond(jnp.mean(h) > 0.0517, {f}, lambda h, p, k: jnp.sin(h), "
        "h, p, k)"
    ),
    "switch": (
        "{g} = lambda h, p, k: lax.switch(count % 3, "
        "[{f}, lambda h, p, k: jnp.sin(h), lambda h, p, k: {f}(0.5 * h, p, k)], h, p, k)"
    ),
    "fori": (
        "{g} = lambda h, p, k: lax.fori_loop(0, 2, "
        "lambda i, h: {f}(h, p, jax.random.fold_in(k, i)), h)"
    ),
    "scan": (
        "{g} = lambda h, p, k: lax.scan(lambda h, k: ((n := {f}(h, p, k)), jnp.mean(n)), h, "
        "jax.random.split(k, 3))[0]"
    ),
    "scan_history": (
        "{g} = lambda h, p, k: jnp.mean(lax.scan(lambda h, k: ((n := {f}(h, p, k)), n), h, "
        "jax.random.split(k, 2), unroll=2)[1], 0)"
    ),
    "scan_remat": (
        "{g} = lambda h, p, k: lax.scan(lambda h, k: (jax.checkpoint({f})(h, p, k), None), h, "
        "jax.random.split(k, 2))[0]"
    ),
    "scan_stacked": (
        "{g} = lambda h, p, k: lax.scan(lambda h, pk: ({f}(h, *pk), None), h, "
        "(p, jax.random.split(k, 2)))[0]"
    ),
    "scan_stacked_remat": (
        "{g} = lambda h, p, k: lax.scan(lambda h, pk: (jax.checkpoint({f})(h, *pk), None), h, "
        "(p, jax.random.split(k, 2)))[0]"
    ),
    "while": (
        "{g} = lambda h, p, k: 0.5 * h + lax.while_loop(lambda c: c[0] < 2, "
        "lambda c: (c[0] + 1, {f}(c[1], lax.stop_gradient(p), k)), (0, lax.stop_gradient(h)))[1]"
    ),
    "custom_vjp": (
        "{g} = jax.custom_vjp(lambda h, p, k: {f}(h, p, k))\n"
        "{g}.defvjp(lambda h, p, k: ({f}(h, p, k), (h, p, k)), lambda left, ct: (*jax.vjp("
        "lambda h, p: {f}(h, p, left[2]), *left[:2])[1](ct), None))"
    ),
    "custom_jvp": (
        "{g} = jax.custom_jvp(lambda h, p, k: {f}(h, p, k))\n"
        "{g}.defjvp(lambda at, along: jax.jvp(lambda h, p: {f}(h, p, at[2]), at[:2], along[:2]))"
    ),
    "jvp": (
        "{g} = lambda h, p, k: (lambda y, t: y + 0.1 * jnp.tanh(t))"
        "(*jax.jvp(lambda h: {f}(h, p, k), (h,), (jnp.cos(h),)))"
    ),
    "vjp": (
        "{g} = lambda h, p, k: (lambda y, back: y + 0.1 * jnp.tanh(back(jnp.cos(y))[0]))"
        "(*jax.vjp(lambda h: {f}(h, p, k), h))"
    ),
    "inner_grad": (
        "{g} = lambda h, p, k: h - 0.3 * jnp.tanh("
        "jax.grad(lambda h: jnp.sum(jnp.sin({f}(h, p, k))))(h))"
    ),
    "linearize": (
        "{g} = lambda h, p, k: (lambda y, push: y + 0.1 * jnp.tanh(push(jnp.sin(h))))"
        "(*jax.linearize(lambda h: {f}(h, p, k), h))"
    ),
    "twice": "{g} = lambda h, p, k: {f}({f}(h, p, k), p, jax.random.fold_in(k, 9))",
    "named": "{g} = jax.named_call({f}, name='{f}_named')",
}
STACKED = ("scan_stacked", "scan_stacked_remat")
# Over what axis of the stream the chain is mapped, and how.
MAPS = {
    "rows": "{g} = jax.vmap({f}, in_axes=(0, None, None))",
    "rows_keys": "{g} = lambda h, p, k: jax.vmap({f}, in_axes=(0, None, 0))"
    "(h, p, jax.random.split(k, h.shape[0]))",
    "loop_rows": "{g} = lambda h, p, k: lax.map(lambda r: {f}(r, p, k), h)",
    "batched_rows": "{g} = lambda h, p, k: lax.map(lambda r: {f}(r, p, k), h, batch_size=4)",
    "time": "{g} = jax.vmap({f}, in_axes=(1, None, None), out_axes=1)",
}
MERGES = {
    "norm": "norm(h + 0.5 * {y})",
    "tanh": "jnp.tanh(h + {y})",
    "add": "0.8 * h + 0.5 * jnp.tanh({y})",
    "replace": "jnp.tanh({y}) + 0.3 * h",
    "gate": "h + jax.nn.sigmoid({y}) * (jnp.sin(h) - h)",
}
_WIDTHS = (8, 8, 16, 16, 24, 32, 12, 7)
_SIDES = (4, 8, 6, 16, 5)
_ROWS = (16, 16, 16, 32, 8, 24)


@dataclass(frozen=True)
class Block:
    """A chain of ops from one stream into another, under transforms from the inside out."""

    number: int
    source: str
    target: str
    ops: tuple[tuple[str, int], ...]  # names and seeds
    over: str | None
    transforms: tuple[str, ...]
    merge: str


@dataclass(frozen=True)
class Program:
    """All that a seed draws of a train step."""

    seed: int
    rows: int
    mixes: bool
    streams: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes without the rows
    blocks: tuple[Block, ...]
    loss: str
    gradient: str
    optimizer: str
    states: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The op kinds that it is made of, transforms and optimizers among them."""
        found = {name for block in self.blocks for name, _ in block.ops}
        found |= {f"transform:{t}" for block in self.blocks for t in block.transforms}
        found |= {f"map:{block.over}" for block in self.blocks if block.over}
        found |= {f"state:{s}" for s in self.states}
        found |= {f"loss:{self.loss}", f"gradient:{self.gradient}", f"optimizer:{self.optimizer}"}
        return tuple(sorted(found))

    @property
    def text(self) -> str:
        """The program as Python: `create_state()`, `make_batch(i)` and `step(state, batch)`."""
        shapes = dict(self.streams)
        body: list[str] = []
        params: dict[str, dict[str, Param]] = {}
        for block in self.blocks:
            w, text = _written(self, block)
            body += text
            stack = 2 if any(t in STACKED for t in block.transforms) else 0
            params[f"b{block.number}"] = {
                name: replace(p, shape=(stack, *p.shape)) if stack else p
                for name, p in w.params.items()
            }
        return whole_text(
            self.seed, self.rows, shapes, body, params, self.loss, self.gradient, self.optimizer,
            self.states,
        )  # fmt: skip

    def smaller(self) -> Iterable[Program]:
        """The same program with one thing less, the largest things first."""
        count = len(self.blocks)
        for size in (count // 2, count // 4, 1):
            for at in range(0, count if size else 0, max(size, 1)):
                yield replace(self, blocks=self.blocks[:at] + self.blocks[at + size :])
        for i, block in enumerate(self.blocks):
            for other in _smaller_block(block):
                yield replace(self, blocks=(*self.blocks[:i], other, *self.blocks[i + 1 :]))
        if self.states:
            yield replace(self, states=())
            for state in self.states:
                yield replace(self, states=tuple(s for s in self.states if s != state))
        if self.optimizer != "sgd":
            yield replace(self, optimizer="sgd")
        if self.gradient != "plain":
            yield replace(self, gradient="plain")
        if self.loss != "mse":
            yield replace(self, loss="mse")
        used = {s for b in self.blocks for s in (b.source, b.target)}
        if len(self.streams) > 1:
            for stream in self.streams:
                if stream[0] not in used:
                    rest = tuple(s for s in self.streams if s != stream)
                    yield replace(self, streams=rest)


def _smaller_block(block: Block) -> Iterable[Block]:
    for i in range(len(block.ops)):
        yield replace(block, ops=block.ops[:i] + block.ops[i + 1 :])
    for i in range(len(block.transforms)):
        rest = block.transforms[:i] + block.transforms[i + 1 :]
        yield replace(block, transforms=rest)
    if block.over and not {"cond_data"} & set(block.transforms):
        yield replace(block, over=None)
    if block.source != block.target:
        yield replace(block, source=block.target)
    if block.merge != "add":
        yield replace(block, merge="add")


# -- writing a block ---------------------------------------------------------------------------


def _batch_values(program: Program) -> dict[str, Value]:
    rows = program.rows
    return {
        "labels": Value("labels", (rows,), "int32", 0),
        "lengths": Value("lengths", (rows,), "int32", 0),
        "mask": Value("mask", (rows,), "bool", 0),
        "weights": Value("weights", (rows,), "float32", 0),
    }


def _start(program: Program, block: Block) -> tuple[Value, Value, Writer]:
    shapes = dict(program.streams)
    source, target = shapes[block.source], shapes[block.target]
    name = "h" if block.source == block.target else block.source
    rows: int | None = 0
    whole_source, whole_target = (program.rows, *source), (program.rows, *target)
    if block.over == "time":
        whole_source = whole_target = (program.rows, *source[1:])
    elif block.over:
        whole_source, whole_target, rows = source, target, None
    mixes = program.mixes or bool(block.over and block.over != "time")
    batch = {} if block.over and block.over != "time" else _batch_values(program)
    start = Value(name, whole_source, "float32", rows)
    like = Value("h", whole_target, "float32", rows)
    return start, like, Writer(start, like, mixes, batch)


def _written(program: Program, block: Block) -> tuple[Writer, list[str]]:
    """The statements of a block in the body of the model."""
    value, like, w = _start(program, block)
    for name, seed in block.ops:
        value = _applied(w, value, name, seed) or value
    made = w.fitted(value, like)
    number = block.number
    fun = f"block{number}"
    text = [f"def {fun}(h, p, key):"]
    text += [f"    {line}" for line in w.lines]
    text.append(f"    return {MERGES[block.merge].format(y=made.name)}")
    for i, transform in enumerate(block.transforms):
        made_by = f"block{number}_{i}_{transform}"
        text += TRANSFORMS[transform].format(f=fun, g=made_by).splitlines()
        fun = made_by
    if block.over:
        text.append(MAPS[block.over].format(f=fun, g=f"block{number}_map"))
        fun = f"block{number}_map"
    t = block.target
    text.append(f'{t} = {fun}({t}, params["b{number}"], jax.random.fold_in(key, {number}))')
    return w, text


def _applied(w: Writer, value: Value, name: str, seed: int) -> Value | None:
    """The value after an op, or None, and nothing written, where the op does not fit."""
    kept = (len(w.lines), dict(w.params))
    try:
        return OPS[name].emit(w, value, Draw(seed))
    except Unfit:
        del w.lines[kept[0] :]
        w.params = kept[1]
        w.forget()
        return None


# -- drawing -----------------------------------------------------------------------------------


def draw_program(seed: int) -> Program:
    """The program of a seed."""
    draw = Draw(seed, 1)
    mixes = draw.chance(0.5)
    rows = draw.one(_ROWS)
    streams = _draw_streams(draw)
    gradient = draw.one([n for n, g in GRADIENTS.items() if mixes or not g.mixes])
    # Those that cut the batch themselves call the model with fewer rows.
    mixes = mixes and not GRADIENTS[gradient].mixes
    program = Program(
        seed, rows, mixes, streams, (),
        loss=draw.one([n for n, loss in LOSSES.items() if mixes or not loss.mixes]),
        gradient=gradient,
        optimizer=draw.one(tuple(OPTIMIZERS)),
        states=draw.some(tuple(STATES), draw.below(4)),
    )  # fmt: skip
    count = 1 + draw.below(4)
    blocks = tuple(_draw_block(program, i, Draw(seed, 2, i)) for i in range(count))
    return replace(program, blocks=blocks)


def _draw_streams(draw: Draw) -> tuple[tuple[str, tuple[int, ...]], ...]:
    kind = draw.one(("vec", "vec", "seq", "seq", "seq", "img", "two", "two"))
    width = draw.one(_WIDTHS)
    shapes: dict[str, tuple[int, ...]] = {
        "vec": (width,),
        "seq": (draw.one(_SIDES), width),
        "img": (draw.one(_SIDES[:3]), draw.one(_SIDES[:3]), draw.one((4, 8, 3))),
    }
    if kind != "two":
        return ((kind, shapes[kind]),)
    return tuple((k, shapes[k]) for k in draw.some(tuple(shapes), 2))


def _draw_block(program: Program, number: int, draw: Draw) -> Block:
    shapes = dict(program.streams)
    target = draw.one(tuple(shapes))
    others = [s for s in shapes if s != target]
    source = draw.one(others) if others and draw.chance(0.4) else target
    over: str | None = None
    transforms: tuple[str, ...] = ()
    if source == target and draw.chance(0.25):
        choices = ["rows", "rows", "rows_keys"]
        choices += ["loop_rows", "batched_rows"] if program.mixes else []
        choices += ["time"] * 2 if len(shapes[target]) == 2 else []
        over = draw.one(choices)
    if draw.chance(0.5):
        fit = [t for t in TRANSFORMS if t != "cond_data" or program.mixes or over == "rows"]
        # No gradient goes through a `while`, and the other stream would come in from outside.
        fit = [t for t in fit if t != "while" or source == target]
        transforms = draw.some(fit, 1 + draw.chance(0.3))
    transforms = _in_order(transforms)
    block = Block(number, source, target, (), over, transforms, draw.one(tuple(MERGES)))
    value, _, w = _start(program, block)
    names = tuple(OPS)
    ops: list[tuple[str, int]] = []
    for _ in range(1 + draw.below(3)):
        for _ in range(30):
            name, seed = draw.one(names), draw.seed()
            made = _applied(w, value, name, seed)
            if made is not None:
                value = made
                ops.append((name, seed))
                break
    return replace(block, ops=tuple(ops))


def _in_order(transforms: tuple[str, ...]) -> tuple[str, ...]:
    """The transforms without what JAX itself refuses: forward derivatives of custom reverse ones,
    reverse derivatives of a stop, and two stacks of parameters."""
    found: list[str] = []
    for t in transforms:
        if t in STACKED and any(f in STACKED for f in found):
            continue
        if t in ("jvp", "linearize", "custom_jvp") and "custom_vjp" in found:
            continue
        found.append(t)
    # The scan over stacked parameters hands single ones on, so it stands outermost.
    found.sort(key=lambda t: t in STACKED)
    return tuple(found)


def as_json(program: Program) -> dict[str, Any]:
    """The program as plain data."""
    return {
        "seed": program.seed, "rows": program.rows, "mixes": program.mixes,
        "streams": [[n, list(s)] for n, s in program.streams],
        "blocks": [
            [b.number, b.source, b.target, [*b.ops], b.over, [*b.transforms], b.merge]
            for b in program.blocks
        ],
        "loss": program.loss, "gradient": program.gradient, "optimizer": program.optimizer,
        "states": list(program.states),
    }  # fmt: skip


def from_json(data: dict[str, Any]) -> Program:
    """The program that was written as plain data."""
    blocks = tuple(
        Block(n, s, t, tuple((o[0], o[1]) for o in ops), over, tuple(transforms), merge)
        for n, s, t, ops, over, transforms, merge in data["blocks"]
    )
    streams = tuple((n, tuple(s)) for n, s in data["streams"])
    return Program(
        data["seed"], data["rows"], data["mixes"], streams, blocks, data["loss"],
        data["gradient"], data["optimizer"], tuple(data["states"]),
    )  # fmt: skip
