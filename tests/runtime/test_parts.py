"""A part combines what it accumulates, and is the same program wherever it is the same part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import GraphError
from autopar.frontend import StepSpec, trace
from autopar.ir.batching import Accumulator
from autopar.ir.graph import Graph
from autopar.ir.listing import Block, Listing, LocalOp, Loop
from autopar.ir.program import Part, PartKind, PartProgram
from autopar.ir.sharding import MeshShape, Sharding
from autopar.runtime.bind import ArrayType, bind_mesh, shape_with_axis
from autopar.runtime.compile import Portable, compile_parts, program_cache_key
from autopar.runtime.interface import Interface
from autopar.runtime.parts import PartSource, abstract_mesh, dtype_of, neutral, unwritten

ROWS, SUMS = Sharding((("data",),)), Sharding(((),), ("data",))


def source(
    fun: Callable[..., Any], *args: Any, combiner: str = "", dtype: str = "", **made: Any
) -> PartSource:
    """A function as a part on two devices; its one output may be accumulated.

    Values are vectors that lie in rows, but where they are all `whole` or are said how they lie.
    """
    traced = trace(StepSpec(fun), args, {})
    graph: Graph = traced.graph
    (output,) = graph.outputs
    lies, is_whole = made.get("lies", ROWS), made.get("whole", False)
    shardings = {
        name: Sharding(((),) * len(value.shape)) if is_whole else lies
        for name, value in graph.values.items()
    }
    steps = tuple(
        LocalOp(
            (i,),
            tuple(o if isinstance(o, str) else None for o in op.operands),
            tuple(r.name for r in op.results),
            tuple(shardings.get(str(o), Sharding(())) for o in op.operands),
            tuple(shardings[r.name] for r in op.results),
        )
        for i, op in enumerate(graph.ops)
    )
    names = tuple(i.value.name for i in graph.inputs)
    listing = Listing(
        Block(names, steps, (str(output),)),
        tuple(shardings[n] for n in names),
        (shardings[str(output)],),
    )
    sums = (Accumulator(str(output), 0, combiner, dtype),) if combiner else ()
    part = Part(
        PartKind.FORWARD, made.get("stage", 0), made.get("submesh", 0), graph,
        tuple(range(len(graph.ops))), accumulators=sums,
    )  # fmt: skip
    program = PartProgram(part, listing, made.get("donated", ()))
    return PartSource(traced.program, program, MeshShape.of(2), "cpu")


def run(made: PartSource, devices: list[jax.Device], *args: Any) -> Any:
    """The outputs of a part that is compiled for the first two devices, token left out."""
    mesh = bind_mesh(made.mesh, range(2), devices)
    (program,), _ = compile_parts([made], [mesh])
    kinds = (*made.inputs, *made.accumulators)
    placed = [jax.device_put(a, k.sharding(mesh)) for a, k in zip(args, kinds, strict=True)]
    *outputs, token = program(*placed)
    assert token.shape == ()
    return outputs, placed


def double(x: Any) -> Any:
    return x + x


NUMBERS = np.array([1, -2, 3, 4], np.float32)


@pytest.mark.parametrize(
    ("combiner", "combine"),
    [("sum", np.add), ("max", np.maximum), ("min", np.minimum), ("mul", np.multiply)],
)
def test_every_combiner_starts_from_what_changes_nothing(
    combiner: str, combine: Any, devices: list[jax.Device]
) -> None:
    made = source(double, NUMBERS, combiner=combiner)
    (kind,) = made.accumulators
    (first,), _ = run(made, devices, NUMBERS, neutral(combiner, kind))
    np.testing.assert_array_equal(first, 2 * NUMBERS)
    (second,), placed = run(made, devices, -NUMBERS, np.asarray(first))
    np.testing.assert_array_equal(second, combine(2 * NUMBERS, -2 * NUMBERS))
    assert placed[1].is_deleted()
    assert not placed[0].is_deleted()


@pytest.mark.parametrize(
    ("combiner", "wanted"),
    [("and", [True, False, False, False]), ("or", [True, True, True, False])],
)
def test_truth_is_accumulated(combiner: str, wanted: list[bool], devices: list[jax.Device]) -> None:
    given = np.array([True, True, False, False])
    made = source(lambda x: x & x, given, combiner=combiner)
    (kind,) = made.accumulators
    np.testing.assert_array_equal(neutral(combiner, kind), [combiner == "and"] * 4)
    held = np.array([True, False, True, False])
    (got,), _ = run(made, devices, given, held)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("combiner", ["max", "min"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.bfloat16])
def test_neutral_values_of_other_types(combiner: str, dtype: Any) -> None:
    kind = ArrayType((), jnp.dtype(dtype), jax.sharding.PartitionSpec())
    combine = {"max": jnp.maximum, "min": jnp.minimum}[combiner]
    for x in (jnp.ones((), dtype), jnp.zeros((), dtype)):
        assert combine(neutral(combiner, kind), x) == x


def test_what_is_no_combiner_or_no_number_is_refused() -> None:
    with pytest.raises(GraphError, match="nothing is accumulated by 'median'"):
        neutral("median", ArrayType((), jnp.dtype("f4"), jax.sharding.PartitionSpec()))
    with pytest.raises(GraphError, match="nothing is accumulated in 'key<fry>'"):
        dtype_of("key<fry>")


def test_a_sum_may_be_wider_than_its_summands(devices: list[jax.Device]) -> None:
    given = jnp.asarray(NUMBERS, jnp.bfloat16)
    made = source(double, given, combiner="sum", dtype="f32")
    (kind,) = made.accumulators
    assert kind.dtype == jnp.float32
    (got,), _ = run(made, devices, given, np.full(4, 1 / 3, np.float32))
    np.testing.assert_array_equal(got, np.float32(1 / 3) + 2 * NUMBERS)


@pytest.mark.parametrize(
    ("fun", "is_rounded"),
    [
        (lambda x, y: x @ y, False),
        (lambda x, y: (x @ y).T.reshape(2, 1, 2), False),
        (lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(x.dtype), False),
        (lambda x, y: -(x @ y), True),
        (lambda x, y: (x @ y).astype(jnp.float8_e4m3fn).astype(x.dtype), True),
    ],
)
def test_a_product_is_made_as_wide_as_its_sum(
    devices: list[jax.Device], fun: Callable[..., Any], is_rounded: bool
) -> None:
    """It is not rounded before it is added, unless more is computed of it than views."""
    x = jnp.asarray([[1 + 2**-7, 2], [3, 1 - 2**-7]], jnp.bfloat16)
    exact = fun(x.astype(jnp.float32), x.astype(jnp.float32))
    rounded = np.asarray(fun(x, x), np.float32)
    assert is_rounded or not np.array_equal(exact, rounded)
    made = source(fun, x, x, combiner="sum", dtype="f32", whole=True)
    (got,), _ = run(made, devices, x, x, np.ones(rounded.shape, np.float32))
    np.testing.assert_array_equal(got, 1 + (rounded if is_rounded else exact))


def test_partial_sums_lie_as_a_stack(devices: list[jax.Device]) -> None:
    made = source(double, NUMBERS, combiner="sum", lies=SUMS)
    assert made.inputs[0].shape == made.accumulators[0].shape == (2, 4)
    stack = np.stack([NUMBERS, 10 * NUMBERS])
    (got,), _ = run(made, devices, stack, np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(got, 1 + 2 * stack)


def test_only_what_an_output_can_take_is_donated(devices: list[jax.Device]) -> None:
    made = source(lambda x, y: x + y, NUMBERS, NUMBERS, donated=(0, 1))
    assert made.donated == (0,)
    _, placed = run(made, devices, NUMBERS, NUMBERS)
    assert [p.is_deleted() for p in placed] == [True, False]
    assert replace(made, kept=frozenset({0})).donated == (1,)
    assert replace(made, kept=frozenset({0, 1})).donated == ()


def same(left: PartSource, right: PartSource) -> bool:
    return program_cache_key(left) == program_cache_key(right)


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor + 1


def test_parts_are_alike_whatever_their_names() -> None:
    def dead_code_first(x: Any, y: Any) -> Any:
        return jnp.tanh(y) * x

    assert same(source(scaled(2), NUMBERS), source(scaled(2), NUMBERS, stage=3, submesh=1))
    assert same(
        source(dead_code_first, NUMBERS, NUMBERS),
        source(lambda a, b: jnp.tanh(b) * a, NUMBERS, NUMBERS),
    )


@pytest.mark.parametrize(
    "other",
    [
        source(scaled(3), NUMBERS),
        source(scaled(2), NUMBERS[:2]),
        source(scaled(2), NUMBERS, combiner="sum"),
        source(scaled(2), NUMBERS, combiner="max"),
        source(scaled(2), NUMBERS, donated=(0,)),
        source(scaled(2), NUMBERS, lies=Sharding(((),))),
        replace(source(scaled(2), NUMBERS), mesh=MeshShape.of(4)),
    ],
    ids=["literal", "shape", "accumulates", "combiner", "donates", "sharding", "mesh"],
)
def test_parts_differ_by_anything_that_is_compiled(other: PartSource) -> None:
    assert not same(source(scaled(2), NUMBERS), other)


def test_a_program_moves_to_other_devices(devices: list[jax.Device]) -> None:
    made = source(lambda x: jax.lax.sort(x * 2), NUMBERS, lies=Sharding(((),)))
    meshes = [bind_mesh(MeshShape.of(2), range(2), devices[s : s + 2]) for s in (0, 4)]
    (here,), _ = compile_parts([made], meshes)
    portable = Portable(here)
    there = portable.on(devices[4:6])
    assert there is not None
    array, _ = there(jax.device_put(NUMBERS, made.inputs[0].sharding(meshes[1])))
    assert array.devices() == set(devices[4:6])
    np.testing.assert_array_equal(array, np.sort(NUMBERS * 2))
    assert portable.on(devices[4:7]) is None


def _stacking(x: jax.Array) -> Any:
    """Scans that stack what they make, forwards and backwards, one of keys, one in another."""

    def trip(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, Any]:
        key = jax.random.fold_in(jax.random.key(3), row[0].astype("int32"))
        inner = jax.lax.scan(lambda c, r: (c + r, c * r), carry[0], row)
        return carry + row, (carry * 2, key, inner[1])

    def turned(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry - row, carry * row

    _, (made, keys, inner) = jax.lax.scan(trip, x[0], x)
    _, back = jax.lax.scan(turned, x[0], x, reverse=True)
    _, none = jax.lax.scan(turned, x[0], x[:0])
    _, two = jax.lax.scan(turned, x[0], x, unroll=2)
    draws = jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys)
    return made, draws, inner, back, none, two


def test_a_stack_may_begin_as_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its rows are written before any is read."""

    def dirty(shape: Any, dtype: Any, platform: str) -> jax.Array:
        begun = unwritten(shape, dtype, platform)
        return (
            begun if jnp.issubdtype(dtype, jax.dtypes.extended) else begun + jnp.asarray(77, dtype)
        )

    monkeypatch.setattr("autopar.runtime.parts.unwritten", dirty)
    x = np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32)
    given = jax.jit(lambda x: (x, _stacking(x)))(x)
    found = autopar.parallelize(lambda x: (x, _stacking(x)), mesh=1, cluster="1xcpu")(x)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(("platform", "found"), [("gpu", 2), ("cpu", 0)])
def test_stacks_on_gpus_begin_as_memory_that_is_found(platform: str, found: int) -> None:
    def step(x: jax.Array) -> tuple[jax.Array, Any]:
        return x, jax.lax.scan(lambda c, r: (c + r, (c * r, c - r)), x[0], x)

    planned = autopar.parallelize(step, cluster="1xh100").planned(
        jax.ShapeDtypeStruct((5, 4), "float32")
    )
    mesh = shape_with_axis(planned.plan.mesh)
    (part,) = Interface(planned.trace, planned.program, (mesh,)).sources(platform, True)
    bound = abstract_mesh(mesh)
    traced = part.jitted(bound).trace(*(t.on(bound) for t in part.given))
    lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
    assert lowered.as_text().count("AllocateBuffer") == found


def test_a_product_may_be_made_with_its_operands_swapped() -> None:
    """The listing says so for GPUs; what is made is the same."""

    def step(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = jnp.einsum("btkgc,bskc->bkgts", q, k, precision=("highest", "high"))
        return q, jax.nn.softmax(made)

    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 6, 3, 4, 5), dtype=np.float32)
    k = rng.standard_normal((2, 7, 3, 5), dtype=np.float32)
    wanted = jax.jit(step)(q, k)[1]
    planned = autopar.parallelize(step, cluster="1xh100").planned(q, k)
    (part,) = planned.program.parts
    assert str(part.listing).count(" swapped(") == 1
    mesh = shape_with_axis(planned.plan.mesh)
    (source,) = Interface(planned.trace, planned.program, (mesh,)).sources("cpu", False)
    _, scores = source.jitted(bind_mesh(mesh, (0,)))(q, k)
    np.testing.assert_allclose(np.asarray(scores), np.asarray(wanted), rtol=1e-5, atol=1e-6)
    before, after = (
        next(e for e in jaxpr.eqns if e.primitive.name == "dot_general")
        for jaxpr in (jax.make_jaxpr(step)(q, k), jax.make_jaxpr(source.local())(q, k))
    )
    assert [v.aval.shape for v in before.invars] == [k.shape, q.shape]
    assert [v.aval.shape for v in after.invars] == [q.shape, k.shape]
    assert after.params["precision"] == before.params["precision"][::-1]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 6, 16, 49, 100]), min_size=1, max_size=3),
    columns=st.sampled_from([1, 32, 130]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_sums_of_rows_may_be_made_in_parts(shape: list[int], columns: int, dtype: str) -> None:
    """Whatever the rows are: the same to the rounding of sums, which are f32 within."""

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, jnp.sum(jnp.tanh(x), axis=tuple(range(x.ndim - 1)))

    given = jnp.asarray(np.random.default_rng(0).standard_normal((*shape, columns)), dtype)
    wanted = jnp.sum(jnp.tanh(given.astype("float32")), axis=tuple(range(len(shape))))
    planned = autopar.parallelize(step, cluster="1xh100").planned(given)
    (part,) = planned.program.parts
    runs = [s for s in part.listing.block.instructions if isinstance(s, LocalOp) and s.parts]
    assert len(runs) <= 1
    mesh = shape_with_axis(planned.plan.mesh)
    (source,) = Interface(planned.trace, planned.program, (mesh,)).sources("cpu", False)
    _, found = source.jitted(bind_mesh(mesh, (0,)))(given)
    # A sum near zero is as far off as the sums of what cancels out in it.
    sizes = jnp.sum(jnp.abs(jnp.tanh(given.astype("float32"))), axis=tuple(range(len(shape))))
    rtol, atol = (1e-5, 1e-6 * float(sizes.max())) if dtype == "float32" else (8e-3, 0.05)
    np.testing.assert_allclose(
        np.asarray(found, "float32"), np.asarray(wanted), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((8, 28, 28, 64), ()),  # XLA splits such long columns itself
        ((4, 28, 28, 64), (4, 28)),
        ((2, 1024, 768), (2, 8)),  # of 12 blocks each
        ((2048, 768), (16,)),
        ((49, 64), ()),  # too little to be worth a kernel
        ((16, 64, 32768), ()),  # enough columns
    ],
)
def test_sums_of_rows_are_made_in_parts_that_fill_a_gpu(
    shape: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, jnp.sum(jnp.tanh(x), axis=tuple(range(x.ndim - 1)))

    for cluster, wanted in (("1xh100", parts), ("v5e:1x1", ())):
        planned = autopar.parallelize(step, cluster=cluster).planned(
            jax.ShapeDtypeStruct(shape, "bfloat16")
        )
        (part,) = planned.program.parts
        runs = [s for s in part.listing.block.instructions if isinstance(s, LocalOp)]
        assert {s.parts for s in runs if s.parts} == {wanted} - {()}
        marks = [f" in {'x'.join(map(str, wanted))} parts("] if wanted else []
        assert all(str(part.listing).count(mark) == 1 for mark in marks)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 3])] * 7),
    one=st.permutations("bcklno"),
    other=st.permutations("bcklm"),
    made=st.permutations("bcmno"),
)
def test_products_and_transposes_leave_dims_of_one_item_out(
    sizes: Sequence[int], one: Sequence[str], other: Sequence[str], made: Sequence[str]
) -> None:
    """XLA counts such dims where a product sums up several dims, or keeps several."""
    size = dict(zip("bcklmno", sizes, strict=True))
    terms = f"{''.join(one)},{''.join(other)}->{''.join(made)}"

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, jax.nn.softmax(jnp.einsum(terms, x, y))

    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal([size[d] for d in dims], "f4") for dims in (one, other))
    planned = autopar.parallelize(step, cluster="1xh100").planned(x, y)
    mesh = shape_with_axis(planned.plan.mesh)
    (source,) = Interface(planned.trace, planned.program, (mesh,)).sources("cpu", False)
    wanted, (_, found) = jax.jit(step)(x, y)[1], source.jitted(bind_mesh(mesh, (0,)))(x, y)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-6)
    for equation in jax.make_jaxpr(source.local())(x, y).eqns:
        if equation.primitive.name in ("dot_general", "transpose"):
            assert all(1 not in v.aval.shape for v in equation.invars)


def test_wide_products_of_narrow_ones_are_added_and_turned_over_on_cpus() -> None:
    """XLA:CPU cannot run a bf16 product of several dims that is made in f32 and turned over."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.square(x @ w), dtype="f4"))(w)
        return w - gradient, loss

    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((4, 8)), "bfloat16")
    x = jnp.asarray(rng.standard_normal((8, 6, 3, 4)), "bfloat16")
    wanted = jax.jit(step)(w, x)[0]
    found, _ = autopar.parallelize(step, cluster="1xcpu", microbatches=4, donate=False)(w, x)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=0.02, atol=0.1
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_take_what_is_gathered_as_it_lies(reverse: bool) -> None:
    """The listing says so for GPUs; what is made is the same, but for what loops inside read."""

    def step(ws: dict[str, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(ws: dict[str, jax.Array]) -> jax.Array:
            def layer(c: jax.Array, pair: Any) -> tuple[jax.Array, jax.Array]:
                def again(c: jax.Array, _: None) -> tuple[jax.Array, None]:
                    return jnp.tanh(c @ ws["inner"]), None

                c = jnp.tanh(c @ pair[0]) @ ws["shared"] + c @ pair[1].T
                return jax.lax.scan(again, c, length=2)[0], jnp.sum(c)

            y, sums = jax.lax.scan(layer, x, (ws["a"], ws["b"]), reverse=reverse)
            return jnp.mean(y**2) + 0.1 * jnp.mean(sums)

        made, grads = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), made

    rng = np.random.default_rng(0)
    shapes = {"a": (3, 32, 32), "b": (3, 32, 32), "shared": (32, 32), "inner": (32, 32)}
    ws = {k: 0.2 * rng.standard_normal(s, dtype=np.float32) for k, s in shapes.items()}
    x = rng.standard_normal((64, 32), dtype=np.float32)
    pins = {
        "ws/a": (None, None, "data"), "ws/b": (None, "data", None),
        "ws/shared": (None, "data"), "ws/inner": (None, "data"), "x": ("data", None),
    }  # fmt: skip
    planned = autopar.parallelize(step, cluster="8xh100", mesh=8, pins=pins).planned(ws, x)
    (part,) = planned.program.parts
    loop = next(s for s in part.listing.block.instructions if isinstance(s, Loop))
    assert sorted(dim for _, dim in loop.turned) == [1, 1, 2]  # and "inner" is in order
    mesh = shape_with_axis(planned.plan.mesh)
    (source,) = Interface(planned.trace, planned.program, (mesh,)).sources("cpu", False)
    *found, loss = source.jitted(bind_mesh(mesh, tuple(range(8))))(*jax.tree.leaves(ws), x)
    wanted, made = jax.jit(step)(ws, x)
    np.testing.assert_allclose(np.asarray(loss), np.asarray(made), rtol=1e-5)
    for new, old in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(new), np.asarray(old), rtol=1e-4, atol=1e-6)
