"""The cluster of a plan, read out of the plan itself."""

from __future__ import annotations

from autopar.cluster.cluster import Cluster
from autopar.errors import ClusterError, MeshError, PlanFileError
from autopar.ir.plan import Plan
from autopar.ir.text import brief


def planned_cluster(plan: Plan) -> Cluster:
    """The cluster that a plan was made for, with the figures that it was priced by.

    Raises PlanFileError where the plan holds no cluster, or another than it says.
    """
    where = f"the plan for {brief(ascii(plan.origin.step), 60)}"
    try:
        cluster = Cluster.from_toml_text(plan.origin.cluster, "the plan's cluster")
        known = cluster.device_count == plan.device_count
        agrees = known and cluster.fingerprint() == plan.origin.cluster_fingerprint
    except (ClusterError, MeshError) as error:
        raise PlanFileError(f"{where} is damaged: {brief(error)}") from None
    if not known:
        raise PlanFileError(
            f"{where} is damaged: it is for {plan.device_count} devices, and its cluster has "
            f"{cluster.device_count}"
        )
    if not agrees:
        raise PlanFileError(
            f"{where} is damaged: its cluster's figures do not match its fingerprint"
        )
    return cluster
