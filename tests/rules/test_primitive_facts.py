"""A primitive has one row, and what JAX is needed for stands where the row says."""

from __future__ import annotations

import pytest

from autopar.ir.graph import Op
from autopar.ir.values import Value
from autopar.rules import Fusion, Work, primitive
from autopar.rules.table import HEAVY, PRIMITIVES
from autopar.runtime.local import local_primitives


def test_parameters_that_speak_of_whole_shapes_are_made_to_speak_of_pieces() -> None:
    told = {name for name, row in PRIMITIVES.items() if row.local}
    missing, extra = sorted(told - local_primitives()), sorted(local_primitives() - told)
    assert not missing, f"write what a device runs of {missing} in autopar/runtime/local.py"
    assert not extra, f"say local=True of {extra} in its row in autopar/rules/<family>.py"


@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_facts_of_a_primitive_agree_with_one_another(name: str) -> None:
    row = primitive(name)
    assert row.keeps_zero or not row.moves, f"{name} moves items, zeros among them"
    assert not (row.moves and row.fusion not in (Fusion.BY_RULE, Fusion.INDEXING))
    assert (row.work is Work.TERMS) == (row.terms is not None)
    assert row.redo_bytes > 0


def test_a_primitive_that_nobody_told_of_has_no_rule_and_the_facts_of_most() -> None:
    row = primitive("my_primitive")
    op = Op("my_primitive", ("%x",), (Value("%y", (4,), "f32"),))
    assert not row.rule(op, [Value("%x", (4,), "f32")]).known
    assert (row.work, row.fusion, row.terms) == (Work.ITEMS, Fusion.BY_RULE, None)


def test_products_alone_take_the_time_of_their_flops() -> None:
    assert {"conv_general_dilated", "dot_general", "ragged_dot_general"} == HEAVY
