"""Products of one value that XLA for GPUs merges: which, and whether that pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.cost.kernels import COPY, stored_kernels
from autopar.cost.merged_products import (
    products_alike,
    seconds_saved_by_merging,
    with_products_merged,
)
from autopar.cost.prices import Prices, elementwise_seconds, product_seconds
from autopar.cost.sizes import Sizes
from autopar.ir.compiler_options import MERGED_PRODUCTS, merged_options
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import programs_of
from tests.runtime.aot_programs import needs_gpu_compiler

H100, TWO = Cluster.parse("1xh100"), Cluster.parse("2xh100")


def planned(step: Any, *arguments: Any, devices: int = 1, **options: Any) -> Planned:
    cluster = f"{devices}xh100"
    return autopar.parallelize(step, cluster=cluster, cache=False, **options).planned(*arguments)


def saved(found: Planned) -> float:
    """Seconds that merging saves in a step that is one program."""
    (program,) = found.program.parts
    mesh = found.plan.mesh
    sizes = Sizes(program.part.graph, mesh, "gpu")
    prices = Prices(H100, mesh)
    return seconds_saved_by_merging(program.listing.block, prices, sizes)


def arrays(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def one_by_one(rows: int, columns: list[int], terms: int, itemsize: int = 2) -> float:
    """Seconds that one product saves in place of some, by hand."""

    def seconds(n: int) -> float:
        nbytes = itemsize * (rows * terms + terms * n + rows * n)
        return product_seconds(H100.chip, (1, rows, n, terms), nbytes, "bf16")

    copies = elementwise_seconds(H100.chip, 2 * itemsize * terms * sum(columns))
    return sum(map(seconds, columns)) - seconds(sum(columns)) - copies


@pytest.mark.parametrize("columns", [[256, 256, 256], [512, 128, 128]])
def test_products_of_one_value_are_merged(columns: list[int]) -> None:
    def step(state: Any, x: Any) -> Any:
        return state, [jnp.tanh(x @ w) for w in state]

    found = planned(step, arrays(*((1024, n) for n in columns)), *arrays((2048, 1024)))
    assert saved(found) == pytest.approx(one_by_one(2048, columns, 1024), rel=1e-9)


def test_those_of_one_weight_are_merged_along_their_rows() -> None:
    def step(w: Any, batch: Any) -> Any:
        return w, [jnp.tanh(x @ w) for x in batch]

    found = planned(step, *arrays((1024, 512)), arrays((256, 1024), (384, 1024)))
    seconds = [
        product_seconds(H100.chip, (1, n, 512, 1024), 2 * (n * 1536 + 1024 * 512), "bf16")
        for n in (256, 384, 640)
    ]
    copies = elementwise_seconds(H100.chip, 2 * 2 * 640 * 1024)
    assert saved(found) == pytest.approx(seconds[0] + seconds[1] - seconds[2] - copies, rel=1e-9)


def test_a_product_of_another_is_not_merged_with_it() -> None:
    """As of a weight that is used twice in a row."""

    def step(w: Any, x: Any) -> Any:
        return w, jnp.tanh(jnp.tanh(x @ w) @ w)

    assert saved(planned(step, *arrays((512, 512), (256, 512)))) == 0.0


def test_a_value_that_is_summed_along_another_dim_is_another() -> None:
    def step(ws: Any, x: Any) -> Any:
        return ws, (jnp.tanh(x @ ws[0]), jnp.tanh(jnp.einsum("ab,ac->bc", x, ws[1])))

    assert saved(planned(step, arrays((512, 256), (512, 256)), *arrays((512, 512)))) == 0.0


def test_large_products_stay_apart() -> None:
    """Each of them takes more than 64 MiB, but for the last two, of which either is small."""

    def step(state: Any, x: Any) -> Any:
        return state, [jnp.tanh(x @ w) for w in state]

    large, small = (4096, 4096), (4096, 16)
    assert saved(planned(step, arrays(large, large), *arrays((4096, 4096)))) == 0.0
    found = saved(planned(step, arrays(large, small), *arrays((4096, 4096))))
    assert found == pytest.approx(one_by_one(4096, [4096, 16], 4096), rel=1e-9)


def test_each_trip_of_a_loop_counts() -> None:
    def once(x: Any, ws: Any) -> Any:
        return jnp.tanh(x @ ws[0]) + jnp.tanh(x @ ws[1]), None

    def step(state: Any, x: Any) -> Any:
        return state, jax.lax.scan(once, x, state)[0]

    found = planned(step, arrays((6, 512, 512), (6, 512, 512)), *arrays((1024, 512)))
    assert saved(found) == pytest.approx(6 * one_by_one(1024, [512, 512], 512), rel=1e-9)


def test_products_that_are_only_cast_had_better_be_merged() -> None:
    """XLA would write each in f32, and take that for much longer than it is."""

    def step(state: Any, x: Any) -> Any:
        return state, [(x @ w).T.astype(jnp.float32) for w in state]

    found = planned(step, arrays((4096, 1024), (4096, 1024)), *arrays((2048, 4096)))
    assert saved(found) > 10 * abs(one_by_one(2048, [1024, 1024], 4096))
    assert MERGED_PRODUCTS not in dict(found.plan.compiler_options)


def attended(width: int, rows: int) -> Planned:
    """A step of queries, keys and values, of half the rows on each of two devices."""

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> jax.Array:
            query, key, value = (x @ w for w in ws)
            return jnp.mean((jnp.tanh(query) * jnp.tanh(key) * value).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws)), ()

    weights = arrays(*[(width, width)] * 3)
    return planned(step, weights, *arrays((rows, width)), devices=2, mesh="2", method="dp")


CASES = {"narrow": (768, 16384, True), "wide": (4096, 4096, False)}


@pytest.mark.parametrize(("width", "rows", "pays"), CASES.values(), ids=CASES)
def test_a_plan_has_them_merged_where_that_pays(width: int, rows: int, pays: bool) -> None:
    found = attended(width, rows)
    assert (MERGED_PRODUCTS in dict(found.plan.compiler_options)) is not pays


def test_what_is_asked_for_is_put_over_it() -> None:
    def step(ws: Any, x: Any) -> Any:
        return ws, [x @ w for w in ws]

    wanted = {MERGED_PRODUCTS: 16}
    found = planned(step, arrays((4096, 4096)), *arrays((8, 4096)), compiler_options=wanted)
    assert dict(found.plan.compiler_options)[MERGED_PRODUCTS] == 16


@needs_gpu_compiler
@pytest.mark.parametrize(("width", "rows", "pays"), CASES.values(), ids=CASES)
def test_xla_has_it_so(width: int, rows: int, pays: bool) -> None:
    found = attended(width, rows)
    (program,) = programs_of(found, TWO, Target.of(TWO))
    export: Any = program.export
    others = tuple(o for o in found.plan.compiler_options if o[0] != MERGED_PRODUCTS)
    apart, merged = (
        compile_ahead(replace(export(), options=options)).seconds
        for options in (merged_options(others, ((MERGED_PRODUCTS, 0),)), others)
    )
    assert apart is not None
    assert merged is not None
    assert (merged < apart) is pays


HELD = {"merged": (64, 5), "apart": (0, 3)}


def gated(threshold: int) -> Planned:
    """A step that reads one of three products at last, which are merged below a threshold."""

    def step(ws: Any, x: Any) -> Any:
        one, other, third = (x @ w for w in ws)
        h = jnp.tanh(one)
        for _ in range(2):
            h = jnp.tanh(h @ ws[0])
        return ws, jnp.mean((h * other * jnp.tanh(third)).astype(jnp.float32))

    return planned(
        step, arrays(*[(512, 512)] * 3), *arrays((16384, 512)),
        compiler_options={MERGED_PRODUCTS: threshold},
    )  # fmt: skip


@pytest.mark.parametrize(("threshold", "count"), HELD.values(), ids=HELD)
def test_merged_products_are_held_until_the_last_of_them_is_read(
    threshold: int, count: int
) -> None:
    """All three beside what two more products read and make, and not the two that wait alone."""
    prediction = gated(threshold).plan.prediction
    held = prediction.peak_bytes - prediction.argument_bytes
    assert held == pytest.approx(count * 2 * 16384 * 512, rel=0.01)


@needs_gpu_compiler
@pytest.mark.parametrize(("threshold", "count"), HELD.values(), ids=HELD)
def test_xla_holds_them_as_long(threshold: int, count: int) -> None:
    (program,) = programs_of(gated(threshold), H100, Target.of(H100))
    export: Any = program.export
    scratch = 4 << 20  # which BLAS may work in
    held = compile_ahead(export()).peak_bytes - program.argument_bytes - scratch
    assert held == pytest.approx(count * 2 * 16384 * 512, rel=0.01)


def test_what_products_read_of_merged_ones_is_cut_out() -> None:
    """Of what is computed item by item nothing is."""

    def step(ws: Any, x: Any) -> Any:
        one, other = (x @ w for w in ws)
        return ws, (one @ other.T, jnp.tanh(other))

    found = planned(step, arrays((512, 512), (512, 512)), *arrays((1024, 512)))
    (program,) = found.program.parts
    sizes = Sizes(program.part.graph, found.plan.mesh, "gpu")
    block, given = program.listing.block, sizes.inputs(program.listing)
    stored = stored_kernels(block, sizes, given, lambda *_: 0)
    merged = with_products_merged(stored, products_alike(block, sizes))
    weights = [i.value.name for i in program.part.graph.inputs[:2]]
    one, other = (k.makes[0] for w in weights for k in stored.kernels if w in k.reads)
    makers = {name: k for k in merged.kernels for name in k.makes}
    both = f"{one} and 1 more"
    assert merged.nbytes[both] == stored.nbytes[one] + stored.nbytes[other]
    assert merged.nbytes[f"{both} read"] == 2 * 2 * 512 * 512
    assert (makers[one].at, makers[one].reads) == (COPY, frozenset((both,)))
    # What turns the other one over, and tanh, read their part themselves.
    light = [k for k in merged.kernels if both in k.reads and k.at >= 0]
    assert other not in makers
    assert len(light) == 2
