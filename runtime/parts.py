"""A part of the step as one compiled program of its submesh.

A listing and its sealed program become one function of local pieces, which is compiled.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from autopar.errors import GraphError
from autopar.frontend import compat
from autopar.frontend.plain_data import dtype_name
from autopar.frontend.traced import Const, Equation, FlatProgram
from autopar.ir.added_products import added_products
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.host_calls import HOST_CALLS
from autopar.ir.listing import Block, Fence, Listing, LocalOp, Loop, Move
from autopar.ir.program import PartProgram
from autopar.ir.sharding import MeshShape, Sharding
from autopar.runtime.bind import ArrayType
from autopar.runtime.callbacks import HostCalls, run_host_call
from autopar.runtime.local import Local, local_run
from autopar.runtime.moves import local_slice, run_move

Env = dict[str, Any]


def local_function(
    program: FlatProgram,
    listing: Listing,
    mesh: MeshShape,
    platform: str = "cpu",
    calls: HostCalls | None = None,
    wide: Mapping[str, str] | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """The step on one device's pieces, to run under shard_map over the whole mesh.

    `calls` is told of what the Python that the step calls has raised; pieces that are `wide` are
    made in another dtype than the step's.
    """
    emitter = _Emitter(program, mesh, platform, calls or HostCalls(), wide or {})

    def step(*pieces: Any) -> tuple[Any, ...]:
        return emitter.run_block(listing.block, program.outputs, pieces)

    return step


class _Emitter:
    """Interprets blocks; equations are found in the sealed program by their path."""

    def __init__(
        self,
        program: FlatProgram,
        mesh: MeshShape,
        platform: str,
        calls: HostCalls,
        wide: Mapping[str, str],
    ) -> None:
        self._program, self._mesh, self._platform, self._calls = program, mesh, platform, calls
        self._wide = wide
        self._same = dict(_renamed(program))

    def run_block(
        self, block: Block, outputs: Sequence[int | Const], pieces: Sequence[Any]
    ) -> tuple[Any, ...]:
        """A block's outputs; `outputs` are the sealed program's, for those that are literals."""
        env: Env = dict(zip(block.inputs, pieces, strict=True))
        for step in block.instructions:
            if isinstance(step, LocalOp):
                self._run(step, env)
            elif isinstance(step, Move):
                env[step.result] = run_move(env[step.source], step, self._mesh)
            elif isinstance(step, Fence):
                fenced = fence([env[s] for s in step.sources], step.tied, self._platform)
                if step.stored:
                    fenced = [stored(value, self._platform) for value in fenced]
                env.update(zip(step.results, fenced, strict=True))
            else:
                self._loop(step, env)
        return tuple(
            env[name] if name is not None else _constant(self._literal(outputs[i]))
            for i, name in enumerate(block.outputs)
        )

    def _literal(self, ref: int | Const) -> Const:
        """The literal behind an operand or output, also through inlined remat bodies."""
        while not isinstance(ref, Const):
            ref = self._same[ref]
        return ref

    def _equation(self, path: tuple[int, ...]) -> Equation:
        program = self._program
        for op, body in zip(path[:-1:2], path[1::2], strict=True):
            program = program.equations[op].bodies[body]
        return program.equations[path[-1]]

    def _run(self, run: LocalOp, env: Env) -> None:
        equation = self._equation(run.equation)
        wide = self._wide.keys() & {*run.results}
        for name in wide:
            equation = _made_in(equation, dtype_of(self._wide[name]))
        shapes = equation.operand_shapes
        operands = [
            env[name] if name is not None else self._constant_piece(equation, i, run)
            for i, name in enumerate(run.operands)
        ]
        result_shapes = tuple(tuple(a.shape) for a in equation.result_avals)
        local = Local(
            self._mesh,
            run.operand_shardings,
            run.result_shardings,
            shapes,
            result_shapes,
            self._platform,
        )
        with jax.named_scope(_scope(equation)):
            if equation.primitive.name in HOST_CALLS:
                results = run_host_call(equation, operands, local, self._calls)
            elif equation.primitive.name == "dot_general":
                results = [_product(equation, *operands, swapped=run.swapped)]
            elif run.parts:
                results = [_summed(equation, operands[0], run.parts)]
            elif equation.primitive.name == "transpose":
                results = [_turned(operands[0], equation.params["permutation"])]
            else:
                results = local_run(equation.primitive.name)(equation, operands, local)
        # XLA:CPU has no product that it both widens and turns over: it is turned over behind this.
        if wide and self._platform == "cpu":
            results = lax.optimization_barrier(list(results))
        env.update(zip(run.results, results, strict=True))

    def _constant_piece(self, equation: Equation, index: int, run: LocalOp) -> Any:
        """A literal operand; an array among them is cut to the piece that is asked for."""
        value = self._literal(equation.operands[index]).value
        for dim, axes in enumerate(run.operand_shardings[index].dims):
            if axes:
                value = local_slice(jnp.asarray(value), dim, axes, self._mesh)
        return value

    # -- loops -----------------------------------------------------------------------------

    def _loop(self, loop: Loop, env: Env) -> None:
        equation = self._equation(loop.equation)
        operands = [
            env[name] if name is not None else _constant(self._literal(equation.operands[i]))
            for i, name in enumerate(loop.operands)
        ]
        run = {"scan": self._scan, "while": self._while, "cond": self._cond}
        results = run[equation.primitive.name](loop, equation, operands)
        env.update(zip(loop.results, results, strict=True))

    def _scan(self, loop: Loop, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        params, program = equation.params, equation.bodies[0]
        handed, length, turned = list(operands), params["length"], dict(loop.turned)
        for k, dim in turned.items():
            handed[k] = jnp.moveaxis(handed[k], dim, 0)
        count, fixed = params["num_carry"], params["num_consts"]
        start = fixed + count

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            consts = [_back(handed[k], turned.get(k)) for k in range(fixed)]
            out = self.run_block(loop.bodies[0], program.outputs, [*consts, *carry, *slices])
            return list(out[:count]), list(out[count:])

        first, rows = handed[fixed:start], handed[start:]
        if params["unroll"] != 1 or not length:
            carry, stacked = lax.scan(
                body, first, rows, length, params["reverse"], unroll=params["unroll"]
            )
            return [*carry, *stacked]
        # The loop that JAX makes of a scan, but for how its stacks begin. Of one value there is one
        # stack: compilers see that of equal zeros, but not of memory that is found.
        names = loop.bodies[0].outputs[count:]
        first_of = {name: k for k, name in reversed(list(enumerate(names))) if name is not None}
        kept = [k if name is None else first_of[name] for k, name in enumerate(names)]
        stacked = sorted(set(kept))
        avals, laid = equation.result_avals[count:], loop.result_shardings[count:]
        empty = [
            unwritten(
                laid[k].shard_shape(avals[k].shape, self._mesh), avals[k].dtype, self._platform
            )
            for k in stacked
        ]

        def trip(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            number, carry, stacks = state
            at = length - 1 - number if params["reverse"] else number
            found = (_row(stack, at, turned.get(k)) for k, stack in enumerate(rows, start))
            carry, made = body(carry, list(found))
            pairs = zip(stacks, stacked, strict=True)
            return number + 1, carry, [_with_row(stack, made[k], at) for stack, k in pairs]

        state = (np.int32(0), first, empty)
        _, carry, stacks = lax.while_loop(lambda state: state[0] < length, trip, state)
        return [*carry, *(stacks[stacked.index(k)] for k in kept)]

    def _while(self, loop: Loop, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        tests, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        test_consts, body_consts = operands[:tests], operands[tests : tests + bodies]
        test_program, body_program = equation.bodies

        def test(carry: Iterable[Any]) -> Any:
            return self.run_block(loop.bodies[0], test_program.outputs, [*test_consts, *carry])[0]

        def body(carry: Iterable[Any]) -> list[Any]:
            given = [*body_consts, *carry]
            return list(self.run_block(loop.bodies[1], body_program.outputs, given))

        return list(lax.while_loop(test, body, list(operands[tests + bodies :])))

    def _cond(self, loop: Loop, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        def branch(block: Block, program: FlatProgram) -> Callable[..., list[Any]]:
            return lambda *given: list(self.run_block(block, program.outputs, given))

        pairs = zip(loop.bodies, equation.bodies, strict=True)
        branches = [branch(b, p) for b, p in pairs]
        platforms = equation.params.get("branches_platforms")
        if platforms is None:
            return list(lax.switch(operands[0], branches, *operands[1:]))
        # The branch of the platform that is compiled for: others may not compile on it.
        named = zip(platforms, branches, strict=True)
        by_name = {name: run for names, run in named for name in names or ("default",)}
        return list(lax.platform_dependent(*operands[1:], **by_name))


def _renamed(program: FlatProgram) -> Iterator[tuple[int, int | Const]]:
    """The values that inputs and results of remat equations are other names for."""
    for equation in program.walk():
        if equation.primitive.name in ("remat2", "checkpoint"):
            body = equation.bodies[0]
            yield from zip(body.inputs, equation.operands, strict=True)
            yield from zip(equation.results, body.outputs, strict=True)
        elif equation.primitive.name == "optimization_barrier":
            yield from zip(equation.results, equation.operands, strict=True)


_RESULT_DTYPE = {
    "dot_general": "preferred_element_type",
    "convert_element_type": "new_dtype",
}


def _made_in(equation: Equation, dtype: Any) -> Equation:
    """The equation with its result in another dtype, which views need not be told.

    A product that the user wants by one algorithm is left as it is.
    """
    param = _RESULT_DTYPE.get(equation.primitive.name)
    precision = equation.params.get("precision")
    if param is None or isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return equation
    return replace(equation, params={**equation.params, param: dtype})


def _product(equation: Equation, one: Any, other: Any, *, swapped: bool) -> jax.Array:
    """A product of matrices, made as that of the other operand by this one where it is `swapped`.

        [batch, one, other]  ->  [batch, other, one], turned over

    Dims of one item are left out. XLA writes out anew what has several dims that are summed up, or
    several that are kept, and counts dims of one item: with a group for each query's head, the
    gradients of all scores would be turned over.
    """
    params = equation.params
    sums, batches = params["dimension_numbers"]
    precision = params["precision"]  # a pair, or a named one of both
    shape = [one.shape[d] for d in batches[0]]
    for operand, summed, batch in zip((one, other), sums, batches, strict=True):
        shape += [n for d, n in enumerate(operand.shape) if d not in (*summed, *batch)]
    if swapped:
        one, other, sums, batches = other, one, sums[::-1], batches[::-1]
        precision = precision[::-1] if type(precision) is tuple else precision
    long = _long(one), _long(other)
    first, second = (
        ([at.index(d) for d in summed if d in at], [at.index(d) for d in batch if d in at])
        for at, summed, batch in zip(long, sums, batches, strict=True)
    )
    product = lax.dot_general(
        _narrow(one),
        _narrow(other),
        ((first[0], second[0]), (first[1], second[1])),
        precision=precision,
        preferred_element_type=params["preferred_element_type"],
    )
    if swapped:
        start, behind = len(first[1]), len(long[0]) - len(first[0])
        order = (*range(start), *range(behind, product.ndim), *range(start, behind))
        product = lax.transpose(product, order)
    return lax.reshape(product, shape)


def _summed(equation: Equation, value: Any, parts: Sequence[int]) -> jax.Array:
    """A sum of all rows, of so many parts of each leading dim first: a compiler sees two sums.

    As within one sum, the parts are f32 at least.
    """
    params = {name: given for name, given in equation.params.items() if name != "axes"}
    wide = jnp.promote_types(value.dtype, jnp.float32)
    shape = (*parts, value.shape[len(parts) - 1] // parts[-1], *value.shape[len(parts) :])
    rows = lax.reshape(value, shape).astype(wide)
    inner = tuple(range(len(parts), len(shape) - 1))
    summed = equation.primitive.bind(rows, axes=inner, **params)
    summed = lax.optimization_barrier(summed)
    summed = equation.primitive.bind(summed, axes=tuple(range(len(parts))), **params)
    return summed.astype(value.dtype)


def _turned(value: Any, order: Sequence[int]) -> jax.Array:
    """A value with its dims in another order; as in products, those of one item are left out."""
    long = _long(value)
    turned = lax.transpose(_narrow(value), [long.index(d) for d in order if d in long])
    return lax.reshape(turned, [value.shape[d] for d in order])


def _long(value: Any) -> list[int]:
    """The dims of a value that have not one item."""
    return [d for d, size in enumerate(value.shape) if size != 1]


def _narrow(value: Any) -> jax.Array:
    """A value without its dims of one item."""
    return lax.reshape(value, [value.shape[d] for d in _long(value)])


def _constant(const: Const) -> Any:
    """A literal as an array of its own type, which loops insist on."""
    return jnp.asarray(const.value, dtype=const.aval.dtype)


def _back(value: Any, dim: int | None) -> Any:
    """A value that is `turned`, with a dim first that was another, as it was; see Loop."""
    return value if dim is None else jnp.moveaxis(value, 0, dim)


def _row(stack: Any, number: Any, turned: int | None) -> Any:
    """A row of a stack, whose number is not negative; a dim of the stack may come first."""
    rows = 0 if turned is None else 1
    row = lax.dynamic_index_in_dim(stack, number, rows, False, allow_negative_indices=False)
    return row if turned is None else _back(row, turned - 1)


def _with_row(stack: Any, row: Any, number: Any) -> Any:
    """The stack with another row in one place."""
    return lax.dynamic_update_index_in_dim(stack, row, number, 0, allow_negative_indices=False)


def unwritten(shape: Sequence[int], dtype: Any, platform: str) -> jax.Array:
    """A stack of which each row will be written before it is read.

    JAX begins with zeros. XLA for GPUs writes these for one of several stacks of a type, and copies
    them for each of the others: 4 to 12 % of the steps of five scanned models on an H200. There the
    stack is memory as it is found. TPUs are told to take zeros: nothing else was tried on one.
    """
    if platform == "tpu":
        return lax.full(shape, 0, dtype)
    return lax.empty(tuple(shape), dtype)


def _scope(equation: Equation) -> str:
    """The scope of an op in profiles and HLO metadata: the user's modules and line."""
    return (
        "/".join(
            p for p in (equation.name_stack.replace("(", "_").replace(")", ""), equation.line) if p
        )
        or "step"
    )


# -- fences ------------------------------------------------------------------------------------


def fence(values: Sequence[Any], tied: bool, platform: str) -> Sequence[Any]:
    """The values, as ones that the compiler does not know to be the same; bits are kept.

    XLA:CPU drops barriers before it merges equal instructions. There, values that are `tied` to
    the last of them are also chosen by a test that never holds, on what that last one is at run
    time: they differ to the compiler, and are not ready before it is.
    """
    fenced = lax.optimization_barrier(tuple(values))
    last = fenced[-1]
    if not tied or platform != "cpu" or not jnp.issubdtype(last.dtype, jnp.floating):
        return fenced
    never = _never(last)
    return [_chosen(never, value) for value in fenced]


def stored(value: jax.Array, platform: str) -> jax.Array:
    """A value behind a barrier, with the same bits for each reader.

    XLA:CPU drops the barrier, and fuses what made the value into each of its readers, which may
    contract products and sums otherwise. There the value also goes through a loop that never runs:
    nothing is fused with it, and it copies nothing.
    """
    if platform != "cpu" or not value.size:
        return value
    start = (_never(value), value)
    return lax.while_loop(lambda c: c[0], lambda c: (~c[0], jnp.zeros_like(c[1])), start)[1]


def _never(value: jax.Array) -> jax.Array:
    """False, though the compiler cannot tell before the value is there."""
    first = lax.reshape(value, (value.size,))[0]
    return (first != first) & (first == first)


def _chosen(never: jax.Array, value: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _chosen(never, jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return jnp.where(never, jnp.zeros_like(value), value)


_COMBINES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "xor": jnp.bitwise_xor,
    "same": lambda held, fresh: fresh,  # it is equal in every microbatch
}
_CALLS_BACK = re.compile("callback|debug|infeed|outfeed|inspect")
_TOKEN = ArrayType((), jnp.dtype(bool), PartitionSpec())


@dataclass(frozen=True)
class PartSource:
    """The source of a part's program: its equations, its listing, its mesh.

    `kept` are inputs that must outlive it, whatever the program says of them. `sums` are inputs
    that come as they were summed over microbatches, each with the dtype that it was summed in: the
    program rounds them first. `calls` hear what the Python that it calls raises. One that
    `has_token` gives back a last scalar that is ready when it has run, and that nobody donates.
    `options` are XLA's, for the platform alone. Inputs that are `arriving` and plain outputs that
    are `leaving` lie otherwise outside than the listing has them: the program moves them itself.
    """

    flat: FlatProgram
    program: PartProgram
    mesh: MeshShape
    platform: str
    kept: frozenset[int] = frozenset()
    sums: Mapping[int, str] = field(default_factory=dict[int, str])
    calls: HostCalls = field(default_factory=HostCalls, compare=False)
    has_token: bool = True
    options: CompilerOptions = ()
    arriving: Mapping[int, Sharding] = field(default_factory=dict[int, Sharding])
    leaving: Mapping[int, Sharding] = field(default_factory=dict[int, Sharding])

    @property
    def name(self) -> str:
        """The name in profiles and HLO dumps."""
        return self.program.part.name

    @cached_property
    def inputs(self) -> tuple[ArrayType, ...]:
        """The types of the part's inputs, accumulators left out."""
        return self._inputs_lying(
            self.arriving.get(i, s) for i, s in enumerate(self.program.listing.input_shardings)
        )

    def _inputs_lying(self, shardings: Iterable[Sharding]) -> tuple[ArrayType, ...]:
        pairs = zip(self.flat.input_avals, shardings, strict=True)
        given = (self._lying(a, s) for a, s in pairs)
        return tuple(held_in(self.sums.get(i, ""), t) for i, t in enumerate(given))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The number of the listing's output that each accumulator is added to."""
        outputs = self.program.part.graph.outputs
        return tuple(outputs.index(a.value) for a in self.program.part.accumulators)

    @cached_property
    def outputs(self) -> tuple[ArrayType, ...]:
        """The types of the outputs that are no accumulators."""
        avals, made = list(output_avals(self.flat)), list(self._made)
        plain = [i for i in range(len(made)) if i not in self.places]
        for number, sharding in self.leaving.items():
            made[plain[number]] = self._lying(avals[plain[number]], sharding)
        return tuple(made[i] for i in plain)

    @cached_property
    def accumulators(self) -> tuple[ArrayType, ...]:
        """The types of the accumulators: as their outputs lie, in dtypes of their own."""
        pairs = zip(self.program.part.accumulators, self.places, strict=True)
        return tuple(held_in(a.dtype, self._made[i]) for a, i in pairs)

    @cached_property
    def donated(self) -> tuple[int, ...]:
        """Positions of arguments whose buffers an output takes; the accumulators among them.

        Of the inputs that may be consumed these are the ones for which there is such an output.
        """
        free = Counter(self.outputs)
        taken: list[int] = []
        for position in self.program.donated:
            if position not in self.kept and free[self.inputs[position]] > 0:
                free[self.inputs[position]] -= 1
                taken.append(position)
        count = len(self.inputs)
        return (*taken, *range(count, count + len(self.accumulators)))

    @cached_property
    def _made(self) -> tuple[ArrayType, ...]:
        shardings = self.program.listing.output_shardings
        avals = output_avals(self.flat)
        return tuple(self._lying(a, s) for a, s in zip(avals, shardings, strict=True))

    def _lying(self, aval: Any, sharding: Sharding) -> ArrayType:
        return ArrayType.lying(tuple(aval.shape), aval.dtype, sharding, self.mesh)

    @cached_property
    def needs_devices(self) -> bool:
        """True if it calls back to the host, for which JAX wants to know the devices early."""
        return any(_CALLS_BACK.search(e.primitive.name) for e in self.flat.walk())

    def lower(self, bound: Mesh) -> Any:
        """The program, traced but not compiled: for any devices of the mesh's shape.

        One that needs devices is for those of the bound mesh alone, and so is one on a mesh without
        axes, which JAX would take for none if it had no devices either. The program maps inputs and
        accumulators to outputs, accumulators and its token.
        """
        is_bound = self.needs_devices or not self.mesh.names
        return self.lower_on(bound if is_bound else abstract_mesh(self.mesh))

    def lower_on(self, mesh: Any) -> Any:
        """The same for the devices of one mesh; those of an abstract one are given later."""
        return lowered(self.jitted(mesh), [t.on(mesh) for t in self.given], self.platform)

    @property
    def given(self) -> tuple[ArrayType, ...]:
        """The types of the program's arguments: inputs, then accumulators."""
        return (*self.inputs, *self.accumulators)

    def jitted(self, mesh: Any) -> Any:
        """The program as a jitted function of arrays on a mesh, which may be an abstract one."""
        given, sums = self.given, self.accumulators
        made = (*self.outputs, *sums, *(_TOKEN,) * self.has_token)
        read = self._inputs_lying(self.program.listing.input_shardings)
        left = (t for i, t in enumerate(self._made) if i not in self.places)
        mapped = jax.shard_map(
            self.local(),
            mesh=mesh,
            in_specs=tuple(t.spec for t in (*read, *sums)),
            out_specs=tuple(t.spec for t in (*left, *sums, *(_TOKEN,) * self.has_token)),
            check_vma=False,
        )
        mapped.__name__ = self.name
        return jax.jit(
            mapped,
            in_shardings=tuple(t.on(mesh).sharding for t in given),
            out_shardings=tuple(t.on(mesh).sharding for t in made),
            donate_argnums=self.donated,
            compiler_options=compat.compiler_options(self.options),
        )

    def local(self) -> Callable[..., tuple[Any, ...]]:
        """The part on one device's pieces, to run under shard_map over the mesh."""
        listing, accumulators = self.program.listing, self.program.part.accumulators
        graph, wide = self.program.part.graph, dict[str, str]()
        for added in added_products(graph, listing, accumulators):
            wide.update(dict.fromkeys(added.pieces, added.dtype))
        step = local_function(self.flat, listing, self.mesh, self.platform, self.calls, wide)

        def run(*pieces: Any) -> tuple[Any, ...]:
            given, held = pieces[: len(self.inputs)], pieces[len(self.inputs) :]
            rounded = (
                p.astype(self.flat.input_avals[i].dtype) if i in self.sums else p
                for i, p in enumerate(given)
            )
            made = step(*map(_unstacked, rounded, listing.input_shardings))
            lying = tuple(map(_stacked, made, listing.output_shardings))
            plain = (lying[i] for i in range(len(lying)) if i not in self.places)
            sums = (
                combined(a.combiner, h, lying[i])
                for a, h, i in zip(accumulators, held, self.places, strict=True)
            )
            token = (jnp.zeros((), bool),) if self.has_token else ()
            return (*plain, *sums, *token)

        return run


def output_avals(program: FlatProgram) -> Iterator[Any]:
    """The abstract value of each output."""
    avals = dict(program.avals())
    for output in program.outputs:
        yield output.aval if isinstance(output, Const) else avals[output]


def abstract_mesh(mesh: MeshShape) -> AbstractMesh:
    """A mesh with no devices yet: what is lowered for it is compiled for any of its shape."""
    return AbstractMesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def lowered(jitted: Any, given: Sequence[Any], platform: str) -> Any:
    """A jitted function of arrays on abstract meshes, lowered for a platform."""
    return jitted.trace(*given).lower(lowering_platforms=(_lowering_name(platform),))


def _lowering_name(platform: str) -> str:
    """The platform's name in lowerings: a GPU is of one maker or the other."""
    if platform != "gpu":
        return platform
    version = jax.devices("gpu")[0].client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"


def held_in(name: str, value: ArrayType) -> ArrayType:
    """The type of an accumulator of such values; no name keeps their dtype."""
    if not name or name == dtype_name(value.dtype):
        return value
    return ArrayType(value.shape, dtype_of(name), value.spec)


def combined(combiner: str, held: Any, fresh: Any) -> Any:
    """The value of an accumulator after one more microbatch."""
    return _COMBINES[combiner](held, fresh.astype(held.dtype))


def neutral(combiner: str, kind: ArrayType) -> Any:
    """An array that changes nothing that is combined with it; raises GraphError for no combiner."""
    if combiner in ("sum", "xor", "same"):
        return jnp.zeros(kind.shape, kind.dtype)
    if combiner in ("mul", "and", "or"):
        return jnp.full(kind.shape, combiner != "or", kind.dtype)
    if combiner not in ("max", "min"):
        raise GraphError(
            f"nothing is accumulated by {combiner!r}; there are {', '.join(_COMBINES)}"
        )
    if jnp.issubdtype(kind.dtype, jnp.inexact):
        return jnp.full(kind.shape, -jnp.inf if combiner == "max" else jnp.inf, kind.dtype)
    if kind.dtype == jnp.bool_:
        return jnp.full(kind.shape, combiner == "min", kind.dtype)
    limits = np.iinfo(kind.dtype)
    return jnp.full(kind.shape, limits.min if combiner == "max" else limits.max, kind.dtype)


def dtype_of(name: str) -> Any:
    """The dtype of a short name: f32 is float32. Keys have none that arithmetic knows."""
    for dtype in _DTYPES:
        if dtype_name(dtype) == name:
            return dtype
    raise GraphError(f"nothing is accumulated in {name!r}")


_DTYPES = tuple(
    jnp.dtype(t)
    for t in (
        jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.bool_, jnp.int32, jnp.int64,
        jnp.int16, jnp.int8, jnp.uint32, jnp.uint64, jnp.uint16, jnp.uint8, jnp.complex64,
        jnp.complex128,
    )
)  # fmt: skip


def _unstacked(piece: Any, sharding: Sharding) -> Any:
    return piece.reshape(piece.shape[1:]) if sharding.partial else piece


def _stacked(piece: Any, sharding: Sharding) -> Any:
    return piece[None] if sharding.partial else piece
