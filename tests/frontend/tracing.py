"""Short ways to trace a function and to look into its graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontend import StepSpec, TracedStep, build, trace
from autopar.frontend.rewrite.layer_scans import layer_scans
from autopar.frontend.rewrite.remat import inline_remats
from autopar.frontend.rewrite.scan_split import Cuts, split_at
from autopar.ir.graph import Graph
from autopar.ir.values import Role
from tests.zoo import cases

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape of an array, which is all that tracing needs."""
    return jax.ShapeDtypeStruct(dims, dtype)


def traced(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> TracedStep:
    """A function traced with nothing declared."""
    return trace(StepSpec(fun), args, kwargs)


def graph_of(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """The graph of a function traced with nothing declared."""
    return checked(traced(fun, *args, **kwargs))


def checked(step: TracedStep) -> Graph:
    """The graph of a traced step, which keeps its own laws."""
    graph = build(step)
    graph.verify()
    return graph


def zoo_step(name: str) -> TracedStep:
    """A model of the zoo with Adam, traced on shapes."""
    case = cases("adam")[name]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    return traced(case.step, state, case.batch(0))


def without_remat(step: TracedStep) -> TracedStep:
    """The step with the bodies of its remat equations in line; itself where it has none."""
    program = inline_remats(step.program)
    if program is step.program:
        return step
    opened = replace(step, program=program)
    return replace(opened, graph=build(opened))


def cut_at(step: TracedStep, cuts: Cuts) -> TracedStep:
    """The step with its scans over layers cut."""
    return split_at(step, layer_scans(step), cuts, next(step.program.fresh()))[0]


def paths(graph: Graph, role: Role) -> list[str]:
    """Paths of the inputs of that role."""
    return [i.path for i in graph.inputs if i.role is role]


def kinds(graph: Graph) -> list[str]:
    """What the ops are, in order, bodies left out."""
    return [op.kind for op in graph.ops]


def returned(graph: Graph) -> dict[str, str]:
    """Paths of outputs to paths of the state that they replace."""
    return {graph.output_paths[o]: graph.inputs[i].path for o, i in graph.donated}
