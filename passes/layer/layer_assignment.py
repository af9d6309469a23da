"""Assignment of all ops of a step to its layers, given the layers of the forward ops.

    avail(x) = {layer that makes x} + {layers whose forward ops read x}
    home(e)  = max k <= min(home of the cotangents that e reads), with k in avail(x) for all other
               values x that e reads: forward values and parameters

    layer        L0          L1          L2
    forward      a = x @ v   b = a @ w   c = loss(b)
    backward     dv, [dx]    da, dw      db            dw reads a (L0, L1) and db (L2): L1

1. Forward ops: the layer whose range they are in.
2. Backward ops: `home`, in order. A later loop that differentiates the same function again has the
   homes of the first, op for op.
3. A backward op whose result is smaller to send than its operands moves on to its readers, so that
   the gradient of a bias is summed where the bias is.
4. Updates: where the forward pass reads the parameter first.
5. The rest, by its readers. Scalars that join layers, and values made of nothing for several
   layers, belong to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.ir.batching import Batching, Moment, When
from autopar.ir.graph import Op
from autopar.ir.stages import Layer
from autopar.passes.layer.forward_pass import Forward
from autopar.passes.layer.isomorphism import match_ops

NONE = -1  # the home of what is computed wherever it is read
_UNKNOWN = -2
_ANYWHERE = -1  # as a set of layers, bit by bit: all of them
# A later loop with this share of its ops in the first one differentiates the same function.
_SAME_SHARE = 0.75


def assign_layers(forward: Forward, layers: Sequence[Layer]) -> tuple[int, ...]:
    """Assign each op of the graph to a layer; NONE for one that is computed wherever it is read."""
    return _LayerAssignment(forward, layers).homes() if layers else ()


def assign_inputs(batching: Batching, found: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The layers that need each graph input, the first of them its own.

    State is at home where its replacement is made. An input that no layer needs has none.
    """
    graph = batching.graph
    needs: dict[str, int] = {}
    for op, home in zip(reversed(graph.ops), reversed(found), strict=True):
        # Sets of layers are bit masks. An op of no layer needs its operands wherever it is needed.
        mask = 1 << home if home >= 0 else _union(needs.get(r.name, 0) for r in op.results)
        for name in op.value_operands:
            needs[name] = needs.get(name, 0) | mask
    makers = {r.name: home for op, home in zip(graph.ops, found, strict=True) for r in op.results}
    replaced = {i: makers.get(str(graph.outputs[o]), NONE) for o, i in graph.donated}
    layers: list[tuple[int, ...]] = []
    for n, given in enumerate(graph.inputs):
        own, readers = replaced.get(n, NONE), _layers_in(needs.get(given.value.name, 0))
        layers.append((*([own] if own >= 0 else []), *(r for r in readers if r != own)))
    return tuple(layers)


def _layers_in(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _intersection(masks: Iterable[int]) -> int:
    found = _ANYWHERE
    for mask in masks:
        found &= mask
    return found


def _highest(mask: int, ceiling: int) -> int:
    """The last layer of a set that is no later than `ceiling`; NONE without one."""
    return (mask & ((1 << (ceiling + 1)) - 1)).bit_length() - 1


class _LayerAssignment:
    """Assigns ops group by group; each group reads the homes of those before it."""

    def __init__(self, forward: Forward, layers: Sequence[Layer]) -> None:
        graph = forward.graph
        self._graph, self._ops, self._values = graph, graph.ops, graph.values
        self._moments: tuple[Moment, ...] = forward.moments
        self._last = len(layers) - 1
        self._home = [_UNKNOWN] * len(graph.ops)
        self._forward = frozenset(forward.positions)
        self._free = forward.sources | {
            i for i, m in enumerate(forward.moments) if m.when is When.FREE
        }
        self._reads = [tuple(dict.fromkeys(op.value_operands)) for op in graph.ops]
        self._maker = {r.name: i for i, op in enumerate(graph.ops) for r in op.results}
        self._users: dict[str, list[int]] = {}
        for i, names in enumerate(self._reads):
            for name in names:
                self._users.setdefault(name, []).append(i)
        # Step 1: forward ops, by the range that they are in.
        layer = 0
        for i in forward.positions:
            while layer < self._last and i > layers[layer].last:
                layer += 1
            self._home[i] = layer
        # The later steps ask for readers, avail, owners and wishes.
        self._readers = self._forward_readers()
        self._places = self._forward_places()
        self._owner = {
            i.value.name: home
            for i in graph.inputs
            if (home := next(_layers_in(self._readers.get(i.value.name, 0)), NONE)) >= 0
        }
        self._wanted = self._update_homes()

    def homes(self) -> tuple[int, ...]:
        """The home of every op."""
        self._place_backward()  # steps 2 and 3; step 1 is done
        self._place_update()  # step 4
        self._place_by_users()  # step 5
        return tuple(NONE if home == _UNKNOWN else home for home in self._home)

    def _is_once(self, i: int) -> bool:
        return self._moments[i].when is When.ONCE

    def _is_backward(self, i: int) -> bool:
        """True if an op is of the loops, reads the batch, and is not of the forward pass."""
        return not (self._is_once(i) or i in self._forward or i in self._free)

    def _from_backward(self, name: str) -> bool:
        return name in self._maker and self._is_backward(self._maker[name])

    # -- forward ---------------------------------------------------------------------------

    def _forward_readers(self) -> dict[str, int]:
        """The layers whose forward ops read each value, also through what runs once."""
        readers: dict[str, int] = {}
        for i in reversed(range(len(self._ops))):
            if i in self._forward:
                mask = 1 << self._home[i]
            elif i in self._free:
                mask = _union(readers.get(r.name, 0) for r in self._ops[i].results)
            else:
                continue
            for name in self._reads[i]:
                readers[name] = readers.get(name, 0) | mask
        return readers

    def _forward_places(self) -> dict[str, int]:
        """avail: the layers that make or read each forward value and parameter.

        A value that is computed of these once, for the backward pass alone, is where they all are.
        """
        places = dict(self._readers)
        for i, op in enumerate(self._ops):
            if i in self._forward:
                for r in op.results:
                    places[r.name] = places.get(r.name, 0) | 1 << self._home[i]
            elif i in self._free:
                # A cast of a parameter, or a mask: where all that it is made of is.
                mask = _intersection(places[n] for n in self._reads[i] if n in places)
                if mask != _ANYWHERE:
                    for r in op.results:
                        places.setdefault(r.name, mask)
        return places

    # -- backward --------------------------------------------------------------------------

    def _later_loops(self) -> dict[int, int]:
        """Ops of loops that differentiate the same function again, and their first versions."""
        loops: dict[int, list[int]] = {}
        for i, moment in enumerate(self._moments):
            if i in self._forward or self._is_backward(i):
                loops.setdefault(moment.loops[0], []).append(i)
        model, again = loops.pop(0, []), dict[int, int]()
        for members in loops.values():
            rest = [i for i in members if i not in self._forward]
            # Another gradient of the same function (SAM) has the same ops, in order, in the same
            # modules.
            pairs = match_ops(self._graph, model, rest)
            if len(pairs) >= _SAME_SHARE * len(rest):
                again.update(pairs)
        return again

    def _place_backward(self) -> None:
        """Place the rest of the loops."""
        again = self._later_loops()
        able: dict[int, int] = {}  # the layers that have what an op reads of the forward pass
        for i in range(len(self._ops)):
            if self._is_backward(i) and i not in again:
                cotangents = [n for n in self._reads[i] if self._from_backward(n)]
                known = [h for n in cotangents if (h := self._home[self._maker[n]]) >= 0]
                others = {
                    n: self._places.get(n, _ANYWHERE) for n in self._reads[i] if n not in cotangents
                }
                # home(e) = max k <= min(home of the cotangents), with k in avail of all others
                able[i] = _intersection(others.values())
                self._home[i] = self._latest(others, able[i], min(known, default=self._last))
        self._move_to_readers(able)
        for copy, model in again.items():
            self._home[copy] = self._home[model]

    def _latest(self, places: Mapping[str, int], able: int, ceiling: int) -> int:
        """The last layer up to a ceiling that has all values, or else the largest."""
        found = _highest(able, ceiling)
        if found >= 0:
            return found
        # No layer has all operands: the largest decides, and the others are sent.
        for name in sorted(places, key=lambda n: -self._values[n].nbytes):
            found = _highest(places[name], ceiling)
            if found >= 0:
                return found
        return ceiling

    def _move_to_readers(self, able: dict[int, int]) -> None:
        """Move backward ops that make more than they read to the last of their readers.

        On the way to a parameter's update they move also if both are equal.
        """
        final: set[int] = set()
        for i in sorted(able, reverse=True):
            users = [u for r in self._ops[i].results for u in self._users.get(r.name, ())]
            if all(u in final or self._is_once(u) for u in users):
                final.add(i)
            # Moves only backwards in the pipeline, to a layer that has the forward operands too.
            target = max(map(self._wished, users), default=NONE)
            if 0 <= target < self._home[i] and able[i] >> target & 1:
                if self._saved_bytes(i, target) >= (0 if i in final else 1):
                    self._home[i] = target

    def _wished(self, i: int) -> int:
        """The home of an op, or the wish for an update; NONE if it is not known."""
        return self._home[i] if self._home[i] >= 0 else self._wanted.get(i, NONE)

    def _saved_bytes(self, i: int, target: int) -> int:
        """Bytes that need not be sent if an op is moved to a layer before its own."""
        saved = sum(r.nbytes for r in self._ops[i].results)
        for name in self._reads[i]:
            # An operand that is sent past the target anyway costs nothing more.
            others = (self._home[u] for u in self._users[name] if u != i)
            if self._from_backward(name) and not any(0 <= home <= target for home in others):
                saved -= self._values[name].nbytes
        return saved

    # -- update ----------------------------------------------------------------------------

    def _update_homes(self) -> dict[int, int]:
        """The wish of each op that runs once: the home of the parameter that its result ends up in.

        Scalars have one only if all their readers agree.
        """
        wanted: dict[str, list[int]] = {}
        for o, i in self._graph.donated:
            # From new state back to the ops that make it.
            owner = self._owner.get(self._graph.inputs[i].value.name, NONE)
            if owner >= 0:
                wanted.setdefault(str(self._graph.outputs[o]), []).append(owner)
        found: dict[int, int] = {}
        for i in reversed(range(len(self._ops))):
            homes = {h for r in self._ops[i].results for h in wanted.get(r.name, ())}
            small = _is_small(self._ops[i])
            if not self._is_once(i) or not homes or (small and len(homes) > 1):
                continue
            found[i] = min(homes)
            for name in self._reads[i]:
                wanted.setdefault(name, []).append(found[i])
        return found

    def _place_update(self) -> None:
        for i, op in enumerate(self._ops):
            if not self._is_once(i):
                continue
            # Arrays go to their parameter; scalars to the arrays that they are made of, or to where
            # all their operands are.
            by_operands = self._home_of_largest_array(i)
            if not _is_small(op):
                self._home[i] = self._wanted.get(i, by_operands)
            elif by_operands >= 0:
                self._home[i] = by_operands
            else:
                # NONE if the operands' homes differ, or are joins already.
                homes = {h for n in self._reads[i] if (h := self._home_of(n)) != _UNKNOWN}
                joined = homes.pop() if len(homes) == 1 else NONE if homes else _UNKNOWN
                self._home[i] = self._wanted.get(i, joined)

    def _home_of_largest_array(self, i: int) -> int:
        """The home of the largest array that an op reads; the earliest of equals."""
        homes = [
            (-self._values[n].nbytes, home)
            for n in self._reads[i]
            if self._values[n].item_count > 1 and (home := self._home_of(n)) >= 0
        ]
        return min(homes)[1] if homes else _UNKNOWN

    def _home_of(self, name: str) -> int:
        maker = self._maker.get(name)
        return self._owner.get(name, _UNKNOWN) if maker is None else self._home[maker]

    def _place_by_users(self) -> None:
        """Place the rest: setup, decayed moments, schedules of the learning rate."""
        # Free ops that carry a parameter on, such as a cast of it.
        carried = {name for name in self._owner if self._values[name].item_count > 1}
        of_state: set[int] = set()
        for i, names in enumerate(self._reads):
            if self._moments[i].when is When.FREE and not carried.isdisjoint(names):
                carried.update(r.name for r in self._ops[i].results)
                of_state.add(i)
        for i in reversed(range(len(self._ops))):
            if self._home[i] != _UNKNOWN:
                continue
            users = [u for r in self._ops[i].results for u in self._users.get(r.name, ())]
            homes = {h for h in map(self._wished, users) if h >= 0}
            # One reader's layer; several read a cast parameter where it is first needed, all else
            # each makes for itself.
            if len(homes) == 1 or (homes and i in of_state):
                self._home[i] = min(homes)
            elif not homes:
                self._home[i] = self._home_of_largest_array(i)


def _is_small(op: Op) -> bool:
    return all(r.item_count <= 1 for r in op.results)
