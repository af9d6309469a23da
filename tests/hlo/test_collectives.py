"""Collectives read off HLO: really compiled for 8 CPU devices, and as GPU and TPU spell them."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.hlo.collectives import compiled_collectives, read_collectives
from autopar.hlo.tensors import HloCollective
from autopar.ir.sharding import MeshShape

ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    if len(jax.devices()) != 8:
        pytest.skip("needs 8 CPU devices; run with tests/conftest.py")
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def compiled(step: Callable[[jax.Array], jax.Array], mesh: Mesh) -> tuple[HloCollective, ...]:
    """The collectives of a step on f32[8,32] blocks, one on each device."""
    spec = P(("data", "model"))
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    block = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, spec))
    return read_collectives(mapped.lower(block).compile().as_text() or "")


def facts(found: tuple[HloCollective, ...]) -> list[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    return [(c.kind, c.nbytes, c.groups) for c in found]


# One device's block is 8 x 32 x 4 = 1024 bytes.
ONE_OF_EACH: list[
    tuple[Callable[[jax.Array], jax.Array], str, int, tuple[tuple[int, ...], ...]]
] = [
    (lambda x: jax.lax.psum(x, "model"), "all-reduce", 1024, ROWS),
    # Gathered over 2: the result is 2048 bytes.
    (lambda x: jax.lax.all_gather(x, "data", tiled=True), "all-gather", 2048, COLUMNS),
    (lambda x: jax.lax.psum_scatter(x, "model", tiled=True), "reduce-scatter", 1024, ROWS),
    (lambda x: jax.lax.all_to_all(x, "model", 0, 0, tiled=True), "all-to-all", 1024, ROWS),
    (
        lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        "collective-permute",
        1024,
        COLUMNS,
    ),
]


@pytest.mark.parametrize(("step", "kind", "nbytes", "groups"), ONE_OF_EACH)
def test_one_of_each_kind(
    step: Callable[[jax.Array], jax.Array],
    kind: str,
    nbytes: int,
    groups: tuple[tuple[int, ...], ...],
    mesh: Mesh,
) -> None:
    (found,) = compiled(step, mesh)
    assert (found.kind, found.nbytes, found.groups) == (kind, nbytes, groups)
    assert (found.dtype, found.trips, found.group_size) == ("f32", 1, len(groups[0]))
    assert "test_collectives.py:" in found.source


def test_loops_multiply(mesh: Mesh) -> None:
    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        c, _ = jax.lax.scan(inner, jax.lax.psum(c, "data") * 0.5, None, length=3)
        return c, None

    def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(jax.lax.psum(c, "model")), None

    found = compiled(lambda x: jax.lax.scan(outer, x, None, length=5)[0], mesh)
    assert [(c.groups, c.trips) for c in found] == [(COLUMNS, 5), (ROWS, 15)]
    assert sum(c.total_bytes for c in found) == 20 * 1024


def test_a_sliced_all_reduce_is_a_reduce_scatter(mesh: Mesh) -> None:
    # FSDP: weights f32[64,64] in 8 parts. XLA:CPU gathers them (16 KiB) and all-reduces the
    # gradient (16 KiB), of which each device keeps an eighth.
    weights = NamedSharding(mesh, P(("data", "model")))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=weights)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=weights)
    text = jax.jit(step, out_shardings=weights).lower(w, x).compile().as_text() or ""
    assert facts(read_collectives(text)) == [
        ("all-gather", 16384, (tuple(range(8)),)),
        ("reduce-scatter", 16384, (tuple(range(8)),)),
    ]


def entry(body: str, before: str = "") -> tuple[HloCollective, ...]:
    """The collectives of an entry computation with these lines, on 8 devices."""
    lines = "\n".join(f"  {line}" for line in dedent(body).strip().splitlines())
    head = "HloModule m, num_partitions=8\n\n"
    return read_collectives(f"{head}{dedent(before)}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")


def test_gpu_starts_count_once_and_combined_ops_add_up() -> None:
    # Two bf16 operands of 64 and 32 elements: (128 + 64) * 8 = 1536 bytes gathered.
    found = entry(
        """
        %a = bf16[64]{0} parameter(0)
        %b = bf16[32]{0} parameter(1)
        %ags = ((bf16[64]{0}, bf16[32]{0}), (bf16[512]{0}, bf16[256]{0})) all-gather-start(%a, \
%b), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, \
metadata={op_name="jit(f)/ag" source_file="m.py" source_line=7}
        ROOT %agd = (bf16[512]{0}, bf16[256]{0}) all-gather-done(%ags)
        """
    )
    assert facts(found) == [("all-gather", 1536, (tuple(range(8)),))]
    assert (len(found[0].parts), found[0].op_name, found[0].source) == (2, "jit(f)/ag", "m.py:7")


def test_wrapped_async_calls_count_once() -> None:
    found = entry(
        """
        %p = f32[16]{0} parameter(0)
        %s = ((f32[16]{0}), f32[2]{0}, u32[]) async-start(%p), calls=%wrapped
        ROOT %d = f32[2]{0} async-done(%s), calls=%wrapped
        """,
        """
        %wrapped (q: f32[16]) -> f32[2] {
          %q = f32[16]{0} parameter(0)
          ROOT %rs = f32[2]{0} reduce-scatter(%q), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%a
        }
        """,
    )
    assert facts(found) == [("reduce-scatter", 64, (tuple(range(8)),))]


TPU_FUSIONS = """
    %all-reduce-scatter.1 (q: f32[16]) -> f32[2] {
      %q = f32[16]{0:T(256)} parameter(0)
      %ar = f32[16]{0:T(256)} all-reduce(%q), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
      %i = s32[] constant(0)
      ROOT %ds = f32[2]{0:T(256)} dynamic-slice(%ar, %i), dynamic_slice_sizes={2}
    }

    %started (r: f32[2]) -> (f32[2], f32[16], u32[]) {
      %r = f32[2]{0} parameter(0)
      %ag = f32[16]{0} all-gather(%r), replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, \
channel_id=8, frontend_attributes={chain_id="0"}
      ROOT %c = (f32[2]{0}, f32[16]{0}, u32[]) custom-call(%r, %ag), \
custom_call_target="AsyncCollectiveStart"
    }

    %hiding (h: (f32[2], f32[16], u32[])) -> (f32[2], f32[16], u32[]) {
      %h = (f32[2]{0}, f32[16]{0}, u32[]) parameter(0)
      %hg = f32[2]{0} get-tuple-element(%h), index=0
      %part = f32[16]{0} all-gather(%hg), replica_groups=mesh['axis_0'=8] {'axis_0'}, \
channel_id=8, frontend_attributes={chain_id="0"}
      ROOT %ht = (f32[2]{0}, f32[16]{0}, u32[]) tuple(%hg, %part, %h)
    }

    %finished (t: (f32[2], f32[16], u32[])) -> f32[16] {
      %t = (f32[2]{0}, f32[16]{0}, u32[]) parameter(0)
      %o = f32[2]{0} get-tuple-element(%t), index=0
      %again = f32[16]{0} all-gather(%o), replica_groups=mesh['axis_0'=8] {'axis_0'}
      ROOT %c.1 = f32[16]{0} custom-call(%t), custom_call_target="AsyncCollectiveDone"
    }
"""


def test_tpu_fusions() -> None:
    found = entry(
        """
        %p = f32[16]{0:T(256)} parameter(0)
        %rs = f32[2]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, \
metadata={op_name="jit(f)/rs"}
        %async-collective-start = (f32[2]{0}, f32[16]{0}, u32[]) fusion(%rs), kind=kCustom, \
calls=%started
        %fusion.2 = (f32[2]{0}, f32[16]{0}, u32[]) fusion(%async-collective-start), kind=kOutput, \
calls=%hiding
        ROOT %async-collective-done = f32[16]{0} fusion(%fusion.2), kind=kCustom, \
calls=%finished
        """,
        TPU_FUSIONS,
    )
    everyone = (tuple(range(8)),)
    assert facts(found) == [("reduce-scatter", 64, everyone), ("all-gather", 64, everyone)]
    # The all-reduce inside the fusion has no metadata of its own.
    assert found[0].op_name == "jit(f)/rs"


def test_a_tpu_loop_runs_as_often_as_its_condition_says() -> None:
    found = entry(
        """
        %p = (s32[], f32[16]{0}) parameter(0)
        ROOT %w = (s32[], f32[16]{0}) while(%p), condition=%cond, body=%body
        """,
        """
        %body (b: (s32[], f32[16])) -> (s32[], f32[16]) {
          %b = (s32[], f32[16]{0}) parameter(0)
          %x = f32[16]{0} get-tuple-element(%b), index=1
          %cp = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
          ROOT %r = (s32[], f32[16]{0}) tuple(%x, %cp)
        }
        %cond (c: (s32[], f32[16])) -> pred[] {
          %c = (s32[], f32[16]{0}) parameter(0)
          %i = s32[] get-tuple-element(%c), index=0
          %n = s32[] constant(12)
          ROOT %lt = pred[] compare(%i, %n), direction=LT
        }
        """,
    )
    assert [(c.kind, c.nbytes, c.trips) for c in found] == [("collective-permute", 64, 12)]


def test_only_the_biggest_branch_counts() -> None:
    branch = """
        %{name} (q: f32[{n}]) -> f32[{n}] {{
          %q = f32[{n}]{{0}} parameter(0)
          ROOT %ar = f32[{n}]{{0}} all-reduce(%q), replica_groups={{{{0,1}}}}, to_apply=%add
        }}
        """
    found = entry(
        """
        %p = s32[] parameter(0)
        ROOT %c = f32[] conditional(%p, %p, %p), branch_computations={%small, %big}
        """,
        branch.format(name="small", n=2) + branch.format(name="big", n=4),
    )
    assert [c.nbytes for c in found] == [16]


def test_groups_of_one_are_dropped() -> None:
    assert not entry(
        """
        %p = f32[16]{0} parameter(0)
        %ar = f32[16]{0} all-reduce(%p), replica_groups={{0},{1}}, to_apply=%add
        ROOT %cp = f32[16]{0} collective-permute(%ar), source_target_pairs={{0,0},{1,1}}
        """
    )


def test_a_combined_all_reduce_splits_by_what_becomes_of_each_part() -> None:
    # The first 16 floats are sliced by partition id; the other 4 are used whole.
    found = entry(
        """
        %a = f32[16]{0} parameter(0)
        %b = f32[4]{0} parameter(1)
        %id = u32[] partition-id()
        %ar = (f32[16]{0}, f32[4]{0}) all-reduce(%a, %b), replica_groups={}, to_apply=%add
        %x = f32[16]{0} get-tuple-element(%ar), index=0
        %y = f32[4]{0} get-tuple-element(%ar), index=1
        %ds = f32[2]{0} dynamic-slice(%x, %id), dynamic_slice_sizes={2}
        ROOT %t = (f32[2]{0}, f32[4]{0}) tuple(%ds, %y)
        """
    )
    assert [(c.kind, c.nbytes) for c in found] == [("all-reduce", 16), ("reduce-scatter", 64)]


def test_an_all_reduce_of_which_two_different_slices_are_kept_stays_one(mesh: Mesh) -> None:
    def step(x: jax.Array) -> jax.Array:
        whole = jax.lax.psum(x, "model")
        at = jax.lax.axis_index("model")
        rows = jax.lax.dynamic_slice_in_dim(whole, at * 2, 2, 0)
        columns = jax.lax.dynamic_slice_in_dim(whole, at * 8, 8, 1)
        return x + rows.sum() + columns.sum()

    (found,) = compiled(step, mesh)
    assert (found.kind, found.nbytes) == ("all-reduce", 1024)


def test_a_loop_that_counts_in_steps() -> None:
    # From 2 to below 9 in steps of 3: 2, 5, 8.
    found = entry(
        """
        %p = f32[16]{0} parameter(0)
        %two = s32[] constant(2)
        %from = s32[] copy(%two)
        %state = (s32[], f32[16]{0}) tuple(%from, %p)
        ROOT %w = (s32[], f32[16]{0}) while(%state), condition=%cond, body=%body
        """,
        """
        %body (b: (s32[], f32[16])) -> (s32[], f32[16]) {
          %b = (s32[], f32[16]{0}) parameter(0)
          %at = s32[] get-tuple-element(%b), index=0
          %x = f32[16]{0} get-tuple-element(%b), index=1
          %ar = f32[16]{0} all-reduce(%x), replica_groups={}, to_apply=%add
          %three = s32[] constant(3)
          %next = s32[] add(%at, %three)
          ROOT %r = (s32[], f32[16]{0}) tuple(%next, %ar)
        }
        %cond (c: (s32[], f32[16])) -> pred[] {
          %c = (s32[], f32[16]{0}) parameter(0)
          %i = s32[] get-tuple-element(%c), index=0
          %n = s32[] constant(9)
          ROOT %lt = pred[] compare(%i, %n), direction=LT
        }
        """,
    )
    assert [c.trips for c in found] == [3]


@pytest.mark.parametrize(
    ("line", "kind", "nbytes"),
    [
        # One device's 64 bytes for everyone.
        ("collective-broadcast(%a), replica_groups={}", "all-gather", 64),
        # The operands after the first are offsets and sizes.
        ("ragged-all-to-all(%a, %b, %i, %i, %i, %i), replica_groups={}", "all-to-all", 64),
        # Two blocks of one tensor.
        ("all-to-all(%a, %b), replica_groups={{0,1}}", "all-to-all", 80),
    ],
)
def test_rare_spellings(line: str, kind: str, nbytes: int) -> None:
    (found,) = entry(
        f"""
        %a = f32[16]{{0}} parameter(0)
        %b = f32[4]{{0}} parameter(1)
        %i = s32[8]{{0}} parameter(2)
        ROOT %c = f32[16]{{0}} {line}
        """
    )
    assert (found.kind, found.nbytes, len(found.parts)) == (kind, nbytes, 1)


@pytest.mark.parametrize(
    ("base", "offset", "kind"),
    [
        ("%zeros", "%id", "all-gather"),
        ("%given", "%id", "all-reduce"),  # what is written into counts as well
        ("%zeros", "%zero", "all-reduce"),  # each device writes to the same place
    ],
)
def test_a_sum_of_slices_in_zeros_is_an_all_gather(base: str, offset: str, kind: str) -> None:
    (found,) = entry(
        f"""
        %given = f32[16]{{0}} parameter(0)
        %own = f32[2]{{0}} parameter(1)
        %zero = u32[] constant(0)
        %zeros = f32[16]{{0}} broadcast(%zero), dimensions={{}}
        %id = u32[] partition-id()
        %slot = f32[16]{{0}} dynamic-update-slice({base}, %own, {offset})
        ROOT %ar = f32[16]{{0}} all-reduce(%slot), replica_groups={{}}, to_apply=%add
        """
    )
    assert (found.kind, found.nbytes) == (kind, 64)


def test_axes_of_what_is_compiled(mesh: Mesh) -> None:
    shape = MeshShape(("data", "model"), (2, 4))

    def step(x: jax.Array) -> jax.Array:
        both = jax.lax.psum(jax.lax.psum(x, "model") * 2, ("data", "model")) * 2
        # The first two of four devices on the model axis are no axis of the mesh.
        pairs = jax.lax.psum(both, "model", axis_index_groups=[[0, 1], [2, 3]]) * 2
        return jax.lax.ppermute(pairs, "data", [(0, 1), (1, 0)])

    spec = P(("data", "model"))
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    block = jax.ShapeDtypeStruct((64, 32), jnp.int32, sharding=NamedSharding(mesh, spec))
    text = mapped.lower(block).compile().as_text() or ""
    found = compiled_collectives(text, shape)
    assert [c.axes for c in found] == [("model",), ("data", "model"), (), ("data",)]
    assert {c.dtype for c in found} == {"i32"}
