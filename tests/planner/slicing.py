"""Zoo models cut into microbatches and layers, as the stage search has them."""

from functools import cache

import jax

from autopar.cluster import Cluster
from autopar.frontend import StepSpec, trace
from autopar.ir.sharding import MeshShape
from autopar.passes.base import Setting
from autopar.planner.request import Request
from autopar.planner.sliced_step import SlicedStep, Source, slice_step
from autopar.rules import RuleBook
from tests.zoo.registry import cases

SETTING = Setting(Cluster.parse("8xh100"), MeshShape((), ()), 2**60)


@cache
def source(model: str) -> Source:
    """A model as the search traces it."""
    case = cases("adam")[model]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    args = (state, case.batch(0))
    spec = StepSpec(case.step)
    traced = trace(spec, args, {})
    return Source.of(spec, args, {}, traced, Request(Cluster.parse("8xh100")))


@cache
def sliced(model: str, microbatches: int) -> SlicedStep:
    """A model in so many microbatches, its scans over layers cut."""
    return slice_step(source(model).trace_at(microbatches, cut=True), RuleBook(), SETTING)
