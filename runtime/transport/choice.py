"""The choice of a transport: by platform, unless the user names one."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from autopar.runtime.bind import host_of
from autopar.runtime.job import Job
from autopar.runtime.transport.abstract import AbstractTransport
from autopar.runtime.transport.local import LocalTransport
from autopar.runtime.transport.pull import PullTransport
from autopar.runtime.transport.put import PutTransport

# CPUs have no wires of their own between processes, and pulls need no order there.
_BY_PLATFORM = {"cpu": PullTransport.name}


def transport_for(asked: str, meshes: Sequence[Mesh], job: Job) -> AbstractTransport:
    """The transport between submeshes; "auto" is pull on CPUs, and put on GPUs and TPUs.

    Where every submesh is on all processes, or there is one, nothing travels between processes.
    """
    host = host_of(meshes)
    if host.is_alone or (len(meshes) == 1 and not host.others(0)):
        return LocalTransport()
    name = asked
    if asked == "auto":
        name = _BY_PLATFORM.get(str(meshes[0].devices.flat[0].platform), PutTransport.name)
    return PullTransport(job) if name == PullTransport.name else PutTransport(job.index)
