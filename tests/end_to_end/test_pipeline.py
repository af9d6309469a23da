"""Stages are the plain step: the same numbers for every model, and the same bits in any order.

Layouts are made by hand, so that every schedule meets every model and no search stands between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from autopar.errors import BatchStatisticError, GraphError
from autopar.ir.program import Run
from autopar.ir.stages import Remat
from autopar.schedule.order import groups_evenly
from autopar.schedule.table import SCHEDULES
from tests.end_to_end.pipelines import (
    Layout,
    differing_bits,
    executor_of,
    in_plain_order,
    on_stages,
    plain_zoo,
    zoo_subject,
)
from tests.end_to_end.running import differing
from tests.zoo import KINDS, Optimizer, cases
from tests.zoo.staged import staged_cases

MODELS = (*cases("sgd"), *staged_cases("sgd"))
NAMES = tuple(s.name for s in SCHEDULES.values() if s.has_backward and s.name != "serial-split")
SIZES = ((4, 4), (2, 2, 4), (2, 2, 2, 2))
MICROBATCHES = (1, 2, 4, 8, 16)
FLUSHING = tuple(n for n in NAMES if SCHEDULES[n].allows_barrier)
TWO_PHASE = "moe_switch"  # its balance loss needs every forward before any backward
WHOLE_BATCH = "wide_resnet_bn"  # its forward pass needs every row


@dataclass(frozen=True)
class Combo:
    """One model on one layout with one optimizer."""

    model: str
    layout: Layout
    optimizer: Optimizer

    def __str__(self) -> str:
        return f"{self.model}-{self.layout}-{self.optimizer}"


def every_combo() -> Iterator[Combo]:
    """The whole cross product, of the layouts that there are."""
    for model, name, sizes, m in itertools.product(MODELS, NAMES, SIZES, MICROBATCHES):
        layout = Layout(sizes, m, name)
        uneven = SCHEDULES[name].even_groups and not groups_evenly(len(sizes), m)
        for optimizer in ("sgd", "adam") if not uneven else ():
            yield Combo(model, layout, optimizer)


def _chosen() -> Iterator[Combo]:
    """Every kind of network and every schedule, on two, three and four submeshes."""
    turns = itertools.cycle(n for n in NAMES if n not in FLUSHING)
    for i, model in enumerate(k for k in KINDS if k != TWO_PHASE):
        optimizer: Optimizer = "adam" if i % 2 else "sgd"
        yield Combo(model, Layout((4, 4), 4, next(turns)), optimizer)
    yield Combo(TWO_PHASE, Layout((4, 4), 4, "gpipe"), "adam")
    yield Combo(WHOLE_BATCH, Layout((4, 4), 4, "1f1b"), "sgd")
    yield Combo("mlp_seven", Layout((2, 2, 4), 8, "zb-h2"), "adam")
    yield Combo("mlp_seven", Layout((2, 2, 4), 16, "looped-bfs"), "adam")
    yield Combo("encoder_decoder", Layout((2, 2, 4), 8, "zb-h1"), "sgd")
    yield Combo("deep_unet", Layout((2, 2, 2, 2), 2, "eager-1f1b"), "adam")
    yield Combo("tied", Layout((2, 2, 2, 2), 4, "1f1b", remat=Remat.FULL), "adam")
    yield Combo("tied", Layout((4, 4), 4, "zb-h1", remat=Remat.SELECTIVE), "adam")


CHOSEN = tuple(_chosen())
# Of these, those that take longest: every change passes the first, too.
IN_CI = (
    "encoder_decoder-zb-h1-2+2+4-m8-sgd",
    "dropout-zb-v-4+4-m4-adam",
    "gpt_scan_raw-zb-h1-4+4-m4-adam",
    "moe_switch-gpipe-4+4-m4-adam",
    "mlp_seven-zb-h2-2+2+4-m8-adam",
    "mlp_seven-looped-bfs-2+2+4-m16-adam",
    "deep_unet-eager-1f1b-2+2+2+2-m2-adam",
)
LONG = (
    "clip-zb-h2-4+4-m4-sgd",
    "tied-1f1b-2+2+2+2-m4-full-adam",
    "unet-zb-interleaved-4+4-m4-sgd",
)


def _marks(combo: Combo) -> list[pytest.MarkDecorator]:
    if str(combo) in LONG:
        return [pytest.mark.slow]
    return [pytest.mark.ci] if str(combo) in IN_CI else []


COMBOS = (
    *(pytest.param(c, id=str(c), marks=_marks(c)) for c in CHOSEN),
    *(pytest.param(c, id=str(c), marks=pytest.mark.slow) for c in every_combo() if c not in CHOSEN),
)


@pytest.mark.parametrize("combo", COMBOS)
def test_three_steps_equal_plain_jit(combo: Combo) -> None:
    subject, layout = zoo_subject(combo.model, combo.optimizer), combo.layout
    if combo.model == WHOLE_BATCH and layout.microbatches > 1:
        with pytest.raises(BatchStatisticError, match=r"BatchNorm(.|\n)*vision\.py"):
            on_stages(subject, layout)
        return
    if _needs_flush(combo):
        with pytest.raises(GraphError, match="all forwards before all backwards"):
            on_stages(subject, layout)
        return
    _needs_layers(subject.sliced(layout).layers.layers, layout)
    got = subject.run(executor_of(subject, layout, on_stages(subject, layout)))
    assert not differing(got, plain_zoo(combo.model, combo.optimizer))


def _needs_flush(combo: Combo) -> bool:
    mixes = combo.layout.schedule not in FLUSHING
    return combo.model == TWO_PHASE and combo.layout.microbatches > 1 and mixes


def _needs_layers(layers: tuple[object, ...], layout: Layout) -> None:
    stages = len(layout.sizes) * layout.chunks
    if len(layers) < stages:
        pytest.skip(f"{len(layers)} layers for {stages} stages")


ORDERED = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


MOST_MIXED = ("interleaved", "zb-v")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in MOST_MIXED else [pytest.mark.slow]) for n in ORDERED]
)
def test_a_schedule_equals_the_plain_loop_bit_for_bit(name: str) -> None:
    """Gradients and metrics are summed in the order of the microbatches, whatever runs when."""
    subject, layout = zoo_subject("mlp_seven", "adam"), Layout((2, 4), 8, name)
    made, loop = on_stages(subject, layout), in_plain_order(subject, layout)
    assert made.program.parts == loop.program.parts
    assert _runs(made.program.instructions) != _runs(loop.program.instructions)
    got = subject.run(executor_of(subject, layout, made))
    assert not differing_bits(got, subject.run(executor_of(subject, layout, loop)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("model", [m for m in MODELS if m not in (TWO_PHASE, WHOLE_BATCH)])
def test_every_model_equals_its_plain_loop_bit_for_bit(model: str, name: str) -> None:
    subject, layout = zoo_subject(model, "adam"), Layout((2, 2), 4, name)
    _needs_layers(subject.sliced(layout).layers.layers, layout)
    got = subject.run(executor_of(subject, layout, on_stages(subject, layout)))
    assert not differing_bits(
        got, subject.run(executor_of(subject, layout, in_plain_order(subject, layout)))
    )


def _runs(instructions: tuple[object, ...]) -> list[Run]:
    return [step for step in instructions if isinstance(step, Run)]


@pytest.mark.parametrize("sizes", [(4, 2, 2), (1, 1, 2, 4)], ids=str)
def test_stages_may_have_different_numbers_of_devices(sizes: tuple[int, ...]) -> None:
    subject, layout = zoo_subject("mlp_seven", "adam"), Layout(sizes, 4, "zb-h1")
    made = on_stages(subject, layout)
    assert [len(s.devices) for s in made.program.submeshes] == list(sizes)
    assert not differing(
        subject.run(executor_of(subject, layout, made)), plain_zoo("mlp_seven", "adam")
    )
