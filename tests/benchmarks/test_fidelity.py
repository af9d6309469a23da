"""Fidelity: ranks agree as Kendall counts them, and hand-written layouts are among the plans."""

import pytest
from jax.sharding import PartitionSpec

from benchmarks.fidelity import kendall_tau, layouts_of, variants
from benchmarks.hand.layout import pins_of
from benchmarks.zoo.scanned_gpt import lora, scanned_gpt

P = PartitionSpec


@pytest.mark.parametrize(
    ("ys", "tau"), [((1, 2, 3, 4), 1.0), ((4, 3, 2, 1), -1.0), ((1, 3, 2, 4), 4 / 6)]
)
def test_kendall_counts_pairs_in_order(ys: tuple[int, ...], tau: float) -> None:
    assert kendall_tau((10, 20, 30, 40), ys) == pytest.approx(tau)


def test_every_layout_by_hand_is_asked_for() -> None:
    found = {v.note: v for v in variants("scan", 1.0) if v.layout is not None}
    assert found.keys() == dict(layouts_of("scan", 8)).keys()
    assert found["fsdp+tp 2x4"].mesh == (2, 4)
    assert str(found["zero1 8"]) == "hand zero1 8"


def test_a_layout_pins_weights_their_moments_and_a_frozen_base() -> None:
    layouts = dict(layouts_of("scan", 8))
    model = scanned_gpt(2, 256, 8, 512, 64, 16)
    pins = pins_of(model, layouts["zero1 8"])
    up = "layers/mlp/up/kernel"
    assert pins[f"params/{up}"] == P(None)
    moments = [spec for path, spec in pins.items() if path.startswith("opt_state") and up in path]
    assert moments == [P(None, None, "data")] * 2
    assert pins["step"] == P()
    frozen = pins_of(lora(2, 256, 8, 8, 512, 64, 16), layouts["fsdp 8"])
    assert frozen[f"base/{up}"] == P(None, None, "data")
