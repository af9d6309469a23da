"""Alignment of two traces, on the whole batch and on a part: a dim whose size differs holds rows.

whole batch (8 rows)           microbatch (2 rows)
%0: f32[8,16] = dot(%x, %w)    %0: f32[2,16] = dot(%x, %w)    dim 0 of %0 holds rows
%1: f32[16]   = reduce_sum(%0) %1: f32[16]   = reduce_sum(%0) a sum over rows
%2: f32[16]   = div(%1, 8.0)   %2: f32[16]   = div(%1, 8.0)   constants are the whole batch's
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.batching import BatchGraphs, Rows
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Literal, Role, Value
from autopar.passes.batch.refuse import Fault, Why, describe

ONE_BY_ONE = "goes through the rows of the batch one after the other"

# Parameters that say what the shapes say too; every other one must not change with the batch.
_OF_SHAPE = frozenset(
    """
    shape new_sizes sizes limit_indices start_indices padding_config slice_sizes reps
    feature_group_count batch_group_count window_dimensions sharding spec axis_size
    """.split()
)


@dataclass(frozen=True)
class BatchCut:
    """The number of rows and of microbatches, and the values in which rows begin.

    `sources` have rows that no operand gives them; `source_only` values are needed only by them.
    """

    batch: int
    microbatches: int
    sources: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    source_only: frozenset[str] = frozenset()

    def dims(self, whole: Value, part: Value) -> tuple[int, ...]:
        """The dims whose sizes differ between the two traces."""
        pairs = zip(whole.shape, part.shape, strict=True)
        return tuple(d for d, (n, own) in enumerate(pairs) if n != own)

    def items_per_row(self, whole: Value, part: Value, dim: int) -> int:
        """Items of the dim for each row of the batch; 0 where rows do not divide it."""
        size, own = whole.shape[dim], part.shape[dim]
        even = size % self.batch == 0 and own * self.microbatches == size
        return size // self.batch if even else 0


def find_batch_cut(graphs: BatchGraphs) -> BatchCut | Fault:
    """The rows of the batch: the smallest dim of a batch input that differs between the traces."""
    # 1. Dims of inputs whose sizes differ between the traces.
    m = graphs.microbatches
    own = [i for i in graphs.part.inputs if i.value.name != graphs.index]
    sizes: dict[str, tuple[int, ...]] = {}
    for one, other in zip(graphs.whole.inputs, own, strict=True):
        differing = BatchCut(1, m).dims(one.value, other.value)
        if one.role is not Role.CONSTANT and differing:
            sizes[one.path or one.value.name] = tuple(one.value.shape[d] for d in differing)
    if not sizes:
        first = graphs.whole.inputs[:6]
        shown = ", ".join(f"{i.path or i.value.name} {i.value.type_text}" for i in first)
        return Fault(Why.AXIS, f"no input has a batch axis; the step was given {shown}")
    # 2. The smallest is the batch; others must be multiples (rows of several examples each).
    batch = min(n for found in sizes.values() for n in found)
    odd = [f"{path} has {found[0]}" for path, found in sizes.items() if found[0] % batch]
    if odd or batch % m:
        numbers = "; ".join(odd) or f"{batch} rows do not make {m} equal microbatches"
        return Fault(Why.AXIS, f"the batch axis is ambiguous: taken as {batch} rows, yet {numbers}")
    # 3. Values that nothing but sources is made of, and that hold no rows of the step's inputs. The
    #    front end has seen to it that sources are what they are on the whole batch; what it makes
    #    them of is no business of ours.
    sources = dict(graphs.sources)
    wanted = frozenset(_only_for(graphs.part, sources))
    source_only = _without_rows(graphs.whole, graphs.part, wanted, graphs.index)
    return BatchCut(batch, m, sources, frozenset(source_only))


def is_source_only(op: Op, source_only: Collection[str]) -> bool:
    """True if all results of an op are needed only by sources."""
    return bool(op.results) and all(v.name in source_only for v in op.results)


def _only_for(graph: Graph, sources: Collection[str]) -> Iterator[str]:
    """Results that are sources, or that nothing else reads."""
    read = {o for o in graph.outputs if isinstance(o, str)} - set(sources)
    # Backwards: an op is only for sources if all its readers are sources or such ops.
    for op in reversed(graph.ops):
        for body in op.graphs:
            yield from _only_for(body, sources)
        if op.results and not op.graphs and not any(v.name in read for v in op.results):
            yield from (v.name for v in op.results)
        else:
            read.update(set(op.value_operands) - set(sources))


def _without_rows(
    whole: Graph, part: Graph, wanted: Collection[str], index: str = ""
) -> Iterator[str]:
    """Of these values, those that are made of none with rows but each other."""
    source_only = {index}
    for one, own in zip(whole.ops, part.ops, strict=False):
        for inner, body in zip(one.graphs, own.graphs, strict=False):
            yield from _without_rows(inner, body, wanted)
        # Of these the ones made of values without rows, or of each other.
        loud = (n for n in own.value_operands if n not in source_only)
        if all(n in whole.values and whole.values[n] == part.values[n] for n in loud):
            source_only.update(v.name for v in own.results if v.name in wanted)
    yield from source_only


def compare_traces(whole: Graph, part: Graph, source_only: Collection[str]) -> Iterator[Fault]:
    """Compare two traces: E2 at the first op at which they differ, E3 at each differing constant.

    Ops that make `source_only` values may read constants of their own.
    """
    for one, own in zip(whole.ops, part.ops, strict=False):
        if one is own:
            continue
        loud = not is_source_only(own, source_only)
        # E2 at the first difference: what follows differs because of it.
        if not _alike(one, own, source_only, loud=loud):
            text = f"the whole batch runs {describe(one)}, a microbatch {describe(own)}"
            yield Fault(Why.STRUCTURE, text)
            return
        # E3: a constant of the batch size, used as a position or an option.
        yield from _compare_constants(one, own) if loud else ()
        for inner, body in zip(one.graphs, own.graphs, strict=True):
            yield from compare_traces(inner, body, source_only)
    if len(whole.ops) != len(part.ops) or whole.outputs != part.outputs:
        text = f"the whole batch runs {len(whole.ops)} ops, a microbatch {len(part.ops)}"
        yield Fault(Why.STRUCTURE, text)


def _alike(whole: Op, part: Op, source_only: Collection[str], *, loud: bool) -> bool:
    """True if two ops have operands and results of the same names, but for the batch's index."""

    def same(one: Operand, own: Operand) -> bool:
        numbered = isinstance(own, Literal) or own in source_only or not loud
        return one == own or (isinstance(one, Literal) and numbered)

    return (
        whole.kind == part.kind
        and len(whole.graphs) == len(part.graphs)
        and [_type(v) for v in whole.results] == [_type(v) for v in part.results]
        and len(whole.operands) == len(part.operands)
        and all(map(same, whole.operands, part.operands))
    )


def _type(value: Value) -> tuple[str, int, str]:
    return value.name, len(value.shape), value.dtype


def _compare_constants(whole: Op, part: Op) -> Iterator[Fault]:
    own = dict(part.params)
    for one, other in zip(whole.operands, part.operands, strict=True):
        if one != other and isinstance(other, Literal):
            text = f"{describe(whole)} reads {one} on the whole batch, {other} on a microbatch"
            yield Fault(Why.CONSTANT, text)
    for name, value in whole.params:
        if name == "length" and own.get(name) != value:
            yield Fault(Why.COUPLED, f"{describe(whole)} {ONE_BY_ONE}")
        elif name not in _OF_SHAPE and own.get(name) != value:
            yield Fault(
                Why.CONSTANT,
                f"{describe(whole)} has {name}={value} on the whole batch, "
                f"{name}={own.get(name)} on a microbatch",
            )
