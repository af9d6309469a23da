"""The layers of a step, in time and bytes on one device: what a profile of it should say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.cost.profile import profile_of
from autopar.frontend import StepSpec, trace
from autopar.ir.profile import Profile
from autopar.planner.plan import warn_of_unknown
from autopar.rules import RuleBook, attach_rules


def profile_layers(
    spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any], cluster: Cluster, depth: int | None
) -> Profile:
    """The profile of a step's layers, as deep as modules are nested, by the prices of a chip.

    Warns of primitives that have no rule.
    """
    graph = attach_rules(trace(spec, args, kwargs).graph, RuleBook())
    warn_of_unknown(graph)
    source = f"predicted by autopar for one device of {cluster.name}"
    return profile_of(graph, cluster.chip, depth, source)
