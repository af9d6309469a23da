"""Train steps as sketches: chains of layers with what makes pipelines hard."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.batching import FREE, Batching, Moment, When
from autopar.ir.values import Role
from tests.passes.sketch import LOOP, ONCE, Sketch, number


@dataclass(frozen=True)
class Chain:
    """A chain of tanh(h w) layers with a squared loss; the rest are what a step may add.

    `skips` add the input of one layer to that of a later one. `tied` lets the last layer use the
    weight of the first. `decay` puts the squares of all weights into the loss, `clip` scales
    gradients by their global norm, `momentum` is more state.
    """

    layers: int = 4
    m: int = 4
    skips: tuple[tuple[int, int], ...] = ()
    tied: bool = False
    decay: bool = False
    clip: bool = False
    momentum: bool = False
    bias: bool = False
    cast: bool = False
    rows: int = 2
    width: int = 3

    def sketch(self) -> Sketch:
        """The step."""
        return _Writer(self).written()

    def batching(self) -> Batching:
        """The step, cut."""
        return self.sketch().batching(self.m, self.rows)


class _Writer:
    def __init__(self, chain: Chain) -> None:
        self.chain, self.s = chain, Sketch()
        d, n = chain.width, chain.layers
        own = n - 1 if chain.tied else n
        homes = {k: (0, n - 1) if chain.tied and k == 0 else (k,) for k in range(own)}
        self.weights = [self.s.given(f"w{k}", (d, d), Role.STATE, *homes[k]) for k in range(own)]
        self.biases = [
            self.s.given(f"b{k}", (d,), Role.STATE, k) for k in range(n if chain.bias else 0)
        ]
        self.velocities = [
            self.s.given(f"v{k}", (d, d), Role.STATE, k)
            for k in range(own if chain.momentum else 0)
        ]
        self.count = self.s.given("count", (), Role.STATE)
        self.x = self.s.given("x", (chain.rows, d), Role.BATCH, 0)
        self.y = self.s.given("y", (chain.rows, d), Role.BATCH, n - 1)
        self.gradients: dict[int, list[str]] = {}
        self.bias_gradients: dict[int, str] = {}

    def written(self) -> Sketch:
        self._cast()
        self._forward()
        self._backward()
        self._update()
        return self.s

    def _weight(self, k: int) -> int:
        return 0 if self.chain.tied and k == self.chain.layers - 1 else k

    def _cast(self) -> None:
        s, self.used = self.s, dict(enumerate(self.weights))
        if self.chain.cast:
            s.moment = FREE
            for k, name in enumerate(self.weights):
                self.used[k] = s.op("mul", name, number(0.75), layer=k)

    def _forward(self) -> None:
        s, c = self.s, self.chain
        s.moment, s.region = LOOP, "forward"
        self.entering = [self.x]
        self.activations: list[str] = []
        h = self.x
        for k in range(c.layers):
            s.layer = k
            for first, second in c.skips:
                if second == k:
                    joined = s.op("add", self.entering[k], self.entering[first])
                    self.entering[k] = joined
                    s.rows[joined] = s.rows[self.x]
            z = s.dot(self.entering[k], self.used[self._weight(k)], 1, 0)
            if c.bias:
                z = s.op("add", z, s.spread(self.biases[k], (c.rows, c.width), 1))
            h = s.op("tanh", z)
            self.activations.append(h)
            self.entering.append(h)
            s.rows[z] = s.rows[h] = s.rows[self.x]
        self.error = s.op("sub", h, self.y)
        s.rows[self.error] = s.rows[self.x]
        squares = s.total(s.op("mul", self.error, self.error))
        self.loss = s.sums(s.op("mul", squares, number(1 / (c.m * c.rows))))

    def _backward(self) -> None:
        s, c = self.s, self.chain
        s.region = "backward"
        seed = s.spread(number(2 / (c.m * c.rows)), (c.rows, c.width))
        cotangent = s.op("mul", self.error, seed)
        waiting: dict[int, str] = {}
        for k in reversed(range(c.layers)):
            s.layer = k
            slope = s.op("sub", number(1.0), s.op("mul", self.activations[k], self.activations[k]))
            dz = s.op("mul", cotangent, slope)
            if c.bias:
                self.bias_gradients[k] = s.sums(s.total(dz, 0))
            gradient = s.dot(self.entering[k], dz, 0, 0)
            self.gradients.setdefault(self._weight(k), []).append(s.sums(gradient))
            if k == 0:
                return
            cotangent = s.dot(dz, self.used[self._weight(k)], 1, 1)
            for first, second in c.skips:
                if second == k:
                    waiting[first] = cotangent
            if k in waiting:
                cotangent = s.op("add", cotangent, waiting[k])

    def _update(self) -> None:
        s, c = self.s, self.chain
        s.region, s.moment = "update", ONCE
        total = {k: self._total(k, found) for k, found in self.gradients.items()}
        if c.decay:
            total = {k: self._decayed(k, g) for k, g in total.items()}
        if c.clip:
            total = self._clipped(total)
        for k, name in enumerate(self.weights):
            s.layer = k
            step = total[k]
            if c.momentum:
                step = s.op("add", s.op("mul", self.velocities[k], number(0.9)), step)
                s.moments[-2] = FREE
                s.returns(step, self.velocities[k])
            s.returns(s.op("sub", name, s.op("mul", step, number(0.1))), name)
        for k, name in enumerate(self.biases):
            s.layer = k
            step = s.op("mul", self.bias_gradients[k], number(0.1))
            s.returns(s.op("sub", name, step), name)
        s.moment = FREE
        s.returns(s.op("add", self.count, number(1.0), layer=-1), self.count)
        s.returns(self.loss)

    def _total(self, k: int, found: list[str]) -> str:
        self.s.layer = k
        if len(found) == 1:
            return self.s.op("mul", found[0], number(1.0))
        return self.s.op("add", *found)

    def _decayed(self, k: int, gradient: str) -> str:
        s, name = self.s, self.weights[k]
        s.layer, s.moment = k, FREE
        square = s.total(s.op("mul", name, name))
        share = s.op("mul", name, number(0.02))
        s.moment = ONCE
        scaled = s.op("mul", square, number(0.01))
        s.moments[-1] = FREE
        self.loss = s.op("add", self.loss, scaled, layer=-1)
        return s.op("add", gradient, share)

    def _clipped(self, total: dict[int, str]) -> dict[int, str]:
        s = self.s
        norm = ""
        for k in sorted(total):
            square = s.total(s.op("mul", total[k], total[k], layer=k))
            s.homes[-1] = k
            norm = s.op("add", norm, square, layer=-1) if norm else square
        scale = s.op("div", number(1.0), s.op("sqrt", norm, layer=-1), layer=-1)
        return {k: s.op("mul", g, scale, layer=k) for k, g in total.items()}


def two_passes(m: int = 3, layers: int = 4) -> Sketch:
    """SAM: gradients at the weights, then gradients at weights moved along them."""
    s = Sketch()
    d, rows = 3, 2
    weights = [s.given(f"w{k}", (d, d), Role.STATE, k) for k in range(layers)]
    x = s.given("x", (rows, d), Role.BATCH, 0)
    scaled, moved = "", weights
    for loop in range(2):
        s.moment, s.region = Moment(When.LOOP, (loop,)), "forward"
        if not scaled:
            # Cheap and of the batch alone, so that both loops compute it.
            s.moment = Moment(When.LOOP, (0, 1))
            scaled = s.op("mul", x, number(0.5), layer=0)
            s.rows[scaled] = s.rows[x]
            s.moment = Moment(When.LOOP, (loop,))
        current = moved
        h, entering = scaled, list[str]()
        for k in range(layers):
            entering.append(h)
            h = s.dot(h, current[k], 1, 0)
            s.homes[-1] = k
        loss = s.sums(s.total(h))
        s.homes[-1] = layers - 1
        s.region = "backward"
        cotangent = s.spread(number(1.0), (rows, d))
        s.homes[-1] = -1
        found: dict[int, str] = {}
        for k in reversed(range(layers)):
            s.layer = k
            found[k] = s.sums(s.dot(entering[k], cotangent, 0, 0))
            if k:
                cotangent = s.dot(cotangent, current[k], 1, 1)
        s.moment, s.region = Moment(When.ONCE, (loop,)), "update"
        norm = ""
        for k in range(layers):
            square = s.total(s.op("mul", found[k], found[k], layer=k))
            s.homes[-1] = k
            norm = s.op("add", norm, square, layer=-1) if norm else square
        scale = s.op("div", number(0.1), s.op("sqrt", norm, layer=-1), layer=-1)
        moved = [
            s.op("add", weights[k], s.op("mul", found[k], scale, layer=k), layer=k)
            for k in range(layers)
        ]
        s.returns(loss)
    for k in range(layers):
        s.returns(moved[k], weights[k])
    return s


def balanced(m: int = 4, layers: int = 4) -> Sketch:
    """A loss with the square of the batch's mean: all forwards must end before the backwards."""
    s = Sketch()
    d, rows = 3, 2
    weights = [s.given(f"w{k}", (d, d), Role.STATE, k) for k in range(layers)]
    x = s.given("x", (rows, d), Role.BATCH, 0)
    h, entering = x, list[str]()
    for k in range(layers):
        s.layer = k
        entering.append(h)
        h = s.op("tanh", s.dot(h, weights[k], 1, 0))
        s.rows[h] = s.rows[x]
    mean = s.sums(s.total(h, 0))
    s.moment = ONCE
    loss = s.total(s.op("mul", mean, mean))
    twice = s.op("mul", mean, number(2.0))
    s.moment, s.region = Moment(When.LOOP, (1,)), "backward"
    cotangent = s.spread(twice, (rows, d), 1)
    found: dict[int, str] = {}
    for k in reversed(range(layers)):
        s.layer = k
        out = entering[k + 1] if k + 1 < layers else h
        slope = s.op("sub", number(1.0), s.op("mul", out, out))
        dz = s.op("mul", cotangent, slope)
        found[k] = s.sums(s.dot(entering[k], dz, 0, 0))
        if k:
            cotangent = s.dot(dz, weights[k], 1, 1)
    s.moment, s.region = Moment(When.ONCE, (1,)), "update"
    for k in range(layers):
        s.layer = k
        step = s.op("mul", found[k], number(0.1))
        s.returns(s.op("sub", weights[k], step), weights[k])
    s.returns(loss)
    s.returns(h)
    return s
