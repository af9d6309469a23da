"""Assignment of ops to parts: the key of each part, and the ops that it runs.

Ops of a loop go to F, B, or I and W of a stage (`assign_loop_ops`); ops that run once go to a round
of setup or of an update on one submesh or on several (`assign_once_ops`).

    order   (-2, 0)  (-1, round)  (0, 0)    (0, 1)    (0, 2)    (1, round)  (2, 0) ...
            hoist    setup        loop 0 F  loop 0 B  loop 0 W  update 0    loop 1 F ...
                                            or I
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.batching import When
from autopar.ir.program import Part, PartKind
from autopar.ir.stages import Remat
from autopar.passes.lower.partition.step_analysis import NOWHERE, StepAnalysis

BACKWARD_KINDS = (PartKind.BACKWARD, PartKind.INPUT_GRADIENT, PartKind.WEIGHT_GRADIENT)
_RANK = {
    PartKind.FORWARD: 0,
    PartKind.BACKWARD: 1,
    PartKind.INPUT_GRADIENT: 1,
    PartKind.WEIGHT_GRADIENT: 2,
}
# Operations an item from which on the result of an op is dear to compute again.
_HEAVY = 32
# A weight-gradient op with more FLOPs than this for each item that it reads can fill a bubble.
_LIGHT = 4
_SETUP = -1  # the segment before the first loop; segment k follows loop k
# An op may run on several submeshes if it needs at most this much of others.
_FEW_BYTES, _FEW_VALUES = 4096, 64


@dataclass(frozen=True)
class PartKey:
    """Identity of a part: its kind, stage, submesh, loop and round. No two parts share one."""

    kind: PartKind
    stage: int
    submesh: int
    loop: int = 0
    round: int = 0

    @classmethod
    def of(cls, part: Part) -> PartKey:
        """The key of a part."""
        return cls(part.kind, part.stage, part.submesh, part.loop, part.round)

    @property
    def is_looped(self) -> bool:
        """True if the part runs once for each microbatch."""
        return self.kind in _RANK

    @property
    def order(self) -> tuple[int, int]:
        """Its place in time; parts of one place run side by side or in the order of stages."""
        if self.kind is PartKind.HOIST:
            return (-2, 0)
        if self.kind is PartKind.SETUP:
            return (-1, self.round)
        if self.kind is PartKind.UPDATE:
            return (2 * self.loop + 1, self.round)
        return (2 * self.loop, _RANK[self.kind])

    @property
    def row(self) -> tuple[int, int, int]:
        """Its place among the parts: in time, then by stage, backwards from the last stage."""
        first, second = self.order
        return (first, second, -self.stage if self.kind in BACKWARD_KINDS else self.stage)

    def comes_before(self, reader: PartKey) -> bool:
        """True if another part may read results of this one."""
        if self.order == reader.order:
            return self.is_looped and self.stage != reader.stage
        return self.order < reader.order


# -- ops of the loops ------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopPlace:
    """The stage of a loop op, and whether it is of the backward pass."""

    stage: int
    is_backward: bool


@dataclass(frozen=True)
class LoopParts:
    """The ops of every part that runs in a loop, in order, and the place of each op by loop."""

    own: Mapping[PartKey, Sequence[int]]
    places: tuple[Mapping[int, LoopPlace], ...]


def assign_loop_ops(step: StepAnalysis) -> LoopParts:
    """Assign each op of each loop to its part."""
    splits_backward = step.schedule.needs_split
    own: dict[PartKey, Sequence[int]] = {}
    # 1. The stage of each op, and its pass.
    places = tuple(
        _with_late_ops(step, _loop_places(step, loop)) for loop in range(step.batching.loops)
    )
    for loop, here in enumerate(places):
        # 2. The ops of the backward pass that no other stage waits for: W.
        weights = _weight_gradients(step, here) if splits_backward else frozenset[int]()
        together: dict[tuple[PartKind, int], list[int]] = {}
        for i, place in here.items():
            kind = PartKind.FORWARD
            if place.is_backward and not splits_backward:
                kind = PartKind.BACKWARD
            elif place.is_backward:
                kind = PartKind.WEIGHT_GRADIENT if i in weights else PartKind.INPUT_GRADIENT
            together.setdefault((kind, place.stage), []).append(i)
        own.update((PartKey(k, s, step.submesh(s), loop), ops) for (k, s), ops in together.items())
    return LoopParts(own, places)


def _loop_places(step: StepAnalysis, loop: int) -> dict[int, LoopPlace]:
    """Step 1: the stages of the ops of one loop, in the order of the ops.

    A forward op runs no earlier in the pipeline than its operands, a backward op no later:

        stage      0      1      2              stage(f) = max(home(f), stage of its operands)
        forward    a  ->  b  ->  c              stage(b) = min(home(b), stage of its operands)
        backward   a' <-  b' <-  c'

    An op with no home goes to its operands; one that begins the backward pass, to its readers.
    """
    members = [i for i in step.placed if step.when(i) is When.LOOP and loop in step.loops(i)]
    # Op -> its own stage, or the last of those that read it.
    wished: dict[int, int] = {}
    for i in reversed(members):
        home = step.home[i]
        readers = (wished[j] for j in step.readers[i] if j in wished)
        wished[i] = home if home != NOWHERE else max(readers, default=NOWHERE)
    places: dict[int, LoopPlace] = {}
    for i in members:
        makers = (step.maker[n] for n in step.reads[i] if n in step.maker)
        read = [places[j] for j in makers if j in places]
        forward = [p.stage for p in read if not p.is_backward]
        backward = [p.stage for p in read if p.is_backward]
        home, last = step.home[i], len(step.stages.stages) - 1
        # With a barrier, all of the later loops is backward.
        begins = loop > 0 if step.batching.barrier else step.ops[i].origin.region == "backward"
        if backward or begins:
            stage = home if home != NOWHERE or backward else wished[i]
            places[i] = LoopPlace(min([stage if stage != NOWHERE else last, *backward]), True)
            continue
        if home == NOWHERE and not forward:
            names = (n for n in step.reads[i] if n in step.given)
            home = max(map(step.input_stage, names), default=0)
        places[i] = LoopPlace(max([home, *forward]), False)
    return places


def _with_late_ops(step: StepAnalysis, places: Mapping[int, LoopPlace]) -> dict[int, LoopPlace]:
    """The places with light forward ops in the backward pass, where less is kept for it so.

    Derivatives leave some behind: of tanh the backward pass reads y and 1 - y, and y alone is
    enough. Such an op runs once all the same, and only its own stage's backward pass reads it.

        forward    y = tanh(x)  -->  1 - y               y = tanh(x)
        kept           y               1 - y                 y
        backward       dw = y' dz      dy * (1 - y)          dw = y' dz      dy * (1 - y)
    """
    found = dict(places)
    # What the backward pass of a stage reads of its forward pass anyhow.
    kept = {(p.stage, name) for i, p in places.items() if p.is_backward for name in step.reads[i]}
    for i in reversed(list(places)):
        op, stage = step.ops[i], found[i].stage
        readers = [found.get(j) for j in step.readers[i]]
        later = LoopPlace(stage, True)
        if found[i].is_backward or any(r != later for r in readers) or not readers:
            continue
        if op.acts or op.graphs or any(r.name in step.leaving for r in op.results):
            continue
        items = sum(step.graph.values[n].item_count for n in step.reads[i])
        fresh = {n for n in step.reads[i] if step.has_rows(n) and (stage, n) not in kept}
        nbytes = sum(step.graph.values[n].nbytes for n in fresh)
        if op.flops <= _LIGHT * items and nbytes < sum(r.nbytes for r in op.results):
            found[i] = later
            kept.update((stage, n) for n in step.reads[i])
    return found


def _weight_gradients(step: StepAnalysis, places: Mapping[int, LoopPlace]) -> frozenset[int]:
    """Step 2: the backward ops of one loop that no other stage waits for.

    One walk from the end marks I, every op that a cotangent for another stage is reached from:

        dy --> dx = dy @ w.T --> sent to the stage below      I: dx
          \\-> dw = x.T @ dy --> accumulated                  W: dw

    W is the rest. It reads results of I, so that both together run each op once. See
    `docs/explanation/stage-programs.md`.
    """
    backward = [i for i, place in places.items() if place.is_backward]
    awaited: set[int] = set()
    for i in reversed(backward):
        readers = [j for j in step.readers[i] if j in places]
        leaves = any(places[j].stage != places[i].stage for j in readers)
        if leaves or not step.ops[i].results or any(j in awaited for j in readers):
            awaited.add(i)
    weights: set[int] = set()
    for stage in sorted({places[i].stage for i in backward}):
        members = [i for i in backward if places[i].stage == stage]
        mine = [i for i in members if i not in awaited]
        weights |= _without_light_ops(step, mine) if len(mine) < len(members) else set(mine)
    return frozenset(weights)


def _without_light_ops(step: StepAnalysis, weights: Sequence[int]) -> set[int]:
    """W without the light ops that leave less to keep between I and W if they run in I.

    Such as a cast to fewer bytes, or a transpose, of a value that nothing else in W reads.
    """
    kept = set(weights)
    for i in weights:
        op = step.ops[i]
        makers = [step.maker.get(n, -1) for n in step.reads[i]]
        items = sum(step.graph.values[n].item_count for n in step.reads[i])
        if op.flops > _LIGHT * items or op.graphs or not kept.isdisjoint(makers):
            continue
        if 0 < sum(r.nbytes for r in op.results) <= _dropped_bytes(step, i, kept):
            kept.discard(i)
    return kept


def _dropped_bytes(step: StepAnalysis, i: int, weights: set[int]) -> int:
    """The bytes that need not be kept for W if op `i`, which reads them, runs in I."""
    dropped = 0
    for name in step.reads[i]:
        j = step.maker.get(name, -1)
        if j < 0 or step.when(j) is not When.LOOP or name in step.leaving:
            continue
        if not any(r in weights and r != i and name in step.reads[r] for r in step.readers[j]):
            dropped += step.graph.values[name].nbytes
    return dropped


def recomputed_ops(step: StepAnalysis, loops: LoopParts) -> Iterator[tuple[PartKey, Sequence[int]]]:
    """The forward ops that the first backward part of a stage runs again.

    They are all that its backward parts read of its forward part, down to values that are kept:
    that enter the stage, cross one of its cuts or, where the remat is selective, are products with
    parameters. So a split backward recomputes once, in I, and keeps for W what W reads.

        x --> norm --> @ w --> gelu --> @ w' --> y      full:       x is kept
                                                        selective:  x, x @ w and y
    """
    readers: dict[tuple[int, int], list[PartKey]] = {}
    for key in loops.own:
        remat = step.stages.stages[key.stage].remat
        if key.kind is not PartKind.FORWARD and remat is not Remat.NONE:
            readers.setdefault((key.loop, key.stage), []).append(key)
    for (loop, stage), found in readers.items():
        first = min(found, key=lambda key: key.order)
        wanted = [i for key in found for i in loops.own[key]]
        earliest = 0 if step.batching.barrier else loop
        forward = {
            i
            for here in loops.places[earliest : loop + 1]
            for i, place in here.items()
            if place.stage == stage and not place.is_backward
        }
        # Kept values: those that ops before a cut make and ops after it read.
        cuts = step.stages.stages[stage].cuts
        kept = {
            name
            for i in (forward if cuts else ())
            for name in step.reads[i]
            if step.maker.get(name) in forward
            if any(step.maker[name] < cut <= i for cut in cuts)
        }
        if step.stages.stages[stage].remat is Remat.SELECTIVE:
            kept |= _products(step, forward)
        # Backwards from what is wanted, as far as nothing is kept. An accumulator is read as the
        # sum of an earlier loop, so nothing is recomputed for it.
        kept.update(step.batching.accumulator_of)
        again: set[int] = set()
        while wanted:
            reads = (n for n in step.reads[wanted.pop()] if n not in kept)
            makers = forward.intersection(step.maker[n] for n in reads if n in step.maker) - again
            again |= makers
            wanted += sorted(makers)
        yield first, sorted(again)


def _products(step: StepAnalysis, ops: set[int]) -> set[str]:
    """Results of `ops` that have many FLOPs an item and read a value without a microbatch's rows.

    They cost the most to compute again and, as their results are no larger than what comes in,
    little to keep. So does what Megatron-LM's selective recomputation keeps (Korthikanti et al.,
    2022): attention scores are products too, but of two values of the microbatch.
    """
    found: set[str] = set()
    for i in ops:
        op = step.ops[i]
        items = sum(r.item_count for r in op.results)
        if op.flops > _HEAVY * items and not all(map(step.has_rows, op.value_operands)):
            found.update(r.name for r in op.results)
    return found


# -- ops that run once -----------------------------------------------------------------------


@dataclass
class OnceParts:
    """The ops of every part that runs once, and the values that it only passes on.

    A value that is passed on enters and leaves a part, and on the way stops being a partial sum:
    an accumulator that is returned or sent, an input that is returned as something else.
    """

    ops: dict[PartKey, list[int]] = field(default_factory=dict[PartKey, list[int]])
    passed: dict[PartKey, list[str]] = field(default_factory=dict[PartKey, list[str]])


def assign_once_ops(step: StepAnalysis, loops: Mapping[PartKey, Sequence[int]]) -> OnceParts:
    """Assign each op that runs once to its segment, its submeshes and its rounds.

    An op runs on the submesh of its home. One with no home runs on every submesh that reads it, if
    it needs only a few scalars of others, as a global norm does; else where most of its bytes are.
    All scalars that cross go at once, between two rounds:

        mesh 0   round 0: |g0|^2  \\/  round 1: norm, w0 -= g0 / norm
        mesh 1   round 0: |g1|^2  /\\  round 1: norm, w1 -= g1 / norm
    """
    found = OnceParts()
    segments = _segments(step)
    placement = _OncePlacement(step, loops, segments)
    for segment in sorted({*segments.values(), *placement.passed}):
        members = [i for i in sorted(segments) if segments[i] == segment]
        rounds = _rounds(step, placement, members, segment)
        together: dict[tuple[int, int], list[int]] = {}
        for (i, submesh), number in sorted(rounds.items()):
            together.setdefault((submesh, number), []).append(i)
        found.ops.update((_once_key(step, segment, *at), ops) for at, ops in together.items())
        for name, submesh in placement.passed.get(segment, {}).items():
            found.passed.setdefault(_once_key(step, segment, submesh, 0), []).append(name)
    return found


def _once_key(step: StepAnalysis, segment: int, submesh: int, number: int) -> PartKey:
    kind = PartKind.SETUP if segment == _SETUP else PartKind.UPDATE
    return PartKey(kind, step.first_stage[submesh], submesh, max(segment, 0), number)


def _segments(step: StepAnalysis) -> dict[int, int]:
    """Op -> the segment between loops in which it runs; a free op as early as its readers need."""
    found: dict[int, int] = {}
    last = step.batching.loops - 1
    for i in reversed(step.placed):
        when = step.when(i)
        if when is When.ONCE:
            found[i] = step.loops(i)[0]
        elif when is When.FREE and step.loop_reads[i]:
            found[i] = _SETUP
        elif when is When.FREE:
            found[i] = min((found[j] for j in step.readers[i] if j in found), default=last)
    return found


class _OncePlacement:
    """The submeshes of every op that runs once, and the values that are passed on."""

    def __init__(
        self,
        step: StepAnalysis,
        loops: Mapping[PartKey, Sequence[int]],
        segments: Mapping[int, int],
    ) -> None:
        self.step = step
        accumulators = step.batching.accumulator_of
        self._looped: dict[str, int] = {}  # value of a loop -> its submesh
        self._accumulated: dict[str, int] = {}  # accumulator -> its submesh
        for key, ops in loops.items():
            for name in (r.name for i in ops for r in step.ops[i].results):
                self._looped[name] = key.submesh
                if name in accumulators and accumulators[name].loop == key.loop:
                    self._accumulated[name] = key.submesh
        self._needs: dict[int, set[int]] = {i: set() for i in segments}
        self._crossing: set[str] = set()  # accumulators that are read on other submeshes
        self._heaviest: dict[int, int] = {}
        self._weight: dict[int, tuple[int, int]] = {}
        # 1. Forwards: the submesh with most of an op's bytes, and what it costs to run it anywhere.
        for i in sorted(segments):
            self._weigh(i)
        # 2. Backwards: the submeshes that ask for it; an op that runs there asks for its operands.
        for key, ops in loops.items():
            for i in ops:
                self._ask(i, key.submesh)
                for name in step.reads[i]:
                    owner = accumulators.get(name)
                    if owner is not None and owner.loop < key.loop:
                        self._crossing.add(name)
        for o, output in enumerate(step.graph.outputs):
            if isinstance(output, str):
                self._need(output, step.return_home.get(o, -1))
        self.on: dict[int, tuple[int, ...]] = {}
        for i in sorted(segments, reverse=True):
            everywhere = self._needs[i] if i in self._weight else set[int]()
            self.on[i] = tuple(sorted(everywhere)) or (max(self._heaviest[i], 0),)
            for submesh in self.on[i]:
                self._ask(i, submesh)
        # 3. Values that no op of a segment makes, but that leave it whole.
        self.passed = self._passed_values()

    def _weigh(self, i: int) -> None:
        """Find where an op would run if it ran once, and what it needs if it runs everywhere."""
        step, home = self.step, self.step.home[i]
        here: dict[int, int] = {}
        nbytes = count = 0
        for name in step.reads[i]:
            size, submesh = step.graph.values[name].nbytes, self._submesh_of(name)
            if submesh >= 0:
                here[submesh] = here.get(submesh, 0) + size
            alone = (size, 1) if submesh >= 0 else (0, 0)
            more = self._weight.get(step.maker.get(name, -1), alone)
            nbytes, count = nbytes + more[0], count + more[1]
        heaviest = min(here, key=lambda submesh: (-here[submesh], submesh), default=-1)
        self._heaviest[i] = step.submesh(home) if home != NOWHERE else heaviest
        made = sum(r.nbytes for r in step.ops[i].results)
        few = nbytes <= max(_FEW_BYTES, made) and count <= _FEW_VALUES and not self._goes_on(i)
        is_free = step.when(i) is When.FREE and not nbytes
        if made and (is_free or (home == NOWHERE and few)):
            self._weight[i] = (nbytes, count)

    def _goes_on(self, i: int) -> bool:
        """True for the rest of a sum of too many scalars, which is added up in one place."""
        step = self.step
        makers = (step.maker.get(name, -1) for name in step.reads[i])
        return any(
            j in self._heaviest and j not in self._weight and step.home[j] == NOWHERE
            and step.ops[j].kind == step.ops[i].kind
            for j in makers
        )  # fmt: skip

    def _submesh_of(self, name: str) -> int:
        """The submesh of a value; -1 for one that is anywhere."""
        step = self.step
        j = step.maker.get(name, -1)
        if name in step.given:
            return step.state_home(name)
        if j < 0:
            return -1
        return self._heaviest[j] if j in self._heaviest else self._looped.get(name, -1)

    def _ask(self, i: int, submesh: int) -> None:
        for name in self.step.reads[i]:
            self._need(name, submesh)

    def _need(self, name: str, submesh: int) -> None:
        j = self.step.maker.get(name, -1)
        if j in self._needs and submesh >= 0:
            self._needs[j].add(submesh)
        if self._accumulated.get(name, submesh) != submesh:
            self._crossing.add(name)

    def _passed_values(self) -> dict[int, dict[str, int]]:
        """Segment -> the values that it passes on, each with its submesh."""
        step, found = self.step, dict[int, dict[str, int]]()
        for name, submesh in self._accumulated.items():
            if name in self._crossing or name in step.graph.outputs:
                found.setdefault(self.segment_of(name), {})[name] = submesh
        last = step.batching.loops - 1
        for o, output in enumerate(step.graph.outputs):
            if isinstance(output, str) and output in step.given and not step.is_kept(o):
                home = max(step.state_home(output), 0)
                found.setdefault(last, {}).setdefault(output, home)
        return found

    def waits(self, name: str, submesh: int) -> bool:
        """True if a value must be passed on before a part of this submesh may read it."""
        return self._accumulated.get(name, submesh) != submesh

    def segment_of(self, name: str) -> int:
        """The segment that passes an accumulator on."""
        return self.step.batching.accumulator_of[name].loop


def _rounds(
    step: StepAnalysis, placement: _OncePlacement, members: Sequence[int], segment: int
) -> dict[tuple[int, int], int]:
    """(op, submesh) -> its round: as-late-as-possible scheduling over as few rounds as can be.

        soonest(i) = max over operands j of soonest(j) + (1 if j is on another submesh)
        latest(j)  = min over readers i of latest(i), or soonest(j) if i is on another submesh

    The latest round is taken, so that a value which is not sent is computed where it is used. What
    is sent is computed as soon as it can be: so equal layers have equal rounds, whoever reads them.
    """
    soonest: dict[tuple[int, int], int] = {}
    reads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in members:
        for submesh in placement.on[i]:
            found, wait = list(_operands(step, placement, soonest, i, submesh)), 0
            reads[i, submesh] = found
            if any(
                placement.waits(n, submesh) and placement.segment_of(n) == segment
                for n in step.reads[i]
            ):
                wait = 1
            soonest[i, submesh] = max([wait, *(soonest[j, u] + (u != submesh) for j, u in found)])
    last = max(soonest.values(), default=0)
    latest = dict.fromkeys(soonest, last)
    for i in reversed(members):
        for submesh in placement.on[i]:
            for j, u in reads[i, submesh]:
                until = latest[i, submesh] if u == submesh else soonest[j, u]
                latest[j, u] = min(latest[j, u], until)
    return latest


def _operands(
    step: StepAnalysis,
    placement: _OncePlacement,
    soonest: Mapping[tuple[int, int], int],
    i: int,
    submesh: int,
) -> Iterator[tuple[int, int]]:
    """The ops of the same segment that an op reads, each on the submesh that it reads it from."""
    for name in step.reads[i]:
        j = step.maker.get(name, -1)
        if j < 0 or not any((j, u) in soonest for u in placement.on.get(j, ())):
            continue
        if submesh in placement.on[j]:
            yield j, submesh
        else:
            yield j, min(placement.on[j], key=lambda u: (soonest[j, u], u))
