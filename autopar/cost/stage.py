"""The cost of a stage, or of a layer that is a stage of its own, on one device of its submesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.memory import Held
from autopar.cost.timeline import Seconds, Timed, moved_seconds
from autopar.ir.compiler_options import PIPELINED
from autopar.ir.listing import Listing, Traffic, traffic_of
from autopar.ir.peak import Peak
from autopar.schedule.times import StageTimes

_NONE = Seconds()


@dataclass(frozen=True)
class StageCost:
    """Seconds of one microbatch by kind of part, and of a step; bytes of one device.

    `once` are gradient reductions and the update. `fixed_bytes` are held throughout: arguments,
    what is set up once, accumulators. `activation_bytes` are kept from a microbatch's F to its I,
    `kept_bytes` of them until its W. `late_bytes` of them are made by I and wait for W, which they
    do only where W is a task of its own. `working_bytes` are the most that a part of the loop holds
    beside all that; `once_bytes` are the most that the update does, when nothing is in flight.
    `traffic` says how often a step runs the part that it is of. A step that is one program runs
    once, what is `held` at most tells when and what that is, `pipelined` are the kinds of
    collectives that its compiler is asked to run beside other trips of their loops, and it `merges`
    products of one value or does not.
    """

    forward: Seconds = _NONE
    input_gradient: Seconds = _NONE
    weight_gradient: Seconds = _NONE
    once: Seconds = _NONE
    fixed_bytes: int = 0
    activation_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0
    late_bytes: int = 0
    once_bytes: int = 0
    traffic: tuple[tuple[Traffic, int], ...] = ()
    held: Held | None = None
    pipelined: frozenset[str] = frozenset(PIPELINED)
    merges: bool = False

    @classmethod
    def of_whole_step(cls, listing: Listing, held: Held, timed: Timed) -> StageCost:
        """The cost of a step that is one program."""
        return cls(
            once=timed.seconds,
            fixed_bytes=held.argument_bytes,
            working_bytes=held.peak_bytes - held.argument_bytes,
            traffic=tuple((t, 1) for t in traffic_of(listing, moved_seconds(timed))),
            held=held,
            pipelined=timed.pipelined,
            merges=timed.merges,
        )

    @classmethod
    def of_layers(cls, layers: Sequence[StageCost]) -> StageCost:
        """The cost of layers in a row as one stage: all adds up, but for what a part works in.

        The loop goes layer by layer; the update holds results of one for what it does next.
        """
        return cls(
            sum((layer.forward for layer in layers), _NONE),
            sum((layer.input_gradient for layer in layers), _NONE),
            sum((layer.weight_gradient for layer in layers), _NONE),
            sum((layer.once for layer in layers), _NONE),
            sum(layer.fixed_bytes for layer in layers),
            sum(layer.activation_bytes for layer in layers),
            sum(layer.kept_bytes for layer in layers),
            max(layer.working_bytes for layer in layers),
            sum(layer.late_bytes for layer in layers),
            sum(layer.once_bytes for layer in layers),
        )

    @property
    def peak(self) -> Peak | None:
        """The moment at which a step that is one program holds the most."""
        return self.held.peak if self.held is not None else None

    @property
    def each(self) -> Seconds:
        """F, I and W of one microbatch."""
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def unsplit(self) -> StageCost:
        """The cost where I and W are one task: what I makes for W is gone when both are done."""
        return replace(
            self, activation_bytes=self.activation_bytes - self.late_bytes, kept_bytes=0,
            late_bytes=0,
        )  # fmt: skip

    def of_step(self, microbatches: int) -> Seconds:
        """Seconds of a step, all work one after the other."""
        return self.each.times(microbatches) + self.once

    def towards(self, other: StageCost, share: float) -> StageCost:
        """The cost at a `share` of the way to another, on a line; never below zero."""
        return self.with_more(self, other, share, share)

    def with_more(
        self, one: StageCost, other: StageCost, times: float, times_bytes: float
    ) -> StageCost:
        """The cost with so many times what another takes, and holds, more than `one`.

        It is never below zero.
        """

        def seconds(own: Seconds, a: Seconds, b: Seconds) -> Seconds:
            return Seconds(
                _beside(own.compute, a.compute, b.compute, times),
                _beside(own.communication, a.communication, b.communication, times),
                _beside(own.exposed, a.exposed, b.exposed, times),
                _beside(own.arithmetic, a.arithmetic, b.arithmetic, times),
            )

        def nbytes(own: int, a: int, b: int) -> int:
            return round(_beside(own, a, b, times_bytes))

        return replace(
            self,
            forward=seconds(self.forward, one.forward, other.forward),
            input_gradient=seconds(self.input_gradient, one.input_gradient, other.input_gradient),
            weight_gradient=seconds(
                self.weight_gradient, one.weight_gradient, other.weight_gradient
            ),
            once=seconds(self.once, one.once, other.once),
            fixed_bytes=nbytes(self.fixed_bytes, one.fixed_bytes, other.fixed_bytes),
            activation_bytes=nbytes(
                self.activation_bytes, one.activation_bytes, other.activation_bytes
            ),
            kept_bytes=nbytes(self.kept_bytes, one.kept_bytes, other.kept_bytes),
            working_bytes=nbytes(self.working_bytes, one.working_bytes, other.working_bytes),
            late_bytes=nbytes(self.late_bytes, one.late_bytes, other.late_bytes),
            once_bytes=nbytes(self.once_bytes, one.once_bytes, other.once_bytes),
        )


def stage_times(costs: Sequence[StageCost], send_seconds: Sequence[float]) -> StageTimes:
    """The stages as the simulation of a schedule has them, with the transfers between them."""
    return StageTimes(
        forward=tuple(c.forward.total for c in costs),
        input_gradient=tuple(c.input_gradient.total for c in costs),
        weight_gradient=tuple(c.weight_gradient.total for c in costs),
        send_seconds=tuple(send_seconds),
        activation_bytes=tuple(c.activation_bytes for c in costs),
        kept_bytes=tuple(c.kept_bytes for c in costs),
    )


def peak_bytes(costs: Sequence[StageCost], in_flight: int) -> int:
    """The most that a device holds for its stages with so many microbatches in flight."""
    return peak_with(costs, sum(in_flight * c.activation_bytes for c in costs))


def peak_with(costs: Sequence[StageCost], flying_bytes: int) -> int:
    """The most that a device holds for its stages with so many bytes of activations at most."""
    always, update = sum(c.fixed_bytes for c in costs), sum(c.once_bytes for c in costs)
    return always + max(flying_bytes + max((c.working_bytes for c in costs), default=0), update)


def _beside(own: float, one: float, other: float, times: float) -> float:
    return max(0.0, own + times * (other - one))
