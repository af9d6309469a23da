"""The models of the zoo build and trace at toy size, and every case at its true one."""

from collections.abc import Callable

import jax
import pytest

from autopar.cluster import Cluster
from benchmarks.models import Model
from benchmarks.zoo.cases import CASES, Case, frozen, parameters
from benchmarks.zoo.dit import dit
from benchmarks.zoo.dlrm import dlrm
from benchmarks.zoo.mamba import mamba
from benchmarks.zoo.scanned_gpt import lora, scanned_gpt
from benchmarks.zoo.t5 import t5
from benchmarks.zoo.two_tower import two_tower
from benchmarks.zoo.unet import unet
from benchmarks.zoo.vit import vit
from benchmarks.zoo.wide_resnet import wide_resnet

TOYS: dict[str, Callable[[bool], Model]] = {
    "vit": lambda remat: vit(2, 16, 4, 8, 4, 8, 16, remat),
    "wide_resnet": lambda remat: wide_resnet((1, 1), 32, 1, 16, 8, 16, remat),
    "unet": lambda remat: unet(1, (32, 64), 8, 4, 16, remat),
    "scanned_gpt": lambda remat: scanned_gpt(2, 16, 4, 32, 8, 16, remat),
    "lora": lambda remat: lora(2, 16, 4, 2, 32, 8, 16, remat),
    "t5": lambda remat: t5(2, 16, 4, 32, 32, 8, 16, remat),
    "two_tower": lambda remat: two_tower(2, 16, 4, 32, 4, 8, 16, remat),
    "mamba": lambda remat: mamba(2, 16, 4, 32, 8, 16, remat),
    "dit": lambda remat: dit(2, 16, 4, 4, 4, 2, 8, 16, remat),
    "dlrm": lambda _: dlrm((32, 16), 8, 4, (8,), (8,), 16),
}


def traced(model: Model) -> tuple[jax.Array, ...]:
    """The shapes that a step returns, after those of its state."""
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    new, metrics = jax.eval_shape(model.step, state, model.example_batch)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), new.params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state.params
    )
    return tuple(jax.tree.leaves(metrics))


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", sorted(TOYS))
def test_toys_trace(name: str, remat: bool) -> None:
    (loss,) = traced(TOYS[name](remat))
    assert loss.shape == ()


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_cases_have_the_rows_of_their_devices(case: Case) -> None:
    roomy, tight = (Cluster.parse(name) for name in ("8xh100", "v5e:2x4"))
    rows = {
        next(iter(case.model(8, c.memory_bytes).example_batch.values())).shape[0]
        for c in (roomy, tight)
    }
    assert rows == {8 * case.rows, 8 * max(1, case.rows // 4)}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt-6.7b", 6_860),
        ("llama-8b", 8_030),
        ("moe-8x7b", 32_490),
        ("vit-l", 304),
        ("scanned-gpt-1.3b", 1_419),
        ("t5-large", 783),
        ("two-tower", 2 * 109),
        ("dit-xl", 675),
        ("mamba-370m", 371 + 52),
        ("lora-6.7b", 6_860),
    ],
)
def test_with_all_layers_they_are_as_large_as_their_names_say(name: str, millions: int) -> None:
    case = next(c for c in CASES if c.name == name)
    one, two = (parameters(m) + frozen(m) for m in (case.build(n, 8, False) for n in (1, 2)))
    whole = one + (case.layers - 1) * (two - one)
    assert abs(whole / 1e6 / millions - 1) < 0.01


def test_memory_binds_the_cut_model_as_the_whole_one() -> None:
    case = next(c for c in CASES if c.name == "gpt-6.7b")
    device = Cluster.parse("8xh100").memory_bytes
    limit = case.limit_bytes(8, device)
    one, two = (parameters(case.build(n, 8, False)) for n in (1, 2))
    layer, outside = two - one, 2 * one - two
    # The state of the whole model is too large for one device, and so is that of the cut one.
    assert 12 * (outside + case.layers * layer) > device
    assert limit < 12 * (outside + case.kept * layer)
    # Cut up over the devices both fit.
    assert 12 * (outside + case.layers * layer) // 8 < device
    assert 12 * (outside + case.kept * layer) // 8 < limit
