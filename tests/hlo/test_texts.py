"""Collectives read off texts that XLA's compilers wrote for TPUs and GPUs, cut down to a few lines.

The programs are train steps of `benchmarks.models` by autopar, but for the two windowed einsums and
the async fusions, which are of plain `jax.jit` over NamedShardings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import MeshError
from autopar.hlo.collectives import compiled_collectives, read_collectives
from autopar.ir.sharding import MeshShape

MIB = 2**20


def text(name: str) -> str:
    return (Path(__file__).parent / "texts" / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "devices", "kind", "nbytes", "line"),
    [
        # bf16[4096,4096], whose gradient is summed while it is computed, a block of 512 rows a
        # step, in two directions; one permute more stands behind the loop.
        ("tpu_windowed_scatter", 8, "reduce-scatter", 32 * MIB, "linear.py:287"),
        # bf16[8192,8192] as it is multiplied.
        ("tpu_windowed_gather", 8, "all-gather", 128 * MIB, "wag.py:9"),
        # bf16[32768,4096], padded to 32832 rows; a permute moves the 56 rows over the edges.
        ("tpu_fused_scatter", 8, "reduce-scatter", 256 * MIB, "models.py:192"),
        # bf16[4096,16384] in three fusions: the start, one that hides it, the done.
        ("tpu_async_fusions", 8, "all-gather", 128 * MIB, "linear.py:287"),
        # bf16[32768,1024] on a core of its own: async-start, a computation, a call.
        ("tpu_wrapped_calls", 16, "all-gather", 64 * MIB, "moves.py:84"),
        # Two of bf16[1024], each device's 64 written into zeros and summed.
        ("tpu_small_gathers", 16, "all-gather", 4096, ""),
        # bf16[8192,512] summed: scattered in the slice, a 16th sent to the other, gathered.
        ("tpu_two_slices", 32, "all-reduce", 8 * MIB, ""),
        ("gpu_combined_gather", 8, "all-gather", 24 * MIB + 8192, "models.py:123"),
        # Six of f32[512] and one number, laid end to end.
        ("gpu_concatenated", 8, "all-reduce", 6 * 2048 + 4, ""),
        ("gpu_scan", 8, "reduce-scatter", 4 * 2048, "models.py:175"),
    ],
)
def test_one_collective(name: str, devices: int, kind: str, nbytes: int, line: str) -> None:
    mesh = MeshShape(("data",), (devices,))
    (found,) = read_collectives(text(name), mesh)
    assert (found.kind, found.nbytes, found.axes) == (kind, nbytes, ("data",))
    assert found.groups == (tuple(range(devices)),)
    assert found.source.endswith(line)
    assert found.trips == (3 if name == "gpu_scan" else 1)  # one of the four layers was peeled off


def facts(name: str, devices: int = 8) -> list[tuple[str, int, str, str]]:
    found = compiled_collectives(text(name), MeshShape(("data",), (devices,)))
    return [(c.dtype, c.nbytes, c.op, c.line) for c in found]


def test_each_tensor_of_a_combined_op_has_its_own_origin() -> None:
    assert facts("gpu_combined_gather") == [
        ("bf16", 8 * MIB, "%433/all_gather", "models.py:123"),
        ("bf16", 8 * MIB, "%417/all_gather", "models.py:118"),
        ("bf16", 2 * MIB, "%377/all_gather", "models.py:105"),
        ("bf16", 2 * MIB, "%316/all_gather", "models.py:95"),
        ("bf16", 2 * MIB, "%326/all_gather", "models.py:97"),
        ("bf16", 2 * MIB, "%321/all_gather", "models.py:96"),
        ("f32", 4096, "%310/all_gather", "models.py:175"),
        ("f32", 4096, "%254/all_gather", "models.py:177"),
    ]


def test_a_tensor_without_an_origin_has_that_of_what_made_it() -> None:
    found = facts("gpu_concatenated")
    assert found[0] == ("f32", 2048, "transpose_jvp_Decoder/norm/reduce_sum", "models.py:207")
    assert [nbytes for _, nbytes, _, _ in found] == [2048] * 6 + [4]
    weights = {"value": "models.py:97", "key": "models.py:96"}
    assert facts("tpu_small_gathers", 16) == [
        ("bf16", 2048, f"jvp_Decoder/layer0/attention/{name}/convert_element_type", line)
        for name, line in weights.items()
    ]


def test_slices_that_are_an_axis_keep_the_parts_apart() -> None:
    mesh = MeshShape(("replica", "data"), (2, 16))
    found = read_collectives(text("tpu_two_slices"), mesh)
    assert [(c.kind, c.axes, c.nbytes, c.between_slices) for c in found] == [
        ("reduce-scatter", ("data",), 8 * MIB, False),
        ("all-reduce", ("replica",), MIB // 2, True),
        ("all-gather", ("data",), 8 * MIB, False),
    ]


def test_devices_of_slices_may_lie_anywhere_on_a_mesh() -> None:
    # The slices alternate along the mesh: position 2 i is device i, 2 i + 1 is device 16 + i.
    order = [device for i in range(16) for device in (i, 16 + i)]
    mesh = MeshShape(("data", "replica"), (16, 2))
    found = read_collectives(text("tpu_two_slices"), mesh, order)
    assert [c.axes for c in found] == [("data",), ("replica",), ("data",)]


def test_another_number_of_devices_is_refused() -> None:
    with pytest.raises(MeshError, match="compiled for 8 devices, the mesh data=12 has 12"):
        read_collectives(text("gpu_scan"), MeshShape(("data",), (12,)))
