"""The page of primitives tells of all there are."""

from autopar.rules import primitive_fates
from tests.rules.primitives import primitives


def test_every_primitive_of_this_jax_is_told_of() -> None:
    assert sorted(set(primitives()) - dict(primitive_fates()).keys()) == []
