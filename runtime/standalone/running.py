"""Runs a step under plain `jax.jit` as a plan says; an export has its plan in the tables here."""

from __future__ import annotations

import functools
import inspect
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.version import __version__ as jaxlib_version

from autopar.runtime.standalone.reading import (
    Equation,
    Flattener,
    Program,
    Written,
    named,
    unplaced,
)


class Sums(NamedTuple):
    """A layout of terms that are yet to be added up over mesh axes, each laid out as `spec`."""

    over: tuple[str, ...]
    spec: P


class Again(NamedTuple):
    """In a route: what follows is done once more, and may not be merged with earlier copies."""

    copies: int


Route = tuple[P | Sums | Again, ...]  # layouts that a value goes through, the last one to stay

# ---- the plan ----

STEP = ""
EQUATIONS = 0, 0  # how many, and a checksum of what they are
MESH: dict[str, int] = {}  # axes and their sizes, the slowest first
DEVICES: list[int] = []  # which of jax.devices() is at each position of the mesh, row by row
DONATED: tuple[int, ...] = ()  # arguments whose buffers the outputs take over
COMPILER_OPTIONS: dict[str, bool | int | str] = {}  # of XLA
INPUTS: dict[str, P] = {}
OUTPUTS: dict[str, P] = {}
CONSTANTS: list[P] = []  # arrays that the step closes over

# Equations are named by their numbers: 12, or 12/0/3 for number 3 in body 0 of number 12; 4-6 are
# three in a row. Behind a colon stands which result it is (none: the first), or which operand.
RESULTS: dict[Route, str] = {}
OPERANDS: dict[Route, str] = {}

KEPT: tuple[str, ...] = ()  # primitives of other packages that stay as they are

# ---- the program ----


def make_mesh() -> Mesh:
    """The plan's mesh over the devices that are there."""
    devices = np.array([jax.devices()[i] for i in DEVICES], dtype=object)
    kinds = (AxisType.Auto,) * len(MESH)
    return Mesh(devices.reshape(tuple(MESH.values())), tuple(MESH), axis_types=kinds)


def shardings_for(tree: Any, at: str = "", specs: dict[str, P] | None = None) -> Any:
    """The sharding of each leaf; `at` is the path that the tree has in the step: "state"."""
    mesh, specs = make_mesh(), INPUTS if specs is None else specs

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        del leaf
        keys = [at] if at else []
        keys += [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
        name = "/".join(keys) or "out"
        if name not in specs:
            raise KeyError(f"the plan for {STEP} knows no {name!r}; it has {', '.join(specs)}")
        return NamedSharding(mesh, specs[name])

    return jax.tree_util.tree_map_with_path(sharding, tree)


def parallelize(step: Callable[..., Any], *args: Any) -> Any:
    """The step under jax.jit, laid out as planned; `args` are like its arguments, or shapes.

    It is called with positional arguments. Raises ValueError for another step than the plan's.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*map(unplaced, args))
    program, constants = Flattener(KEPT).whole(closed)
    check(program)

    def planned(*given: Any) -> Any:
        leaves = [*jax.tree.leaves(given), *constants]
        specs = [*INPUTS.values(), *CONSTANTS]
        laid = [Laid(x, spec) for x, spec in zip(leaves, specs, strict=True)]
        made = _Runner(make_mesh()).run(program, "", laid)
        return jax.tree.unflatten(jax.tree.structure(shapes), [m.array for m in made])

    planned.__name__ = STEP
    names = list(inspect.signature(step).parameters)
    named = zip([*names, *(f"arg{i}" for i in range(len(names), len(args)))], args, strict=False)
    return jax.jit(
        planned,
        in_shardings=tuple(shardings_for(arg, name) for name, arg in named),
        out_shardings=shardings_for(shapes, specs=OUTPUTS),
        donate_argnums=DONATED,
        compiler_options=compiler_options(),
    )


def compiler_options() -> dict[str, bool | int | str]:
    """The plan's options for the compiler of the devices that are there."""
    here = jax.devices()[DEVICES[0]].platform
    others = tuple(f"xla_{p}_" for p in ("cpu", "gpu", "tpu") if p != here)
    known = {n: v for n, v in COMPILER_OPTIONS.items() if not n.startswith(others)}
    if tuple(map(int, re.findall(r"\d+", jaxlib_version)[:3])) < (0, 11, 1):
        return known
    # Since then XLA has a mode for each kind of collectives where it had a switch.
    modes = {True: "COLLECTIVE_PIPELINING_MODE_ON", False: "COLLECTIVE_PIPELINING_MODE_DEFAULT"}
    switch = "xla_gpu_enable_pipelined_"
    return {
        n.replace(switch, "xla_gpu_pipeline_"): modes[bool(v)] if n.startswith(switch) else v
        for n, v in known.items()
    }


def check(program: Program) -> None:
    """Raise ValueError where the step is not the one that was planned."""
    kinds = list(program.kinds())
    if (len(kinds), zlib.crc32(" ".join(kinds).encode())) != EQUATIONS:
        raise ValueError(
            f"this is not the {STEP} that was planned: it has {len(kinds)} equations where that "
            f"had {EQUATIONS[0]}, or others. Export again from a plan for this step and this JAX."
        )


# ---- running it ----


class Laid(NamedTuple):
    """An array and its layout, None where XLA is free.

    One that is yet to be summed has a leading dim for each mesh axis that it is summed over.
    """

    array: Any
    spec: P | None = None
    over: tuple[str, ...] = ()


class _Runner:
    """Computes a program equation by equation, and holds values to their layouts."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._results, self._operands = dict(named(RESULTS)), dict(named(OPERANDS))
        self._env: dict[int, Laid] = {}
        self._moved: dict[tuple[int, Route], Laid] = {}
        self._kinds = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "checkpoint": self._remat,
            "remat2": self._remat,
            "optimization_barrier": self._barrier,
            "sharding_constraint": self._as_planned,
        }

    def run(self, program: Program, path: str, inputs: Iterable[Laid]) -> list[Laid]:
        """The outputs of a step or of a loop's body, for inputs that it holds to their layouts."""
        before, self._moved = self._moved, {}
        self._env.update(zip(program.inputs, map(self._held, inputs), strict=True))
        self._walk(program, path)
        outputs = [self._read(o, f"{path}out:{i}") for i, o in enumerate(program.outputs)]
        self._moved = before
        return outputs

    def _walk(self, program: Program, path: str) -> None:
        for number, equation in enumerate(program.equations):
            here, kind = f"{path}{number}", equation.eqn.primitive.name
            operands = [self._read(o, f"{here}:{i}") for i, o in enumerate(equation.operands)]
            results = self._kinds.get(kind, self._computed)(equation, here, operands)
            names = [f"{here}:{i}" for i in range(len(equation.results))]
            made = (
                self._along(x, self._results.get(name, ()))
                for x, name in zip(results, names, strict=True)
            )
            self._env.update(zip(equation.results, made, strict=True))

    # -- layouts --

    def _read(self, operand: int | Written, name: str) -> Laid:
        route = self._operands.get(name, ())
        if isinstance(operand, Written):
            return self._along(Laid(operand.value), route)
        if route and (operand, route) not in self._moved:
            self._moved[operand, route] = self._along(self._env[operand], route)
        return self._moved[operand, route] if route else self._env[operand]

    def _along(self, laid: Laid, route: Route) -> Laid:
        copies = 0
        for step in route:
            if isinstance(step, Again):
                copies = step.copies
                continue
            over, spec = step if isinstance(step, Sums) else ((), step)
            if copies and over != laid.over:  # terms are added up once more
                laid, copies = laid._replace(array=lax.optimization_barrier(laid.array)), 0
            if copies:
                laid, copies = self._apart(laid, spec, copies), 0
            elif over == laid.over:
                laid = self._held(Laid(laid.array, spec, over))
            elif len(over) > len(laid.over):
                laid = self._as_terms(laid, over, spec)
            else:
                laid = self._summed(laid, over, spec)
        return laid

    def _held(self, laid: Laid) -> Laid:
        if laid.spec is None:
            return laid
        sharding = NamedSharding(self._mesh, P(*laid.over, *laid.spec))
        return laid._replace(array=lax.with_sharding_constraint(laid.array, sharding))

    def _apart(self, laid: Laid, spec: P, copies: int) -> Laid:
        """Leading dims of 1 keep XLA:CPU, which drops barriers, from merging what is moved."""
        array = lax.optimization_barrier(laid.array)
        array = array.reshape((1,) * copies + array.shape)
        array = self._held(Laid(array, P(*(None,) * copies, *spec))).array
        return Laid(array.reshape(array.shape[copies:]), spec)

    def _on_pieces(
        self, fun: Callable[..., Any], operands: Sequence[Laid], over: tuple[str, ...], spec: P
    ) -> Laid:
        """The function that each device runs on its own pieces."""
        mapped = jax.shard_map(
            fun,
            mesh=self._mesh,
            in_specs=tuple(P(*x.over, *(x.spec or P())) for x in operands),
            out_specs=P(*over, *spec),
            check_vma=False,
        )
        return Laid(mapped(*(x.array for x in operands)), spec, over)

    def _as_terms(self, laid: Laid, over: tuple[str, ...], spec: P) -> Laid:
        """A value as the sum of itself and zeros, over some more mesh axes."""
        added = [axis for axis in over if axis not in laid.over]

        def kept_once(piece: Any) -> list[Any]:
            first = sum(lax.axis_index(axis) for axis in added) == 0
            return [jnp.where(first, piece, jnp.zeros_like(piece))]

        return self._in_terms(kept_once, [laid], over, spec)

    def _in_terms(
        self, run: Callable[..., list[Any]], operands: list[Laid], over: tuple[str, ...], spec: P
    ) -> Laid:
        """The results of an equation on pieces, to be summed over the mesh axes `over`."""

        def terms(*pieces: Any) -> Any:
            whole = (
                piece.reshape(piece.shape[len(x.over) :])
                for piece, x in zip(pieces, operands, strict=True)
            )
            return run(*whole)[0][(None,) * len(over)]

        return self._on_pieces(terms, operands, over, spec)

    def _summed(self, laid: Laid, over: tuple[str, ...], after: P) -> Laid:
        """The sum over some axes; scattered where a dim is then cut along them."""
        lost, kept = tuple(a for a in laid.over if a not in over), (1,) * len(over)
        gained = [_cut(after, d)[len(_cut(laid.spec or P(), d)) :] for d in range(len(after))]
        dim = next((d for d, axes in enumerate(gained) if {*axes} == {*lost}), -1)

        def combined(piece: Any) -> Any:
            piece = piece.reshape(kept + piece.shape[len(laid.over) :])
            if dim < 0:
                return lax.psum(piece, lost)
            at = len(kept) + dim
            return lax.psum_scatter(piece, gained[dim], scatter_dimension=at, tiled=True)

        return self._on_pieces(combined, [laid], over, after)

    # -- equations --

    def _computed(self, equation: Equation, here: str, operands: list[Laid]) -> list[Laid]:
        route = self._results.get(f"{here}:0", ())
        over = next((x.over for x in operands if x.over), ())
        run: Callable[..., list[Any]] = _bound(equation)
        if route and isinstance(route[0], Sums) and route[0].over != over:
            return [self._in_terms(run, operands, *route[0])]
        operands = _spread(operands) if over else operands
        for _ in over:
            run = jax.vmap(run, in_axes=tuple(0 if x.over else None for x in operands))
        results = run(*(x.array for x in operands))
        return [Laid(y, None if route else _followed(y, operands), over) for y in results]

    def _as_planned(self, equation: Equation, here: str, given: list[Laid]) -> list[Laid]:
        """Puts what the plan decided in the place of what the user asked for."""
        del equation, here
        return given

    def _barrier(self, equation: Equation, here: str, operands: list[Laid]) -> list[Laid]:
        del equation, here
        arrays = lax.optimization_barrier([x.array for x in operands])
        return [x._replace(array=a) for x, a in zip(operands, arrays, strict=True)]

    def _remat(self, equation: Equation, here: str, operands: list[Laid]) -> list[Laid]:
        body = equation.bodies[0]
        if equation.eqn.params.get("prevent_cse", True):
            operands = self._barrier(equation, here, operands)
        self._env.update(zip(body.inputs, operands, strict=True))
        self._walk(body, f"{here}/0/")
        return [self._read(o, "") for o in body.outputs]

    def _scan(self, equation: Equation, here: str, operands: list[Laid]) -> list[Laid]:
        params = equation.eqn.params
        const_count, start = _scan_starts(params)
        consts, first = operands[:const_count], operands[const_count:start]
        scanned, made = operands[start:], list[Laid]()

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            before = [x._replace(array=a) for x, a in zip(first, carry, strict=True)]
            rows = [_row(x, a) for x, a in zip(scanned, slices, strict=True)]
            made[:] = self.run(equation.bodies[0], f"{here}/0/", [*consts, *before, *rows])
            arrays = [x.array for x in made]
            return arrays[: len(first)], arrays[len(first) :]

        carry, stacked = lax.scan(
            body,
            [x.array for x in first],
            [jnp.moveaxis(x.array, len(x.over), 0) for x in scanned],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        last = [x._replace(array=a) for x, a in zip(first, carry, strict=True)]
        return [*last, *map(_stack, made[len(first) :], stacked)]

    def _while(self, equation: Equation, here: str, operands: list[Laid]) -> list[Laid]:
        params = equation.eqn.params
        tests, bodies = params["cond_nconsts"], params["body_nconsts"]
        first = operands[tests + bodies :]

        def run(number: int, consts: list[Laid], carry: list[Any]) -> list[Any]:
            given = [*consts, *(x._replace(array=a) for x, a in zip(first, carry, strict=True))]
            return [x.array for x in self.run(equation.bodies[number], f"{here}/{number}/", given)]

        carry = lax.while_loop(
            lambda carry: run(0, operands[:tests], carry)[0],
            lambda carry: run(1, operands[tests : tests + bodies], carry),
            [x.array for x in first],
        )
        return [x._replace(array=a) for x, a in zip(first, carry, strict=True)]

    def _cond(self, equation: Equation, here: str, operands: list[Laid]) -> list[Laid]:
        (which, *given), made = operands, list[Laid]()

        def branch(number: int, *arrays: Any) -> list[Any]:
            laid = [x._replace(array=a) for x, a in zip(given, arrays, strict=True)]
            made[:] = self.run(equation.bodies[number], f"{here}/{number}/", laid)
            return [x.array for x in made]

        branches = [functools.partial(branch, n) for n in range(len(equation.bodies))]
        platforms = equation.eqn.params.get("branches_platforms")
        if platforms is None:
            arrays = lax.switch(which.array, branches, *(x.array for x in given))
        else:
            named = zip(platforms, branches, strict=True)
            arrays = lax.platform_dependent(
                *(x.array for x in given),
                **{name: branch for names, branch in named for name in names or ("default",)},
            )
        return [x._replace(array=a) for x, a in zip(made, arrays, strict=True)]


def _spread(operands: list[Laid]) -> list[Laid]:
    """Operands of one shape: vmap knows no scalar that stands for a whole array."""
    shapes = [np.shape(x.array)[len(x.over) :] for x in operands]
    if len(shapes) != 2 or () not in shapes:
        return operands
    whole = max(shapes, key=len)
    return [
        x if shape or x.over else Laid(jnp.broadcast_to(x.array, whole))
        for x, shape in zip(operands, shapes, strict=True)
    ]


def _bound(equation: Equation) -> Callable[..., list[Any]]:
    """The equation's primitive as a function; what it says of the user's meshes is left out."""
    primitive, params = equation.eqn.primitive, dict(equation.eqn.params)
    params.update({name: None for name in params if name == "out_sharding"})
    prints = primitive.name in ("debug_callback", "debug_print")
    if prints and (params.get("ordered") or "Ordered" in str(params.get("effect"))):
        # JAX orders its prints on one device alone, and io_callback on any number.
        call = functools.partial(primitive.impl, **params)
        return lambda *operands: list(io_callback(call, (), *operands, ordered=True))

    def run(*operands: Any) -> list[Any]:
        out = primitive.bind(*operands, **params)
        return list(out) if primitive.multiple_results else [out]

    return run


def _cut(spec: P, dim: int) -> tuple[str, ...]:
    """The axes that a dim is cut along."""
    entry = spec[dim] if dim < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _followed(result: Any, operands: list[Laid]) -> P | None:
    """The layout of an element-wise result that no table names: that of its operands."""
    alike = (x.spec for x in operands if np.shape(x.array) == np.shape(result))
    return next((spec for spec in alike if spec is not None), None)


def _scan_starts(params: dict[str, Any]) -> tuple[int, int]:
    """The places of a scan's first carried and first sliced operand, behind its constants.

    From JAX 0.12 on, scan keeps trees of its operands in place of their numbers.
    """
    if "ft_in" in params:
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
        return consts, consts + carry
    return params["num_consts"], params["num_consts"] + params["num_carry"]


def _row(stacked: Laid, array: Any) -> Laid:
    spec = stacked.spec
    return Laid(array, None if spec is None else P(*tuple(spec)[1:]), stacked.over)


def _stack(row: Laid, stacked: Any) -> Laid:
    spec = None if row.spec is None else P(None, *row.spec)
    return Laid(jnp.moveaxis(stacked, 0, len(row.over)), spec, row.over)
