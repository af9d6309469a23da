"""What a step is said to hold where values are made again is what the rewritten step holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

import autopar
from autopar.ir.sharding_plan import Recomputation
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.model.recompute import least_again
from autopar.passes.shard.model.residuals import Residuals
from autopar.planner.plan import plan_step
from autopar.planner.planned import Planned
from autopar.planner.remat import Form, form_of
from autopar.planner.request import Request
from autopar.rules import RuleBook
from benchmarks import models
from tests.end_to_end.running import zoo_case


def planned(model: str) -> Planned:
    """A model's step on eight devices, data-parallel: no form of it is sharded otherwise."""
    given: tuple[Any, Any, Any]
    if model.startswith("gpt"):
        given = models.gpt(2, 128, 4, 512, 128, 16, scan=model == "gpt scan")
    else:
        case = zoo_case(model, "sgd")
        given = case.create_state, case.step, case.batch(0)
    create, step, batch = given
    state = jax.eval_shape(create, jax.random.key(0))
    return autopar.parallelize(step, cluster="8xh100", mesh=(8,), method="dp").planned(state, batch)


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize(
    ("model", "error"),
    # In a loop's body what is made again counts beside the most that is held there without it.
    [("gpt", 0.02), ("gpt scan", 0.21), ("wide_resnet_bn", 0.02), ("unet", 0.02)],
)
def test_what_a_rerun_holds_is_what_the_rewritten_step_holds(
    model: str, error: float, share: float
) -> None:
    found = planned(model)
    prices = found.programs.placed.contexts[0].tables.prices
    residuals = Residuals(found.graph, found.program.parts[0].listing, prices)
    whole = residuals.peak(frozenset())
    predicted = found.plan.prediction
    assert whole == predicted.peak_bytes - predicted.argument_bytes

    cut = least_again(residuals.tradeoff, residuals.peak, share * whole)
    assert cut is not None
    assert cut.peak_bytes < whole
    form = form_of(
        Form(found.trace.whole, found.graph), Recomputation(residuals.values(cut.again)), RuleBook()
    )
    request = Request(prices.cluster, found.plan.mesh, PassPipeline.of_options("dp"), remat=False)
    again = plan_step(replace(found.source, traced=form.traced), request).plan.prediction
    assert again.peak_bytes - again.argument_bytes == pytest.approx(cut.peak_bytes, rel=error)
