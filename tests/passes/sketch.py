"""Steps written op by op with their gradients, without JAX, and what runs them in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.ir.batching import FREE, Accumulator, Batching, Hoist, Moment, Rows, When
from autopar.ir.graph import Graph, Op, Operand, Origin, Plain
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Layer, LayerSequence, Remat, Stage, StagePlan, Submesh
from autopar.ir.values import Input, Literal, Role, Value
from autopar.rules import attach_rules
from autopar.schedule.table import stage_devices

Array = npt.NDArray[np.float64]
LOOP, ONCE = Moment(When.LOOP, (0,)), Moment(When.ONCE, (0,))


def number(value: float) -> Literal:
    """A scalar written into an op."""
    return Literal(repr(value), "f64")


@dataclass
class Sketch:
    """A step that grows op by op; `layer`, `region` and `moment` are of the ops to come."""

    layer: int = 0
    region: str = "forward"
    moment: Moment = LOOP
    inputs: list[Input] = field(default_factory=list[Input])
    ops: list[Op] = field(default_factory=list[Op])
    moments: list[Moment] = field(default_factory=list[Moment])
    homes: list[int] = field(default_factory=list[int])
    input_homes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    rows: dict[str, Rows] = field(default_factory=dict[str, Rows])
    accumulators: list[Accumulator] = field(default_factory=list[Accumulator])
    outputs: list[Operand] = field(default_factory=list[Operand])
    donated: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def given(self, path: str, shape: tuple[int, ...], role: Role, *homes: int) -> str:
        """An input; of the batch it has rows in its first dim, if it has dims."""
        name = f"%{path}"
        self.inputs.append(Input(Value(name, shape, "f64"), role, path))
        self.input_homes.append(homes)
        self.shapes[name] = shape
        if role is Role.BATCH and shape:
            self.rows[name] = Rows(0)
        return name

    def op(self, kind: str, *operands: Operand, layer: int | None = None, **params: Plain) -> str:
        """An op's result."""
        name = f"%{len(self.ops)}"
        arrays = [np.zeros(o.shape if isinstance(o, Literal) else self.shapes[o]) for o in operands]
        self.shapes[name] = apply(kind, arrays, params).shape
        value = Value(name, self.shapes[name], "f64")
        flops = 2 * arrays[0].size * value.item_count if kind == "dot_general" else value.item_count
        self.ops.append(
            Op(kind, operands, (value,), tuple(params.items()), flops, Origin(self.region))
        )
        self.moments.append(self.moment)
        self.homes.append(self.layer if layer is None else layer)
        return name

    def dot(self, a: str, b: str, left: int, right: int) -> str:
        """A matrix product over a dim of each."""
        return self.op("dot_general", a, b, dimension_numbers=(((left,), (right,)), ((), ())))

    def total(self, a: str, *axes: int) -> str:
        """A sum over some dims, or over all."""
        found = axes or tuple(range(len(self.shapes[a])))
        return self.op("reduce_sum", a, axes=found)

    def spread(self, a: Operand, shape: tuple[int, ...], *dims: int) -> str:
        """A value repeated to a shape."""
        return self.op("broadcast_in_dim", a, shape=shape, broadcast_dimensions=dims)

    def sums(self, name: str) -> str:
        """A value that is accumulated over the microbatches."""
        self.accumulators.append(Accumulator(name, self.moment.loops[-1]))
        return name

    def returns(self, name: Operand, replaces: str = "") -> None:
        """An output, of state the new value of an input."""
        if replaces:
            index = [i.value.name for i in self.inputs].index(replaces)
            self.donated.append((len(self.outputs), index))
        self.outputs.append(name)

    def batching(
        self, m: int, rows: int, loops: int = 1, barrier: bool = False, hoist: Hoist | None = None
    ) -> Batching:
        """The step, cut into m microbatches of so many rows."""
        graph = Graph(
            "sketch", tuple(self.inputs), tuple(self.ops), tuple(self.outputs),
            tuple(f"out{o}" for o in range(len(self.outputs))), tuple(self.donated),
        )  # fmt: skip
        return Batching(
            attach_rules(graph), m, m * rows, tuple(self.moments), tuple(self.rows.items()),
            tuple(self.accumulators), hoist, loops, barrier,
        )  # fmt: skip

    @property
    def layer_count(self) -> int:
        """How many layers there are."""
        return 1 + max([*self.homes, *(k for homes in self.input_homes for k in homes)])

    def staged(self, batching: Batching, cuts: Sequence[int], schedule: str, p: int) -> StagePlan:
        """Stages that begin at these layers, on p submeshes of one device."""
        count = self.layer_count
        # Where layers end does not matter, as every op has its home.
        layers = tuple(Layer(k, k, 0, 0) for k in range(count))
        sequence = LayerSequence(batching.graph, layers, tuple(self.homes), tuple(self.input_homes))
        bounds = [*cuts, count]
        where = stage_devices(schedule, p, len(cuts) // p)
        stages = tuple(
            Stage(first, following - 1, u)
            for first, following, u in zip(bounds, bounds[1:], where, strict=False)
        )
        submeshes = tuple(Submesh(MeshShape.of(1), (d,)) for d in range(p))
        return StagePlan(sequence, stages, submeshes, batching.microbatches, schedule)


# -- numbers ---------------------------------------------------------------------------------


def apply(kind: str, arrays: Sequence[Array], params: Mapping[str, Plain]) -> Array:
    """One op in numpy."""
    if kind == "dot_general":
        left, right = _nested(_nested(params["dimension_numbers"])[0])
        return np.tensordot(arrays[0], arrays[1], axes=(_ints(left), _ints(right)))
    if kind == "reduce_sum":
        return np.asarray(np.sum(arrays[0], axis=_ints(params["axes"])))
    if kind == "broadcast_in_dim":
        shape, dims = _ints(params["shape"]), _ints(params["broadcast_dimensions"])
        narrow = [n if d in dims else 1 for d, n in enumerate(shape)]
        return np.broadcast_to(np.reshape(arrays[0], narrow), shape).copy()
    if kind == "transpose":
        return np.transpose(arrays[0], _ints(params["permutation"]))
    return np.asarray(_POINTWISE[kind](*arrays))


def _nested(given: Plain) -> tuple[Plain, ...]:
    assert isinstance(given, tuple)
    return given


def _ints(given: Plain) -> tuple[int, ...]:
    return tuple(v for v in _nested(given) if isinstance(v, int))


def _divided(a: Array, b: Array) -> Array:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=b != 0)


_POINTWISE: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "tanh": np.tanh,
    "sqrt": np.sqrt, "max": np.maximum, "div": _divided,
}  # fmt: skip


def compute(ops: Sequence[Op], env: dict[str, Array]) -> None:
    """Run ops on the values of an environment, to which they add theirs."""
    for op in ops:
        arrays = [
            np.full(o.shape, float(o.text)) if isinstance(o, Literal) else env[o]
            for o in op.operands
        ]
        env[op.results[0].name] = np.asarray(apply(op.kind, arrays, dict(op.params)))


def arguments(batching: Batching, seed: int = 0) -> list[Array]:
    """Random arguments of the whole step."""
    random = np.random.default_rng(seed)
    found: list[Array] = []
    for given in batching.graph.inputs:
        shape = list(given.value.shape)
        if given.value.name in batching.rows_of:
            shape[batching.rows_of[given.value.name].dim] *= batching.microbatches
        found.append(random.normal(size=shape) * 0.5)
    return found


def rows_of(array: Array, rows: Rows | None, m: int, i: int) -> Array:
    """The rows of one microbatch."""
    return array if rows is None else np.split(array, m, axis=rows.dim)[i]


def joined(arrays: Sequence[Array], rows: Rows | None) -> Array:
    """What the microbatches have of an output, put together."""
    return arrays[0] if rows is None else np.concatenate(arrays, axis=rows.dim)


def hoisted(batching: Batching, given: Sequence[Array]) -> dict[str, Array]:
    """What the whole batch decides."""
    if batching.hoist is None:
        return {}
    by_path = {i.path: a for i, a in zip(batching.graph.inputs, given, strict=True)}
    env = {i.value.name: by_path[i.path] for i in batching.hoist.graph.inputs}
    compute(batching.hoist.graph.ops, env)
    outputs = map(str, batching.hoist.graph.outputs)
    return {v: env[o] for v, o in zip(batching.hoist.values, outputs, strict=True)}


def plainly(batching: Batching, given: Sequence[Array]) -> list[Array]:
    """The step by the definition: loop after loop, microbatch after microbatch, then the rest."""
    graph, m = batching.graph, batching.microbatches
    moments = batching.moments
    once = hoisted(batching, given)
    fixed = set(once)
    for i, array in zip(graph.inputs, given, strict=True):
        if i.value.name not in batching.rows_of:
            once[i.value.name] = array
    slices = [
        {
            i.value.name: rows_of(a, batching.rows_of[i.value.name], m, k)
            for i, a in zip(graph.inputs, given, strict=True)
            if i.value.name in batching.rows_of
        }
        for k in range(m)
    ]
    ops = [op for op in graph.ops if op.results[0].name not in fixed]
    when = dict(zip(map(id, graph.ops), moments, strict=True))
    # Free ops read inputs and each other, so they may all come first.
    compute([op for op in ops if when[id(op)] == FREE], once)
    for loop in range(batching.loops):
        sums: dict[str, Array] = {}
        for env in slices:
            local = {**env, **once}
            mine = [o for o in ops if when[id(o)].when is When.LOOP and loop in when[id(o)].loops]
            compute(mine, local)
            env.update((r.name, local[r.name]) for op in mine for r in op.results)
            for a in batching.accumulators:
                if a.loop == loop:
                    sums[a.value] = sums.get(a.value, np.zeros(())) + env[a.value]
        once.update(sums)
        compute([o for o in ops if when[id(o)] == Moment(When.ONCE, (loop,))], once)
    return [
        np.full(o.shape, float(o.text))
        if isinstance(o, Literal)
        else once[o] if o in once
        else joined([env[o] for env in slices], batching.rows_of.get(o))
        for o in graph.outputs
    ]  # fmt: skip


def with_stages(plan: StagePlan, remat: Remat) -> StagePlan:
    """The same plan whose stages recompute so."""
    return replace(plan, stages=tuple(replace(s, remat=remat) for s in plan.stages))
