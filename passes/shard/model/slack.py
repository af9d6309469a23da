"""Finds moves with slack: nothing on the critical path waits for them at once.

A parameter can be gathered while the layers before its own run, and a gradient reduced while those
after it do; activations, and what the update moves, are waited for. So is what a trip of a loop
adds to a sum: the next trip begins with the sum. A gradient that two parts of the step give (tied
weights) is added on each device and reduced once, when the update first reads the sum.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.ir.values import Role
from autopar.passes.shard.model.decisions import Place, Read, Reading, ReadKind


@dataclass(frozen=True)
class Slack:
    """Decisions that hold state as the model reads it, and those that only the update reads.

    Of the latter, the `carried` ones go into sums that a loop carries, and the `joined` ones are
    sums of gradients that come from different ops.
    """

    state: frozenset[int]
    late: frozenset[int]
    carried: frozenset[int]
    joined: frozenset[int]

    def gathers(self, place: Place, read: Read) -> bool:
        """True if a read moves state for the forward or backward pass."""
        return place.decision in self.state and read.region != "update"

    def reduces(self, read: Read) -> bool:
        """True if the result of an op of the backward pass is a gradient of state."""
        if not isinstance(read.standing, Place) or read.region == "update":
            return False
        held = read.standing.decision
        return held in self.late - self.carried or held in self.state

    def reduces_joined(self, place: Place) -> bool:
        """True if partial sums of a place are reduced when the update reads them."""
        return place.decision in self.joined


def find_slack(reading: Reading) -> Slack:
    """The slack of every decision of a reading."""
    state = {
        place.decision
        for given in reading.graph.inputs
        if given.role is Role.STATE
        and isinstance(place := reading.standings[given.value.name], Place)
    }
    readers: defaultdict[int, set[int]] = defaultdict(set)  # by ops and groups before the update
    for read in reading.reads:
        if not isinstance(read.standing, Place) or (read.kind is ReadKind.OP and read.operand < 0):
            continue
        decision = read.standing.decision
        # Loops pass state in through ports of its own sharding.
        if read.kind is ReadKind.EXACT and decision in state and read.region != "update":
            state.add(read.reader)
        if read.region != "update":
            readers[decision].add(read.reader)
    late = {d for d, decision in enumerate(reading.decisions) if decision.op is None} - state
    _drop_read_early(late, state, readers)
    carried = _carried(reading, late)
    joined = frozenset(d for d in late - carried if reading.decisions[d].joined)
    return Slack(frozenset(state), frozenset(late), carried, joined)


def _drop_read_early(late: set[int], state: set[int], readers: dict[int, set[int]]) -> None:
    """Leave only decisions that the update reads, if need be through others of them."""
    changed = True
    while changed:
        early = {d for d in late if not readers.get(d, set()) <= late | state | {d}}
        changed = bool(early)
        late -= early


def _carried(reading: Reading, late: set[int]) -> frozenset[int]:
    """The values of loop carries, and those that are added to them."""
    found = {d for d in late if reading.decisions[d].carried}
    feeds: defaultdict[int, set[int]] = defaultdict(set)
    for read in reading.reads:
        if isinstance(read.standing, Place) and read.kind is not ReadKind.OP:
            feeds[read.reader].add(read.standing.decision)
    waiting = sorted(found)
    for d in waiting:
        fresh = sorted(feeds[d] & late - found)
        found.update(fresh)
        waiting += fresh
    return frozenset(found)
