"""Two stages by hand, in JAX alone: what the same layers and transfers take without autopar.

Each submesh has half of the devices, with rows over them; gradients stay partial until the update.
Activations, their gradients and the loss cross by `jax.device_put` or, between two processes, by
`jax.experimental.transfer`. Microbatches go in 1F1B order, and lie where they are read before the
first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.job import Job

_STREAMS = 4  # sockets between two processes, as autopar has
_ROWS, _WHOLE = PartitionSpec("data"), PartitionSpec()


@dataclass(frozen=True)
class Taken:
    """Seconds of a step, the least that its thread works, and the calls of JAX that this is for."""

    step: float
    host: float
    calls: int


@final
class Bare:
    """The stages of a chain of `tanh(x @ w)` that this process has: both, where there is one.

    `weights` and the batch's `x` and `y` are the same in every process.
    """

    def __init__(self, job: Job, weights: Sequence[Any], x: Any, y: Any, microbatches: int) -> None:
        halves = np.array(jax.devices(), dtype=object).reshape(2, -1)
        meshes = [Mesh(own, ("data",)) for own in halves]
        half, self._count, self._number = len(weights) // 2, microbatches, 0
        self._calls = 0
        stages = [
            _Stage(meshes[s], own, np.split(rows, microbatches))
            for s, (own, rows) in enumerate(((weights[:half], x), (weights[half:], y)))
            if halves[s][0].process_index == jax.process_index()
        ]
        self._first: _Stage | None = stages[0] if job.index == 0 else None
        self._last: _Stage | None = stages[-1] if job.index == job.count - 1 else None
        self._rows = [NamedSharding(mesh, _ROWS) for mesh in meshes]
        self._activation = x.shape[0] // microbatches, *x.shape[1:]
        if len(stages) == 1:
            client, own = jax.local_devices()[0].client, f"{job.address}:0"
            self._server = transfer.start_transfer_server(client, own, [own] * _STREAMS)
            topic = job.topic("bare")
            job.tell(topic, str(self._server.address()))
            self._peer = self._server.connect(job.heard(topic, 1 - job.index, "the bare stages"))

    def step(self) -> Any:
        """A step over the whole batch, and its loss, a part on each device."""
        first, last, m = self._first, self._last, self._count
        arrived = {i: self._forward(i) for i in range(min(2, m))}
        for i in range(m):
            slope = last.turn(i, arrived.pop(i)) if last is not None else None
            slope = self._sent(0, slope, self._activation)
            if first is not None:
                first.backward(i, slope)
            if i + 2 < m:
                arrived[i + 2] = self._forward(i + 2)
        for stage in (first, last):
            if stage is not None:
                stage.update()
        loss = last.told() if last is not None else None
        if first is None or last is None:  # who has none is told
            told = self._sent(0, loss, (len(jax.local_devices()),))
            loss = told if last is None else loss
        return loss

    def taken(self, count: int) -> Taken:
        """The time of a step, of so many."""
        stages, worked = [s for s in (self._first, self._last) if s is not None], list[float]()
        calls, began = self._calls + sum(s.calls for s in stages), time.perf_counter()
        for _ in range(count):
            own = time.thread_time()
            loss = self.step()
            worked.append(time.thread_time() - own)
            float(np.sum(np.asarray(loss)))
        jax.block_until_ready([s.weights for s in stages])
        step = (time.perf_counter() - began) / count
        made = self._calls + sum(s.calls for s in stages) - calls
        return Taken(step, min(worked), made // count)

    def _forward(self, i: int) -> Any:
        made = self._first.forward(i) if self._first is not None else None
        return self._sent(1, made, self._activation)

    def _sent(self, target: int, array: Any, shape: tuple[int, ...]) -> Any:
        """An array of the other stage on the devices of this one, where they are this process's."""
        self._calls += 1
        if self._first is not None and self._last is not None:
            return jax.device_put(array, self._rows[target])
        self._number += 1
        if array is not None:
            self._server.await_pull(self._number, [array])
            return None
        kind = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._rows[target])
        return self._peer.pull(self._number, [kind])[0]


@final
class _Stage:
    """The layers of one stage on its mesh; its rows are the batch's, cut into microbatches."""

    def __init__(self, mesh: Mesh, weights: Sequence[Any], rows: Sequence[Any]) -> None:
        whole, cut = NamedSharding(mesh, _WHOLE), NamedSharding(mesh, _ROWS)
        self.weights = [jax.device_put(w, whole) for w in weights]
        self._rows = [jax.device_put(r, cut) for r in rows]
        self._kept: dict[int, tuple[Any, Any]] = {}
        self.calls = 0  # of compiled programs
        n, total = len(weights), sum(r.size for r in rows)
        side = (mesh.size, *weights[0].shape)

        def forward(weights: Any, x: Any) -> Any:
            held: list[Any] = []
            for w in weights:
                x = jnp.tanh(x @ w)
                held.append(x)
            return held

        def backward(weights: Any, x: Any, held: Any, slope: Any, sums: Any) -> Any:
            added = list(sums)
            for k in reversed(range(n)):
                slope = slope * (1 - held[k] ** 2)
                before = held[k - 1] if k else x
                added[k] = sums[k] + (before.T @ slope)[None]
                slope = slope @ weights[k].T
            return slope, added

        def loss(made: Any, y: Any, before: Any) -> Any:
            return 2 * (made - y) / total, before + jnp.sum((made - y) ** 2)[None] / total

        def update(weights: Any, sums: Any) -> Any:
            return [
                w - 0.01 * jax.lax.psum(s[0], "data") for w, s in zip(weights, sums, strict=True)
            ]

        def begin() -> Any:
            return [jnp.zeros(side, jnp.float32)] * n, jnp.zeros((mesh.size,), jnp.float32)

        def mapped(fun: Callable[..., Any], given: Any, made: Any, *donated: int) -> Any:
            found = jax.shard_map(fun, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
            return jax.jit(found, donate_argnums=donated)

        self._forward = mapped(forward, (_WHOLE, _ROWS), _ROWS)
        self._backward = mapped(backward, (_WHOLE, _ROWS, _ROWS, _ROWS, _ROWS), _ROWS, 4)
        self._loss = mapped(loss, (_ROWS, _ROWS, _ROWS), _ROWS, 2)
        self._update = mapped(update, (_WHOLE, _ROWS), _WHOLE, 0)
        self._begin: Any = jax.jit(begin, out_shardings=cut)
        self._sums, self._told = self._begin()

    def forward(self, i: int) -> Any:
        """The activations that leave, of a microbatch."""
        self.calls += 1
        held = self._forward(self.weights, self._rows[i])
        self._kept[i] = self._rows[i], held
        return held[-1]

    def turn(self, i: int, arrived: Any) -> Any:
        """Both passes of the last stage, and the gradient of what arrived."""
        self.calls += 2
        held = self._forward(self.weights, arrived)
        slope, self._told = self._loss(held[-1], self._rows[i], self._told)
        self._kept[i] = arrived, held
        return self.backward(i, slope)

    def backward(self, i: int, slope: Any) -> Any:
        """The gradient of what came in; those of the weights are added."""
        self.calls += 1
        made, self._sums = self._backward(self.weights, *self._kept.pop(i), slope, self._sums)
        return made

    def update(self) -> None:
        """The weights after the step."""
        self.calls += 2
        self.weights = self._update(self.weights, self._sums)
        self._sums, _ = self._begin()

    def told(self) -> Any:
        """The loss of the step, a part on each device."""
        self.calls += 1
        found, (_, self._told) = self._told, self._begin()
        return found
