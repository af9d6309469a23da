"""The transport by sockets: the sender offers pieces under a number, the receiver pulls them.

No order is needed between two processes, and a pull that waits for its offer holds up nothing
else. An offer names its send, its leg and the call; it stays until it is pulled, and what is
offered must not be donated before that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, final

import jax

from autopar.errors import JobError
from autopar.frontend import compat
from autopar.ir.projection import transfer_id
from autopar.runtime.job import Job, unreachable
from autopar.runtime.transport.abstract import AbstractTransport, Copier, Endpoint, Route
from autopar.runtime.transport.crossing import Leg, LegCarrier, crossed

_STREAMS = 4  # sockets between two processes


@final
class PullTransport(AbstractTransport):
    """Transport by `jax.experimental.transfer`, with a server of its own in every process."""

    name = "pull"

    def __init__(self, job: Job) -> None:
        from jax.experimental import transfer  # not in every build of JAX

        self._job = job
        client = jax.local_devices()[0].client
        own = f"{job.address}:0"
        self._server = transfer.start_transfer_server(client, own, [own] * _STREAMS)
        self._topic = job.topic("transfer")
        job.tell(self._topic, str(self._server.address()))
        self._connections: dict[int, Any] = {}

    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A function of arrays on `source` that gives those on `target`, and does not block."""
        me = self._job.index
        return crossed(
            routes, source, target, me, lambda leg: self._carrier(leg, edge), takes_wholes=True
        )

    def _carrier(self, leg: Leg, edge: int) -> LegCarrier | None:
        calls = itertools.count()

        def number() -> int:
            return transfer_id(edge, leg.number, next(calls))

        if leg.sender == self._job.index:
            await_pull = compat.offerer(self._server)

            def offer(pieces: Sequence[Any]) -> Sequence[Any]:
                await_pull(number(), list(pieces))
                return ()

            return offer
        if leg.receiver == self._job.index:
            kinds = [
                jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.arriving) for p in leg.pieces
            ]
            pull = compat.puller(self._connection(leg.sender), kinds)
            return lambda pieces: pull(number())
        return None

    def _connection(self, process: int) -> Any:
        if process not in self._connections:
            address = self._job.heard(self._topic, process, "the first step")
            if why := unreachable(address):  # a pull from there would wait for ever
                raise JobError(
                    f"process {self._job.index} of {self._job.count} cannot reach process "
                    f"{process} at {address}: {why}. Arrays travel between all processes, by ports "
                    "that the system picks: open them between the hosts"
                )
            self._connections[process] = self._server.connect(address)
        return self._connections[process]
