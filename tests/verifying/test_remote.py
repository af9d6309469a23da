"""The planned step in a process of its own, where this one has too few CPU devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.errors import VerifyError
from autopar.runtime.aot.program import AotProgram
from autopar.runtime.validation.remote import remote_step
from autopar.runtime.validation.steps import FlatStep, packed, planned_step, unpacked
from autopar.verifying.programs import export_whole
from tests.verifying.asking import SHAPES, planned_for

pytest.importorskip("flatbuffers", reason="JAX exports no program without flatbuffers")


@pytest.fixture(scope="module")
def pair() -> Any:
    """A step in this process, and the same to be compiled elsewhere."""
    planned = planned_for("8xcpu", "megatron")
    trace, program = planned.trace, planned.program
    exported = export_whole(trace, program, Cluster.parse("8xcpu"), donate=False)
    return planned_step(trace, program), exported


def test_it_gives_what_it_gives_here(pair: tuple[FlatStep, AotProgram]) -> None:
    here, exported = pair
    rng = np.random.default_rng(0)
    shapes = jax.tree_util.tree_leaves(SHAPES)
    with remote_step(exported, ()) as there:
        for _ in range(2):
            leaves = [rng.standard_normal(s.shape, dtype=np.float32) for s in shapes]
            for mine, other in zip(here(leaves), there(leaves), strict=True):
                np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_what_it_says_when_it_fails_is_told(pair: tuple[FlatStep, AotProgram]) -> None:
    wrong = [np.zeros(3, np.float32)] * 3
    told = pytest.raises(VerifyError, match=r"did not run(.|\n)*Error")
    with remote_step(pair[1], ()) as there, told:
        there(wrong)


def test_keys_come_and_go_as_they_are() -> None:
    key = jax.random.key(3, impl="rbg")
    back = unpacked(packed(key))
    assert back.dtype == key.dtype
    assert (jax.random.key_data(back) == jax.random.key_data(key)).all()
    assert unpacked(packed(jnp.ones(2, jnp.bfloat16))).dtype == jnp.bfloat16
