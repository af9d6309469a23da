"""Compilers of hardware that is not here answer for whole steps and for parts of stages."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.errors import VerifyError
from autopar.ir.compiled import CheckLevel, Compiled
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot.launch import compile_ahead
from autopar.runtime.aot.program import AotProgram, abstract_mesh, export_jitted, export_part
from autopar.runtime.compile import group_equal_parts
from autopar.runtime.interface import Interface
from autopar.runtime.validation.steps import CpuProgram
from autopar.verifying.programs import export_whole, programs_of
from tests.end_to_end.running import zoo_case
from tests.runtime.aot_programs import matmuls, needs_gpu_compiler, needs_tpu_compiler

_MIB = 2**20


def _sent(compiled: Compiled) -> dict[tuple[str, tuple[str, ...]], int]:
    return {(c.kind, c.axes): c.nbytes * c.runs for c in compiled.collectives}


# On a mesh of 2 x 4: the gathered weight, the whole sum, the whole product that is scattered.
_EXPECTED = {
    ("all-gather", ("data",)): 2 * _MIB,
    ("all-reduce", ("model",)): 1 * _MIB,
    ("reduce-scatter", ("data",)): 2 * _MIB,
}


@pytest.fixture(scope="module")
def on_h100() -> Compiled:
    """The matmuls on 8 H100."""
    return compile_ahead(matmuls("8xh100", (2, 4)))


@needs_gpu_compiler
def test_h100_answers_with_collectives_memory_and_time(on_h100: Compiled) -> None:
    assert on_h100.target == "h100 1x1x8"
    assert _sent(on_h100) == _EXPECTED
    assert on_h100.argument_bytes == 2 * _MIB  # 1 MiB of the weight and 1 MiB of input
    assert on_h100.argument_bytes < on_h100.peak_bytes < 16 * _MIB
    assert not on_h100.out_of_memory
    assert on_h100.seconds is not None
    assert on_h100.exposed_seconds is not None
    assert 0 < on_h100.exposed_seconds < on_h100.seconds < 1e-3
    assert {s.opcode for s in on_h100.spans} >= {"all-gather-start", "all-gather-done"}


@needs_gpu_compiler
def test_two_at_once_answer_as_one_does(
    on_h100: Compiled, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=true")  # would end a process that saw it
    exported = matmuls("8xh100", (2, 4))
    capfd.readouterr()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(compile_ahead, [exported, exported]))
    assert both[0] == both[1]
    # The program's text also has the lines that called for it.
    assert replace(both[0], hlo="") == replace(on_h100, hlo="")
    assert capfd.readouterr() == ("", "")


@needs_gpu_compiler
def test_a_gpu_that_is_too_small_says_so() -> None:
    found = compile_ahead(matmuls("8xa100-40gb", (2, 4), side=2**17))
    assert "device can be used" in found.out_of_memory
    assert found.peak_bytes > found.memory_bytes
    assert found.collectives
    assert found.seconds is None  # XLA takes an A100 to need a thousand units for every op


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "sizes", "is_timed"),
    [
        ("1xh100", (1, 1), False),  # nothing is scheduled where nothing is sent
        ("4x8xh200", (4, 8), True),
        ("8xb200", (2, 4), True),
        ("8xv100", (2, 4), False),
        ("8xa100-80gb", (2, 4), False),
        ("72xgb200", (9, 8), False),
        ("64x8xh100", (64, 8), True),
    ],
)
def test_every_gpu_of_the_catalog(cluster: str, sizes: tuple[int, int], is_timed: bool) -> None:
    found = compile_ahead(matmuls(cluster, sizes, side=1152))
    assert {c.axes for c in found.collectives} == {("data",), ("model",)} - {
        (name,) for name, size in zip(("data", "model"), sizes, strict=True) if size == 1
    }
    assert (found.seconds is not None) == is_timed


# -- TPU ----------------------------------------------------------------------------------------


@needs_tpu_compiler
def test_v5e_answers_early_what_it_answers_in_full() -> None:
    exported = matmuls("v5e:2x4", (2, 4))
    early, full = compile_ahead(exported), compile_ahead(exported, CheckLevel.FULL)
    assert _sent(early) == _sent(full) == _EXPECTED
    assert (early.argument_bytes, early.peak_bytes) == (full.argument_bytes, full.peak_bytes)
    assert early.argument_bytes == 2 * _MIB
    assert early.seconds is None
    assert full.seconds is not None
    # Two matmuls of 1.07 GFLOP at 197 TFLOP/s take 10.9 us.
    assert 10.9e-6 < full.seconds < 30e-6


@needs_tpu_compiler
def test_a_tpu_that_is_too_small_says_so() -> None:
    found = compile_ahead(matmuls("v5e:2x4", (2, 4), side=98304))
    assert found.out_of_memory.startswith("Ran out of memory on HBM")
    assert found.argument_bytes == 98304 * 98304 + 98304 * 1024
    assert found.peak_bytes > found.memory_bytes > 15 * 2**30
    assert not found.collectives


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [
        ("v5e:1x1", (1, 1)),
        ("v4:2x2x2", (2, 4)),
        ("v5p:4x4x4", (8, 8)),
        ("v6e:4x4", (4, 4)),
        ("tpu7x:2x2x2", (4, 4)),
        ("2xv5p:2x2x4", (4, 8)),
        ("2xv5e:16x16", (32, 16)),
    ],
)
def test_every_tpu_of_the_catalog(cluster: str, sizes: tuple[int, int]) -> None:
    data, model = sizes
    found = compile_ahead(matmuls(cluster, sizes))
    expected = {
        ("all-gather", ("data",)): 2 * _MIB,
        ("all-reduce", ("model",)): _MIB,
        ("reduce-scatter", ("data",)): 2 * _MIB,
    }
    assert _sent(found) == (expected if data * model > 1 else {})


# -- steps and stages ---------------------------------------------------------------------------


def _planned(cluster: str, **options: Any) -> Any:
    case = zoo_case("mlp", "adam")
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    step: Any = autopar.parallelize(case.step, cluster=cluster, **options)
    return step.planned(state, case.batch(0))


@needs_gpu_compiler
@pytest.mark.parametrize("count", [1, 8])
def test_a_planned_step_is_compiled_whole(count: int) -> None:
    cluster = Cluster.parse(f"{count}xh100")
    planned = _planned(f"{count}xh100", mesh=(count,) if count > 1 else 1, method="dp")
    exported = export_whole(planned.trace, planned.program, cluster)
    assert exported.order == tuple(range(count))
    found = compile_ahead(exported)
    assert bool(found.collectives) == (count > 1)
    assert found.argument_bytes == planned.plan.prediction.argument_bytes


@needs_gpu_compiler
def test_a_plans_own_options_are_what_its_programs_are_compiled_with() -> None:
    planned = _planned("8xh100", mesh=(8,), method="dp")
    wrong = replace(planned.plan, compiler_options=(("xla_gpu_no_such_thing", True),))
    cluster = Cluster.parse("8xh100")
    (program,) = programs_of(replace(planned, plan=wrong), cluster, Target.of(cluster))
    export = program.export
    assert not isinstance(export, CpuProgram)
    with pytest.raises(VerifyError, match="No such compile option: 'xla_gpu_no_such_thing'"):
        compile_ahead(export())


@needs_gpu_compiler
def test_each_different_part_of_a_pipeline_is_one_job() -> None:
    cluster = Cluster.parse("8xh100")
    planned = _planned("8xh100", stages=2, microbatches=2, schedule="1f1b")
    program = planned.program
    meshes = tuple(s.mesh for s in program.submeshes)
    sources = Interface(planned.trace, program, meshes).sources("gpu", True)
    groups = [[s.name for s in same] for same in group_equal_parts(sources)]
    jobs = [export_part(same[0], program.submeshes, cluster) for same in group_equal_parts(sources)]
    assert [n for names in groups for n in names] == [s.name for s in sources]
    assert {j.target.topology for j in jobs} == {"1x1x4"}
    assert all(sorted(j.order) == [0, 1, 2, 3] for j in jobs)
    (last,) = (j for names, j in zip(groups, jobs, strict=True) if "B1" in names)
    assert compile_ahead(last).peak_bytes > 0


# -- what cannot be handed over -----------------------------------------------------------------


def _export_of(function: Callable[[jax.Array], Any]) -> AotProgram:
    mesh = MeshShape(("one",), (1,))
    whole = NamedSharding(abstract_mesh(mesh), PartitionSpec())
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=whole)
    target = Target.of(Cluster.parse("1xh100"))
    return export_jitted(jax.jit(function), (shape,), mesh, (0,), (), target)


@needs_gpu_compiler
def test_what_calls_back_cannot_be_handed_over() -> None:
    def printing(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0])
        return x

    with pytest.raises(VerifyError, match=r"compiler of h100 1x1x1: .*debug\.print"):
        _export_of(printing)


@needs_gpu_compiler
def test_random_bits_and_factorisations_can_be_handed_over() -> None:
    def made(x: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(0), x.shape) + jnp.linalg.cholesky(x)

    assert _export_of(made).exported
