"""Everything that a plan says when it is read closely: what `show`, `report` and `diff` draw."""

from __future__ import annotations

from autopar.inspecting.axes import axis_uses
from autopar.inspecting.comm import comm_rows
from autopar.inspecting.curve import memory_curves
from autopar.inspecting.flow import flows_of
from autopar.inspecting.modules import module_rows
from autopar.inspecting.ops import op_rows, ops_of
from autopar.inspecting.reopen import Opened
from autopar.inspecting.spans import kernel_spans
from autopar.ir.inspection import Inspection


def inspect(opened: Opened) -> Inspection:
    """A plan read closely: nothing is solved, and every figure is of the predictions' models."""
    plan = opened.plan
    flows = flows_of(opened.listings)
    axes = axis_uses(opened.batching.graph, flows)
    ops = [op for flow in flows for op in ops_of(flow)]
    return Inspection(
        meshes=tuple(s.mesh for s in plan.submeshes),
        axes=axes,
        modules=module_rows(flows, ops),
        ops=op_rows(ops),
        collectives=comm_rows(flows, {(use.submesh, use.axis): use.roles for use in axes}),
        spans=kernel_spans(flows[0]) if plan.is_one_program else (),
        memory=memory_curves(opened, flows),
    )
