"""Any step on any stages under any schedule gives the numbers of the plain loop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.batching import FREE, Moment, Rows, When
from autopar.ir.stages import Remat
from autopar.ir.values import Role
from autopar.passes.lower.partition import part_assignment, step_analysis
from autopar.schedule.table import SCHEDULES
from tests.passes.loopback import assert_equals_plain
from tests.passes.sketch import Sketch, number, with_stages
from tests.passes.steps import Chain

SHAPE = (2, 3)
NAMES = tuple(s.name for s in SCHEDULES.values() if s.has_backward)


@settings(max_examples=40)
@given(st.data())
def test_chains(data: st.DataObject) -> None:
    layers, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    flags = st.booleans()
    skips = data.draw(
        st.lists(st.tuples(st.integers(0, layers), st.integers(0, layers)), max_size=2)
    )
    chain = Chain(
        layers, m, tuple((a, b) for a, b in skips if a < b < layers),
        tied=layers > 1 and data.draw(flags), decay=data.draw(flags), clip=data.draw(flags),
        momentum=data.draw(flags), bias=data.draw(flags), cast=data.draw(flags),
    )  # fmt: skip
    _check(data, chain.sketch(), m, 1)


@settings(max_examples=100)
@given(st.data())
def test_steps_of_any_form(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The steps are tiny: with lower limits what joins stages is wide, what expands is large.
        patch.setattr(part_assignment, "_FEW_BYTES", data.draw(st.sampled_from([0, 100, 4096])))
        patch.setattr(step_analysis, "_KEPT_BYTES", data.draw(st.sampled_from([0, 65536])))
        _check_any(data)


def _check_any(data: st.DataObject) -> None:
    m, loops = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    _check(data, _random_step(data, m, loops), m, loops)


def _check(data: st.DataObject, sketch: Sketch, m: int, loops: int) -> None:
    layers = sketch.layer_count
    schedule = SCHEDULES[data.draw(st.sampled_from(NAMES))]
    least, most = schedule.chunks
    v = data.draw(st.integers(least, min(2, most or 2)))
    p = data.draw(st.integers(1, 3))
    if p * v > layers or (schedule.even_groups and v > 1 and m % max(1, m // p)):
        return
    cuts = data.draw(
        st.lists(st.integers(1, layers - 1), min_size=p * v - 1, max_size=p * v - 1, unique=True)
        if p * v > 1
        else st.just([])
    )
    batching = sketch.batching(m, SHAPE[0], loops)
    stages = sketch.staged(batching, [0, *sorted(cuts)], schedule.name, p)
    assert_equals_plain(batching, with_stages(stages, remat=data.draw(st.sampled_from(Remat))))


class _Random:
    """Draws ops that read what there is, with homes that need not suit them."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.s = data, Sketch()
        self.layers = data.draw(st.integers(1, 6))
        self.free: list[str] = []
        self.looped: list[str] = []

    def home(self) -> int:
        return self.data.draw(st.integers(-1, self.layers - 1))

    def pick(self, names: list[str]) -> str:
        return self.data.draw(st.sampled_from(names))

    def op(self, names: list[str]) -> str:
        kind = self.data.draw(st.sampled_from(["add", "mul", "tanh", "sum"]))
        if kind == "sum":
            small = self.s.total(self.pick(names))
            self.s.homes[-1] = self.home()
            wide = self.s.spread(small, SHAPE)
            self.s.homes[-1] = self.home()
            return self.s.op("mul", self.pick(names), wide, layer=self.home())
        operands = [self.pick(names)] if kind == "tanh" else [self.pick(names), self.pick(names)]
        return self.s.op(kind, *operands, layer=self.home())


def _random_step(data: st.DataObject, m: int, loops: int) -> Sketch:
    r = _Random(data)
    s = r.s
    layer = st.integers(0, r.layers - 1)
    states = [
        s.given(f"w{k}", SHAPE, Role.STATE, *data.draw(st.lists(layer, max_size=2)))
        for k in range(data.draw(st.integers(1, 3)))
    ]
    r.free += states
    batch = [s.given("x", SHAPE, Role.BATCH, 0)]
    r.free.append(s.given("mask", SHAPE, Role.CONSTANT))
    s.moment = FREE
    r.free += [r.op(r.free) for _ in range(data.draw(st.integers(0, 4)))]
    for loop in range(loops):
        looped, summed = list(batch), list[str]()
        s.moment = Moment(When.LOOP, (loop,))
        for region in ("forward", "backward"):
            s.region = region
            for _ in range(data.draw(st.integers(1, 5))):
                # Something of the batch must be in it, or it would not be in the loop.
                name = s.op("mul", r.pick(looped), r.op(r.free + looped), layer=r.home())
                s.rows[name] = Rows(0)
                looped.append(name)
            for _ in range(data.draw(st.integers(1, 2))):
                kept = s.op("mul", r.pick(looped), number(0.5), layer=r.home())
                summed.append(s.sums(kept))
        if loop == loops - 1 and data.draw(st.booleans()):
            s.returns(looped[-1])
        s.region, s.moment = "update", Moment(When.ONCE, (loop,))
        r.free += summed
        r.free += [
            s.op("add", r.pick(summed), r.op(r.free), layer=r.home())
            for _ in range(data.draw(st.integers(1, 4)))
        ]
    for name in states:
        s.returns(r.pick([*r.free, name]), name)
    s.returns(r.pick(r.free))
    return s
