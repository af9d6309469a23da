"""Tells whether a plan that was made before is for this step, this JAX and this cluster."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.errors import GraphError, PlanMismatchError
from autopar.frontend import TracedStep
from autopar.frontend.compat import jax_minor
from autopar.ir.plan import Argument, Plan


def check_ends(plan: Plan, arguments: Sequence[Argument], outputs: Sequence[Argument]) -> None:
    """Raise GraphError unless the plan lists the arguments and outputs that its program has."""
    for listed, made in ((plan.arguments, arguments), (plan.outputs, outputs)):
        if len(listed) != len(made):
            raise GraphError(f"it lists {len(listed)} arguments or outputs of {len(made)}")
        for a, b in zip(listed, made, strict=True):
            if a != b:
                raise GraphError(
                    f"it lists {a.role} {a.path} {a.dtype}{list(a.shape)} as {a.sharding} on mesh "
                    f"{a.submesh}, and its program has {b.role} {b.path} "
                    f"{b.dtype}{list(b.shape)} as {b.sharding} on mesh {b.submesh}"
                )


def check_plan(plan: Plan, traced: TracedStep) -> None:
    """Raise PlanMismatchError unless the plan is for this step under this JAX minor release."""
    faults = [*_argument_faults(plan, traced)]
    if plan.origin.jax_minor != jax_minor():
        faults.append(f"it was made with JAX {plan.origin.jax_minor}, this is JAX {jax_minor()}")
    if not faults and plan.origin.graph_key != traced.key:
        faults.append(
            "the arguments agree but the step's operations differ (graph "
            f"{plan.origin.graph_key[:12]} in the plan, {traced.key[:12]} here)"
        )
    if faults:
        lines = "\n".join(f"* {f}" for f in faults[:8])
        raise PlanMismatchError(
            f"the plan of {plan.origin.step} cannot run this {traced.name}:\n{lines}\n"
            "Plan again for this step, or load the plan that was made for it."
        )


def _argument_faults(plan: Plan, traced: TracedStep) -> list[str]:
    planned = {a.path: (a.shape, a.dtype) for a in plan.arguments}
    here = {i.path: (i.value.shape, i.value.dtype) for i in traced.graph.inputs}
    faults = [f"{_named(p)} is in the plan only" for p in planned if p not in here]
    faults += [f"{_named(p)} is in the step only" for p in here if p not in planned]
    for path in planned.keys() & here.keys():
        if planned[path] != here[path]:
            (old_shape, old), (new_shape, new) = planned[path], here[path]
            faults.append(
                f"argument {path} is {old}{list(old_shape)} in the plan and "
                f"{new}{list(new_shape)} here"
            )
    return sorted(faults)


def _named(path: str) -> str:
    """An argument, or an array that the step's code refers to, in words."""
    own = path.startswith("const/")
    return f"{path}, an array from outside of the step," if own else f"argument {path}"


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Raise PlanMismatchError unless the plan was made for this cluster."""
    if plan.origin.cluster_fingerprint != cluster.fingerprint():
        raise PlanMismatchError(
            f"the plan was made for cluster {plan.origin.cluster_name} and this is {cluster.name}: "
            "their devices, links or figures differ. Plan again for this cluster."
        )
