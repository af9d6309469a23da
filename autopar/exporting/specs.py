"""A plan's shardings as JSON that any program can read."""

from __future__ import annotations

import json

from autopar.exporting.python import device_numbers
from autopar.ir.codec import Json
from autopar.ir.plan import Argument, Plan
from autopar.ir.sharding import Sharding


def partition_specs(plan: Plan) -> dict[str, Json]:
    """Meshes with their axes and devices, and for each argument and output its PartitionSpec.

    A spec has null, an axis or a list of axes for each dim. `mesh` is the number of the mesh that
    a value lies on: with stages, each submesh is one. Of an argument whose rows lie on several
    meshes there is one entry for each.
    """
    meshes: list[Json] = []
    for submesh, numbers in zip(plan.submeshes, device_numbers(plan), strict=True):
        names, sizes = submesh.mesh.names or ("one",), submesh.mesh.sizes or (1,)
        axes: dict[str, Json] = dict(zip(names, sizes, strict=True))
        meshes.append({"axes": axes, "devices": list(numbers)})
    return {
        "step": plan.origin.step,
        "cluster": plan.origin.cluster_name,
        "meshes": meshes,
        "arguments": [_entry(a) for a in plan.arguments],
        "outputs": [_entry(a) for a in plan.outputs],
    }


def spec_data(sharding: Sharding) -> list[Json]:
    """null, an axis or a list of axes for each dim."""
    return [None if not axes else axes[0] if len(axes) == 1 else list(axes)
            for axes in sharding.dims]  # fmt: skip


def specs_text(plan: Plan) -> str:
    """The JSON with a line for each mesh and each value."""
    rows: list[str] = []
    for key, held in partition_specs(plan).items():
        if isinstance(held, list):
            inside = ",\n".join(f"  {json.dumps(entry)}" for entry in held)
            rows.append(f' "{key}": [\n{inside}\n ]')
        else:
            rows.append(f' "{key}": {json.dumps(held)}')
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _entry(held: Argument) -> dict[str, Json]:
    return {
        "path": held.path,
        "mesh": held.submesh,
        "spec": spec_data(held.sharding),
        "shape": list(held.shape),
        "dtype": held.dtype,
    }
