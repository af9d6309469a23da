"""The trips of a scan as XLA for GPUs runs them: with collectives of other trips, and some outside.

Its collective pipeliner runs gathers a trip before what reads them and reductions a trip after what
makes them. It takes one kind after the other, and each costs the loop a trip:

    a scan        (gather w | h = f(h, w) | reduce dw) x n
    as it runs    gather w | f | gather w' | (reduce dw | f | gather w') x (n - 2) | reduce dw | f |
                  reduce dw

What it takes out of the loop its scheduler moves about among the step's other work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost.kernels import OUTSIDE, Kernel, Pieces, Stored
from autopar.cost.ops import is_product
from autopar.cost.order import known_before
from autopar.cost.sizes import Sizes
from autopar.ir.control_flow import ControlFlow, PortKind
from autopar.ir.listing import REDUCTIONS, Block, ListingStep, LocalOp, Loop, Move

_NONE: Pieces = frozenset()
# The kinds that XLA for GPUs pipelines, in the order of its passes.
PIPELINED_IN_TURN = ("all-reduce", "all-gather", "reduce-scatter")


def collective_kind(block: Block, kernel: Kernel) -> str:
    """The kind of a kernel's first collective, "" of work."""
    step = kernel.instruction(block)
    moved = step.collectives if isinstance(step, Move) else ()
    return moved[kernel.part].kind if moved else ""


def light_kernels(block: Block, kernels: Sequence[Kernel], sizes: Sizes) -> list[bool]:
    """True for each kernel that is no product, collective or loop: it adds, casts or copies."""

    def is_light(step: ListingStep | None) -> bool:
        if isinstance(step, LocalOp):
            op = sizes.op(step.equation)
            return not is_product(op) and op.kind != "ragged_dot_general"
        return not isinstance(step, Loop) and not (isinstance(step, Move) and step.collectives)

    return [is_light(kernel.instruction(block)) for kernel in kernels]


def crossing_kinds(
    block: Block,
    kernels: Sequence[Kernel],
    flow: ControlFlow,
    b: int,
    is_light: Sequence[bool],
    runs: int,
    pipelined: Collection[str],
) -> tuple[dict[int, str], bool]:
    """The collectives of a scan's body that XLA runs in another trip, with their kinds.

    XLA takes one of the `pipelined` kinds after the other, and each costs the loop a trip, which
    then stands before or behind it: none is left alone. With them True if there are as many kinds
    as trips, so that no trip is left for the last.
    """
    able = _able_to_cross(block, kernels, flow, b, is_light)
    kinds = [k for k in PIPELINED_IN_TURN if k in pipelined and k in able.values()]
    taken = kinds[: runs - 1]
    return {k: kind for k, kind in able.items() if kind in taken}, len(kinds) >= runs


def _able_to_cross(
    block: Block,
    kernels: Sequence[Kernel],
    flow: ControlFlow,
    b: int,
    is_light: Sequence[bool],
) -> dict[int, str]:
    """The collectives of a scan's body that XLA could run in another trip, with their kinds.

    Those are gathers of what is known before the trip, cast or laid out anew at most, and
    reductions whose results are only stacked.
    """
    kinds = [collective_kind(block, kernel) for kernel in kernels]
    # 1. What a carry, a product or a collective leads to is not known before.
    carries = [n for n, p in zip(block.inputs, flow.inputs[b], strict=True) if p.is_carry]
    before = known_before(kernels, carries, is_light)
    found = {k: kinds[k] for k in before if kinds[k] == "all-gather"}
    # 2. What leads to a carry, a product or a collective is waited for.
    ends = zip(block.outputs, flow.outputs[b], strict=True)
    awaited = {o for o, port in ends if port.is_carry and o is not None}
    for k in reversed(range(len(kernels))):
        is_awaited = not awaited.isdisjoint(kernels[k].makes)
        if kinds[k] in REDUCTIONS and not is_awaited:
            found[k] = kinds[k]
        if is_awaited or not is_light[k]:
            awaited.update(kernels[k].reads)
    return found


def repeats_work(
    block: Block,
    kernels: Sequence[Kernel],
    flow: ControlFlow,
    b: int,
    is_light: Sequence[bool],
) -> bool:
    """True if XLA would run products of a trip twice, were it asked to pipeline gathers.

    It takes a gather to the trip before with all that leads to it, if that is known by then. A loop
    over microbatches carries nothing but sums, so that forward passes are known:

        h = x @ w | gather h | ...    =>    h' = x' @ w | gather h' | h = x @ w | ...
    """
    carries = [n for n, p in zip(block.inputs, flow.inputs[b], strict=True) if p.is_carry]
    kinds = [collective_kind(block, kernel) for kernel in kernels]
    is_cheap = [light or kind != "" for light, kind in zip(is_light, kinds, strict=True)]
    cheaply = {*known_before(kernels, carries, is_cheap)}
    known = known_before(kernels, carries, [True] * len(kernels))
    return any(kinds[k] == "all-gather" and k not in cheaply for k in known)


@dataclass(frozen=True)
class Leaving:
    """The kernels of a scan's body that belong to another trip than that in which they run.

    Those `early` gather for the next trip, with what they gather. Those `late` reduce, kind by
    kind, what the trip before made, with what is made of it.
    """

    early: frozenset[int] = frozenset()
    late: tuple[tuple[str, frozenset[int]], ...] = ()

    @classmethod
    def of(cls, kernels: Sequence[Kernel], crossing: Mapping[int, str]) -> Leaving:
        """The kernels that leave their trip with these collectives."""
        wanted, early = set[str](), set[int]()
        for k in reversed(range(len(kernels))):
            if crossing.get(k) == "all-gather" or not wanted.isdisjoint(kernels[k].makes):
                early.add(k)
                wanted.update(kernels[k].reads)
        late: list[tuple[str, frozenset[int]]] = []
        for kind in (k for k in PIPELINED_IN_TURN if k in REDUCTIONS):
            found, made = set[int](), set[str]()
            for k, kernel in enumerate(kernels):
                if crossing.get(k) == kind or not made.isdisjoint(kernel.reads):
                    found.add(k)
                    made.update(kernel.makes)
            late = [(other, ks - found) for other, ks in late]
            if found:
                late.append((kind, frozenset(found)))
        return cls(frozenset(early), tuple(late))

    @property
    def all_late(self) -> frozenset[int]:
        """The late kernels of all kinds."""
        return frozenset[int]().union(*(ks for _, ks in self.late))

    def gathered(self, body: Stored) -> Pieces:
        """The pieces that a trip makes for the next."""
        made = {n for k in self.early for n in body.kernels[k].makes}
        return (
            _NONE.union(*(k.reads for n, k in enumerate(body.kernels) if n not in self.early))
            & made
        )

    def waiting(self, body: Stored, kind: str = "") -> Pieces:
        """The pieces that a trip leaves for the next to reduce, of one kind or of all."""
        late = frozenset[int]().union(*(ks for k, ks in self.late if kind in ("", k)))
        made = {n for k, kernel in enumerate(body.kernels) if k not in late for n in kernel.makes}
        return _NONE.union(*(body.kernels[k].reads for k in late)) & made


@dataclass(frozen=True)
class SteadyTrip:
    """The kernels of a trip in the middle of a loop.

    `follows` has, by each piece that it hands on, the one in whose place that lies: the same of the
    trip before.
    """

    stored: Stored
    follows: Mapping[str, str]


def steady_trip(body: Stored, leaving: Leaving) -> SteadyTrip:
    """A trip that gathers for the next one, and reduces what the one before left."""
    gathered, waiting = leaving.gathered(body), leaving.waiting(body)
    late, nbytes = leaving.all_late, dict(body.nbytes)
    before = {n: f"{n} of the trip before" for n in sorted(gathered | waiting)}
    nbytes.update((name, body.nbytes[n]) for n, name in before.items())
    kernels = list[Kernel]()
    for k, kernel in enumerate(body.kernels):
        other = waiting if k in late else _NONE if k in leaving.early else gathered
        reads = frozenset(before[n] if n in other else n for n in kernel.reads)
        kernels.append(replace(kernel, reads=reads))
    stored = replace(
        body, kernels=tuple(kernels), nbytes=nbytes, kept=body.kept | gathered | waiting
    )
    return SteadyTrip(stored, before)


class PieceTime(NamedTuple):
    """The seconds that XLA's scheduler takes the making of a piece for, and by what it is made.

    It takes `joined_seconds` where it is made with others.
    """

    seconds: float
    joined_seconds: float
    is_product: bool
    is_beside: bool


def zeros_of(stack: str) -> str:
    """The piece that a scan's stack is before the first trip."""
    return f"zeros of {stack}"


_Names = dict[str, Pieces]  # of a body's pieces, those that stand for them in the step
_Left = tuple[str, _Names]  # a trip's label, and its names


class Unrolled:
    """A loop as the kernels of the step around it, trips that are taken out of it among them.

    `times` are those of the body's pieces; `named` tells which of these each piece outside is.
    """

    def __init__(
        self,
        kernel: Kernel,
        loop: Loop,
        flow: ControlFlow,
        body: Stored,
        outer: Stored,
        leaving: Leaving,
        times: Mapping[str, PieceTime],
    ) -> None:
        self.kernels: list[Kernel] = []
        self.nbytes: dict[str, int] = {}
        self.times: dict[str, PieceTime] = {}
        self.operands: dict[str, Sequence[str]] = {}  # what kernels read, as Stored has it
        self.named: dict[str, str] = {}
        self._loop, self._flow, self._body, self._outer = loop, flow, body, outer
        self._block, self._leaving, self._body_times = loop.bodies[0], leaving, times
        self._entries: _Names = {}
        operands = dict(zip(flow.operands, loop.operands, strict=True))
        for name, port in zip(self._block.inputs, flow.inputs[0], strict=True):
            operand = operands.get(port)
            self._entries[name] = outer.behind.get(operand, _NONE) if operand else _NONE
        # What each stack is written into so far: its zeros at first.
        self._stacks = {r: z for r in loop.results if (z := zeros_of(r)) in outer.nbytes}
        self._waiting: list[_Left | None] = [None for _ in leaving.late]
        self._write(kernel)

    def _write(self, kernel: Kernel) -> None:
        early = self._leaving.early
        # 1. Each kind of reductions takes the first trip out of the loop that it meets.
        for number, (kind, _) in enumerate(self._leaving.late):
            label = f"{self._loop.results[0]} trip {number}"
            is_gathered = bool(early) and self._is_after_gathers(kind)
            self._trip(label, is_gathered, number + 1)
        # 2. The loop has what is gathered and what waits for its reduction.
        label = f"{self._loop.results[0]} trips"
        ahead = self._gather(f"{label} entry") if early else {}
        entries = [*self._entries.values()]
        reads = _NONE.union(*entries, *ahead.values(), self._stacks.values())
        handed: dict[str, str] = {}
        for number, (kind, _) in enumerate(self._leaving.late):
            left = self._waiting[number]
            assert left is not None
            names = self._leaving.waiting(self._body, kind)
            reads = reads.union(*(left[1].get(n, _NONE) for n in names))
            handed.update((n, f"{label} {n}") for n in sorted(names))
            self._waiting[number] = (label, {n: frozenset((f"{label} {n}",)) for n in names})
        gathered = {n: f"{label} ahead {n}" for n in sorted(ahead)}
        results = {r: f"{label} {r}" for r in self._loop.results}
        makes = [*results.values()]
        self.nbytes.update((name, self._outer.nbytes[r]) for r, name in results.items())
        for n, name in (*handed.items(), *gathered.items()):
            self.nbytes[name] = self._body.nbytes[n]
        # Behind the loop all comes out of it, what it only reads among that.
        done = f"{label} done"
        self.nbytes[done] = 0
        makes += [*handed.values(), *gathered.values(), done]
        self._entries = {n: pieces | {done} for n, pieces in self._entries.items()}
        self.kernels.append(replace(kernel, makes=tuple(makes), reads=reads))
        self.operands[makes[0]] = _in_order([*entries, frozenset(self._stacks.values()), reads])
        for port in self._flow.results:
            if port.kind is PortKind.STACKED and port.result is not None:
                result = self._loop.results[port.result]
                self._stacks[result] = results[result]
            elif port.is_carry and port.result is not None:
                result = self._loop.results[port.result]
                at = port.inputs[0][1]
                self._entries[self._block.inputs[at]] = frozenset((results[result],))
        # 3. The last trip, if the one before it gathers for it, and what still waits.
        if early:
            found = {n: frozenset((name,)) for n, name in gathered.items()}
            self._trip(f"{self._loop.results[0]} last trip", True, 0, found)
        self._reduce_waiting()
        self._name_results()

    @staticmethod
    def _is_after_gathers(kind: str) -> bool:
        return PIPELINED_IN_TURN.index(kind) > PIPELINED_IN_TURN.index("all-gather")

    def _gather(self, label: str) -> _Names:
        """Gathers for the trip that comes next; the names of what it will read."""
        names = dict(self._entries)
        for k in sorted(self._leaving.early):
            self._run(label, names, k)
        return {n: names[n] for n in self._leaving.gathered(self._body)}

    def _trip(
        self, label: str, is_gathered: bool, deferred: int, ahead: _Names | None = None
    ) -> None:
        """A whole trip but for what is gathered before it, and so many kinds of reductions."""
        self._reduce_waiting()
        if is_gathered and ahead is None:
            ahead = self._gather(label)
        names = {**self._entries, **(ahead or {})}
        left_out = self._leaving.early if is_gathered else frozenset[int]()
        left_out = left_out.union(*(ks for _, ks in self._leaving.late[:deferred]))
        ran = [k for k in range(len(self._body.kernels)) if k not in left_out]
        for k in ran:
            self._run(label, names, k)
        self._stack(label, names, ran)
        for name, pieces in self._carried(names):
            self._entries[name] = pieces
        for number in range(deferred):
            self._waiting[number] = (label, names)

    def _reduce_waiting(self) -> None:
        """Reduce what earlier trips left."""
        for number, (_, late) in enumerate(self._leaving.late):
            left = self._waiting[number]
            if left is None:
                continue
            self._waiting[number] = None
            for k in sorted(late):
                self._run(*left, k)
            self._stack(*left, sorted(late))

    def _run(self, label: str, names: _Names, k: int) -> None:
        kernel = self._body.kernels[k]
        reads = _NONE.union(*(names.get(n, _NONE) for n in kernel.reads))
        if kernel.at < 0 and not kernel.reads:  # an input that is cut out
            reads = self._entries.get(kernel.makes[0], _NONE)
        makes = tuple(f"{label} {n}" for n in kernel.makes)
        for n, name in zip(kernel.makes, makes, strict=True):
            names[n] = frozenset((name,))
            self.nbytes[name] = self._body.nbytes[n]
            self.named[name] = n
            if n in self._body_times:
                self.times[name] = self._body_times[n]
        self.kernels.append(replace(kernel, at=OUTSIDE, makes=makes, reads=reads, is_early=False))
        self.operands[makes[0]] = _in_order(
            names.get(n, _NONE) for n in self._body.read_by(kernel)
        ) or sorted(reads)

    def _stack(self, label: str, names: _Names, ran: Sequence[int]) -> None:
        """Put what kernels made in its place in the stacks."""
        made = {n for k in ran for n in self._body.kernels[k].makes}
        for output, port in zip(self._block.outputs, self._flow.outputs[0], strict=True):
            if port.kind is not PortKind.STACKED or port.result is None or output is None:
                continue
            behind = self._body.behind.get(output, _NONE)
            if made.isdisjoint(behind):
                continue
            result = self._loop.results[port.result]
            reads = _NONE.union(*(names.get(n, _NONE) for n in behind))
            stack = {self._stacks[result]} if result in self._stacks else _NONE
            name = self._stacks[result] = f"{label} into {result}"
            self.nbytes[name] = self._outer.nbytes[result]
            self.kernels.append(Kernel(OUTSIDE, (name,), reads | stack, in_place=True))
            self.operands[name] = [*stack, *sorted(reads)]

    def _carried(self, names: _Names) -> Iterator[tuple[str, Pieces]]:
        """The inputs that a trip gives the next, with the pieces that they are."""
        for output, port in zip(self._block.outputs, self._flow.outputs[0], strict=True):
            if port.is_carry and output is not None:
                behind = self._body.behind.get(output, _NONE)
                pieces = _NONE.union(*(names.get(n, _NONE) for n in behind))
                yield self._block.inputs[port.inputs[0][1]], pieces

    def _name_results(self) -> None:
        """Give what stands for the loop's results last their names."""
        ends = dict(self._stacks)
        for port in self._flow.results:
            if port.is_carry and port.result is not None:
                pieces = self._entries[self._block.inputs[port.inputs[0][1]]]
                result = self._loop.results[port.result]
                if len(pieces) == 1:
                    ends[result] = next(iter(pieces))
                else:
                    ends[result] = result
                    self.kernels.append(Kernel(OUTSIDE, (result,), pieces, in_place=True))
        made = {name for kernel in self.kernels for name in kernel.makes}
        final: dict[str, str] = {}
        for result, name in ends.items():
            if name == result:
                continue
            if name in made and name not in final:
                final[name] = result
                self.nbytes[result] = self.nbytes.pop(name)
                if name in self.named:
                    self.named[result] = self.named.pop(name)
                if name in self.times:
                    self.times[result] = self.times.pop(name)
            else:  # it is an argument, or another result
                self.kernels.append(
                    Kernel(OUTSIDE, (result,), frozenset((final.get(name, name),)), in_place=True)
                )
        self.kernels = [
            replace(
                k,
                makes=tuple(final.get(n, n) for n in k.makes),
                reads=frozenset(final.get(n, n) for n in k.reads),
            )
            for k in self.kernels
        ]
        self.operands = {
            final.get(n, n): [final.get(r, r) for r in reads] for n, reads in self.operands.items()
        }


def _in_order(found: Iterable[Pieces]) -> list[str]:
    """The pieces, those of the first in front."""
    return list(dict.fromkeys(name for pieces in found for name in sorted(pieces)))
