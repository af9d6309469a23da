"""No primitive of this JAX is forgotten."""

from __future__ import annotations

import pytest

from autopar.rules.table import CONTROL, PARALLEL, REPLICATED, has_rule, primitive_names
from tests.rules.primitives import primitives

# Primitives that checking functions of JAX make up on the fly and take apart again.
_UNSEEN_HERE = {"checkpoint", "core_call", "pallas_call", "pjit", "tpu_custom_call"}


@pytest.mark.smoke
def test_every_primitive_is_ruled_or_set_aside_for_a_reason() -> None:
    known = primitive_names() | set(REPLICATED) | CONTROL | PARALLEL
    assert sorted(set(primitives()) - known) == []


def test_every_name_in_the_lists_is_a_primitive() -> None:
    known = primitive_names() | set(REPLICATED) | CONTROL | PARALLEL
    assert known - set(primitives()) <= _UNSEEN_HERE


def test_lists_are_disjoint() -> None:
    lists = [primitive_names(), set(REPLICATED), CONTROL, PARALLEL]
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_has_rule_knows_what_stays_whole_but_no_control_flow() -> None:
    assert has_rule("add")
    assert has_rule("pure_callback")
    assert not has_rule("scan")
    assert not has_rule("psum")
    assert not has_rule("my_primitive")
