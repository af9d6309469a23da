"""No primitive of this JAX is forgotten."""

from __future__ import annotations

import pytest

from autopar.rules.table import (
    CONTROL,
    FAMILIES,
    PARALLEL,
    PRIMITIVES,
    REPLICATED,
    has_rule,
    primitive_names,
)
from tests.rules.primitives import primitives

# Primitives that checking functions of JAX make up on the fly and take apart again.
_UNSEEN_HERE = {"checkpoint", "core_call", "pallas_call", "pjit", "tpu_custom_call"}
# Those that only a newer JAX knows than the oldest that we run on, or only an older one.
_OTHER_RELEASES = set(
    """
    log2 one_minus_square pbroadcast_dynamic polynomial program_order reduced_vary_cast relayout
    unreduced_pmax unreduced_pmin vary_unreduced_cast with_memory_space_constraint
    xla_metadata_call
    """.split()
)


@pytest.mark.smoke
def test_every_primitive_is_ruled_or_set_aside_for_a_reason() -> None:
    known = primitive_names() | set(REPLICATED) | set(CONTROL) | PARALLEL
    assert sorted(set(primitives()) - known) == []


def test_every_name_in_the_lists_is_a_primitive() -> None:
    known = primitive_names() | set(REPLICATED) | set(CONTROL) | PARALLEL
    assert known - set(primitives()) <= _UNSEEN_HERE | _OTHER_RELEASES


def test_lists_are_disjoint() -> None:
    lists = [primitive_names(), set(REPLICATED), set(CONTROL), PARALLEL]
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_a_primitive_stands_in_one_list_only() -> None:
    rows = sum(len(family.PRIMITIVES) for family in FAMILIES) + len(REPLICATED)
    assert rows == len(PRIMITIVES)


def test_has_rule_knows_what_stays_whole_but_no_control_flow() -> None:
    assert has_rule("add")
    assert has_rule("pure_callback")
    assert not has_rule("scan")
    assert not has_rule("psum")
    assert not has_rule("my_primitive")
