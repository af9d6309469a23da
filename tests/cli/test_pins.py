"""Pins as text."""

import pytest

from autopar.cli.pins import read_pins
from autopar.errors import PinError


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ('params/**/kernel=P(None,"model")', (None, ("model",))),
        ("w=P('data')", (("data",),)),
        ("w=P(data, None)", (("data",), None)),
        ("w=PartitionSpec(('data', 'model'))", (("data", "model"),)),
        ("w = P()", ()),
    ],
)
def test_a_pin_reads(text: str, dims: tuple[object, ...]) -> None:
    assert list(read_pins((text,)).values()) == [dims]


@pytest.mark.parametrize("text", ["w", "w=", "=P(None)", "w=Q(1)", "w=P(1)", "w=P(", "w=P(a=1)"])
def test_a_text_that_is_no_pin(text: str) -> None:
    with pytest.raises(PinError, match="is not understood; write PATTERN=P"):
        read_pins((text,))
