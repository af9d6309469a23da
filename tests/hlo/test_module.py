"""HLO text to structure, and every spelling of groups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.hlo.module import Leaf, read_module, split_top
from autopar.hlo.tensors import axes_crossed, axes_of, read_groups
from autopar.ir.sharding import MeshShape

# A TPU layout with brackets, a comment in a tuple, a quoted brace and an old-style typed operand.
TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=4

%wrapped (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %p = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
}

ENTRY %main.1 (x: bf16[8,128]) -> (bf16[8,128], s4[3], pred[]) {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="a)}, b=\\"c\\""}
  %f = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(bf16[8,128]{1,0} %x), kind=kLoop, calls=%wrapped
  ROOT t.2 = (bf16[8,128]{1,0}, s4[3]{0}, /*index=2*/pred[]) tuple(f, x), sharding={{}, {}}
}
"""


def test_a_module_reads_as_computations_of_instructions() -> None:
    module = read_module(TEXT)
    assert (module.entry, module.device_count) == ("main.1", 4)
    assert list(module.computations) == ["wrapped", "main.1"]
    x, fusion, root = module.computations["main.1"].instructions
    assert x.opcode == "parameter"
    assert x.literal == "0"
    assert (fusion.opcode, fusion.operands) == ("fusion", ("x",))
    assert fusion.callees("calls") == ("wrapped",)
    assert root.is_root
    assert root.operands == ("f", "x")
    assert root.leaves == (Leaf("bf16", (8, 128)), Leaf("s4", (3,)), Leaf("pred", ()))
    # 8 * 128 * 2 bytes; three half-bytes round up to two; one byte.
    assert [leaf.nbytes for leaf in root.leaves] == [2048, 2, 1]
    assert [u.name for u in module.computations["main.1"].users["x"]] == ["f", "t.2"]


def test_text_of_no_known_form_reads_as_nothing() -> None:
    assert read_module("no HLO\nat all").computations == {}


def test_split_top() -> None:
    assert split_top('a={1,2}, b="x,}", c=(d, e)') == ["a={1,2}", 'b="x,}"', "c=(d, e)"]


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        # 0..7 as 2 x 4, transposed to 4 x 2: (0,4), (1,5), ...
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        # 0..7 as 2 x 2 x 2 with dims 1, 0, 2: 0 1 4 5 2 3 6 7.
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['axis_0'=8] {'axis_0'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_0'}", tuple((n,) for n in range(8))),
        # The last 2 of an axis of 8, and its first 4.
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_replica_groups(spelling: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert read_groups({"replica_groups": spelling}, 8) == groups


@pytest.mark.parametrize(
    ("axis", "groups"),
    [("b", ((0, 1, 2, 3), (4, 5, 6, 7))), ("c", ((0, 4), (1, 5), (2, 6), (3, 7)))],
)
def test_a_mesh_of_devices_in_another_order(axis: str, groups: tuple[tuple[int, ...], ...]) -> None:
    # As XLA's own partitioner writes it: positions in b x c hold devices 0 4 1 5 2 6 3 7.
    attributes = {
        "replica_groups": "mesh['a'=1,'b'=4,'c'=2]",
        "device_ids": f"([2,4]T(1,0)) {{'{axis}'}}",
    }
    assert read_groups(attributes, 8) == groups


def test_source_target_pairs_are_the_sets_they_connect() -> None:
    pairs = {"source_target_pairs": "{{0,1},{1,0},{2,3},{3,2},{4,4}}"}
    assert read_groups(pairs, 8) == ((0, 1), (2, 3), (4,))


MESH = MeshShape(("a", "b", "c"), (2, 3, 2))
SUBSETS = [s for n in range(1, 4) for s in itertools.combinations(MESH.names, n)]


@pytest.mark.parametrize("axes", SUBSETS)
def test_groups_along_axes_are_told_from_all_others(axes: tuple[str, ...]) -> None:
    grid = np.arange(12).reshape(MESH.sizes)
    chosen = [MESH.names.index(axis) for axis in axes]
    rows = np.moveaxis(grid, chosen, range(-len(axes), 0)).reshape(-1, MESH.size(axes))
    groups = tuple(tuple(int(at) for at in row) for row in rows)
    assert axes_of(groups, MESH) == axes
    # In whatever order, but with all of them.
    assert axes_of(tuple(group[::-1] for group in groups[::-1]), MESH) == axes
    if len(groups) > 1:
        assert axes_of(groups[1:], MESH) == ()
    assert axes_crossed(groups[:1], MESH) == axes


def test_an_axis_of_one_is_no_axis() -> None:
    assert axes_of(((0, 1),), MeshShape(("one", "two"), (1, 2))) == ("two",)
