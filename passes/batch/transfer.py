"""Transfer functions of the batch analysis: facts of an op's results, given those of its operands.

operands                       results
any sharded                    sharded, or partial where the rows are summed (`dim_propagation`)
any partial, in a body         partial if the op is linear in them, else E11
any local, none sharded        local
all replicated                 replicated; with rows of its own, a source (iota, random bits)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.batching import BatchGraphs, Rows
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Literal, Value
from autopar.passes.batch import control_flow
from autopar.passes.batch.dim_propagation import (
    COUPLES,
    TWICE,
    AlignedOp,
    is_opaque,
    propagate_rows,
)
from autopar.passes.batch.lattice import REPLICATED, Fact, Share, literal_fact
from autopar.passes.batch.refuse import Fault, Why, describe
from autopar.passes.batch.trace_alignment import BatchCut, is_source_only
from autopar.rules import primitive

# Each operand goes through by itself.
_SIDE_BY_SIDE = frozenset({"optimization_barrier", "device_put"})


@dataclass
class TransferFunctions:
    """Reads ops of the two traces side by side and gathers what forbids cutting them."""

    graphs: BatchGraphs
    cut: BatchCut
    faults: list[Fault] = field(default_factory=list[Fault])

    def op(
        self, whole: Op, part: Op, given: Sequence[Fact], scopes: tuple[Graph, Graph]
    ) -> tuple[Fact, ...]:
        """The facts of an op's results; `scopes` are the graphs that the two ops stand in."""
        if not is_source_only(part, self.cut.source_only) or part.graphs:
            return self._results(whole, part, given, scopes)
        # Ops behind a source may couple rows. The source itself is as the front end says.
        facts = self.trial()._results(whole, part, given, scopes)
        sources = self.cut.sources
        return tuple(
            replace(f, share=Share.SHARDED, rows=sources[v.name], combiner="")
            if v.name in sources
            else f
            for v, f in zip(part.results, facts, strict=True)
        )

    def trial(self) -> TransferFunctions:
        """A reader of the same traces whose faults nobody is told of."""
        return TransferFunctions(self.graphs, self.cut)

    def _results(
        self, whole: Op, part: Op, given: Sequence[Fact], scopes: tuple[Graph, Graph]
    ) -> tuple[Fact, ...]:
        # 1. Each operand goes through by itself.
        if whole.kind in _SIDE_BY_SIDE:
            return tuple(given)
        # 2. Bodies are read with the facts of their operands.
        if whole.graphs:
            return control_flow.propagate(part, given, _Bodies(self, whole, part, scopes[1]))
        # 3. Partial operands: only in bodies, as outside a partial value ends the loop.
        scope = scopes[0]
        if any(f.share is Share.PARTIAL for f in given):
            facts = self._combine_parts(whole, part, given, scope)
        # 4. Rows, by the rule of the op.
        elif any(f.share is Share.SHARDED for f in given):
            facts = self._with_rows(whole, part, given, scope)
        # 5. No rows but those that begin here.
        else:
            facts = self._without_rows(whole, part, given)
        # 6. For R2: results that stay multiples of a scalar of the whole batch. A result in f16 may
        #    overflow where the scalar itself does not.
        scalars = frozenset[str]().union(*(f.scalars for f in given))
        if not scalars:
            return facts
        zeros = [i for i, f in enumerate(given) if f.zero]
        multiple: set[str] = set()
        for scalar in scalars.difference(*(f.bound_to for f in given)):
            places = [i for i, f in enumerate(given) if scalar in f.multiple_of]
            if _is_linear(whole, places, zeros, scope):
                multiple.add(scalar)
        if any(v.dtype == "f16" for v in whole.results):
            multiple.clear()
        rest = scalars - multiple
        return tuple(replace(f, multiple_of=frozenset(multiple), bound_to=rest) for f in facts)

    def rows_dim(self, whole: Value, part: Value) -> int | None:
        """The dim that holds rows, by its size; the first of several."""
        dims = self.cut.dims(whole, part)
        return dims[0] if dims else None

    def touches_rows(self, whole: Op, part: Op) -> bool:
        """True if a result, or a value in a body, holds rows."""
        pairs = zip(whole.results, part.results, strict=True)
        return any(a.shape != b.shape for a, b in pairs) or any(
            self.touches_rows(one, own)
            for inner, body in zip(whole.graphs, part.graphs, strict=True)
            for one, own in zip(inner.ops, body.ops, strict=True)
        )

    def fault(self, why: Why, text: str) -> None:
        """Note what forbids cutting the step, once."""
        fault = Fault(why, text)
        if fault not in self.faults:
            self.faults.append(fault)

    # -- ops without bodies ----------------------------------------------------------------

    def _without_rows(self, whole: Op, part: Op, given: Sequence[Fact]) -> tuple[Fact, ...]:
        own = any(f.share is Share.LOCAL for f in given)
        zero = (
            not own
            and all(f.zero for f in given)
            and bool(given)
            and primitive(whole.kind).keeps_zero
        )
        facts: list[Fact] = []
        for place, (one, value) in enumerate(zip(whole.results, part.results, strict=True)):
            dim = self.rows_dim(one, value)
            if dim is None:
                facts.append(Fact(Share.LOCAL) if own else Fact(zero=zero))
                continue
            # A result with rows is a source: rows in one dim, and all of them alike.
            if len(self.cut.dims(one, value)) > 1:
                self.fault(Why.TWICE, f"{describe(whole, place)} {TWICE}")
            items = self.cut.items_per_row(one, value, dim)
            if not items:
                self.fault(Why.COUPLED, f"{describe(whole, place)} {COUPLES}")
            uniform = not own and self._is_uniform(whole, dim, place)
            facts.append(Fact(Share.SHARDED, Rows(dim, 1, max(items, 1)), uniform, zero))
        return tuple(facts)

    def _is_uniform(self, op: Op, dim: int, place: int) -> bool:
        """True if the rows of a source are all alike; notes a fault if they are not."""
        if op.kind in ("broadcast_in_dim", "empty"):
            return True
        if op.kind == "iota" and op.whole("dimension") != dim:
            return True
        if primitive(op.kind).draws:
            text = f"{describe(op, place)} draws the whole batch at once"
            self.fault(Why.RANDOM, text)
        else:
            text = f"{describe(op, place)} counts the rows of the batch"
            self.fault(Why.CONSTANT, text)
        return False

    def _with_rows(
        self, whole: Op, part: Op, given: Sequence[Fact], scope: Graph
    ) -> tuple[Fact, ...]:
        if not part.results:
            return ()
        # E8: code that cannot be seen into.
        if is_opaque(whole):
            self.fault(Why.OPAQUE, f"{describe(whole)} is code that autopar cannot see into")
            return self._by_size(whole, part)
        flow = propagate_rows(
            AlignedOp(
                whole,
                part,
                tuple(scope.value(o) for o in whole.operands),
                tuple(f.rows for f in given),
                tuple(f.uniform for f in given),
                self.cut.batch,
                self.cut.microbatches,
            )
        )
        # E5: rows are mixed; E7: they are in two dims.
        if flow.fault:
            rows, operand = next(
                (f.rows, o) for o, f in zip(whole.operands, given, strict=True) if f.rows
            )
            holder = f"dim {rows.dim} of {operand} {scope.value(operand).type_text} holds them"
            why = Why.TWICE if flow.fault == TWICE else Why.COUPLED
            self.fault(why, f"{describe(whole)} {flow.fault}: {holder}")
            return self._by_size(whole, part)
        # Rows of results, or partial sums. Rows stay uniform with as many items each.
        joins = whole.kind in ("concatenate", "pad")
        uniform = not joins and all(f.uniform for f in given if f.rows)
        zero = primitive(whole.kind).keeps_zero and all(f.zero for f in given)
        items = {f.rows.outer * f.rows.inner for f in given if f.rows is not None}
        facts = [
            Fact(Share.SHARDED, rows, uniform and items == {rows.outer * rows.inner}, zero)
            if rows is not None
            else Fact(Share.PARTIAL, combiner=flow.combiner, zero=zero)
            for rows in flow.results
        ]
        # The rows by rule must be where the sizes of the two traces say.
        for place, (one, value, fact) in enumerate(
            zip(whole.results, part.results, facts, strict=True)
        ):
            dims = self.cut.dims(one, value)
            held = () if fact.rows is None else (fact.rows.dim,)
            if len(dims) > 1:
                self.fault(Why.TWICE, f"{describe(whole, place)} {TWICE}")
            elif dims != held:
                self.fault(Why.COUPLED, f"{describe(whole, place)} {COUPLES}")
        summed = any(f.share is Share.PARTIAL for f in facts)
        # Each microbatch would add the value itself once more.
        if summed and primitive(whole.kind).adds and not given[0].zero:
            self.fault(
                Why.COUPLED,
                f"{describe(whole)} adds rows of the batch to a value that is not zero",
            )
        if summed and any(f.share is Share.LOCAL for f in given):
            text = f"{describe(whole)} mixes rows with the number of their microbatch"
            self.fault(Why.COUPLED, text)
        return tuple(facts)

    def _by_size(self, whole: Op, part: Op) -> tuple[Fact, ...]:
        """Facts of the results of an op that cannot be cut, by their sizes alone."""
        facts: list[Fact] = []
        for one, own in zip(whole.results, part.results, strict=True):
            dim = self.rows_dim(one, own)
            items = 0 if dim is None else one.shape[dim] // self.cut.batch
            held = Fact(Share.SHARDED, Rows(dim or 0, 1, max(items, 1)), uniform=True)
            facts.append(REPLICATED if dim is None else held)
        return tuple(facts)

    # -- parts of sums, which only bodies see ----------------------------------------------

    def _combine_parts(
        self, whole: Op, part: Op, given: Sequence[Fact], scope: Graph
    ) -> tuple[Fact, ...]:
        """Parts go through what is linear in them; nothing else may read them."""
        combiner = next(f.combiner for f in given if f.share is Share.PARTIAL)
        places = [i for i, f in enumerate(given) if f.share is Share.PARTIAL]
        zeros = [i for i, f in enumerate(given) if f.zero]
        # All partial by one combiner, all else replicated, and the op linear in the partial ones:
        # f(sum of parts) = sum of f(parts).
        same = all(
            f.combiner == combiner if f.share is Share.PARTIAL else f.share is Share.REPLICATED
            for f in given
        ) and not self.touches_rows(whole, part)
        fits = (
            _is_linear(whole, places, zeros, scope)
            if combiner == "sum"
            else primitive(whole.kind).moves or _IDEMPOTENT.get(whole.kind) == combiner
        )
        if not (same and fits):
            operand = whole.operands[places[0]]
            made = (
                (op, k) for op in scope.ops for k, v in enumerate(op.results) if v.name == operand
            )
            maker = next((describe(op, k) for op, k in made), str(operand))
            value = f"{maker}, a {combiner} over rows of the batch"
            text = f"{describe(whole)} needs all of {value}, inside the loop that makes it"
            self.fault(Why.LOOPED, text)
            return self._by_size(whole, part)
        zero = all(given[i].zero for i in places) and primitive(whole.kind).keeps_zero
        return tuple(Fact(Share.PARTIAL, combiner=combiner, zero=zero) for _ in whole.results)


@dataclass(frozen=True)
class _Bodies:
    """The bodies of one op of the two traces, for `control_flow` to go through."""

    transfer: TransferFunctions
    whole: Op
    part: Op
    around: Graph

    def run(self, body: int, given: Sequence[Fact], *, trial: bool) -> tuple[Fact, ...]:
        """The facts of a body's outputs; a trial notes no faults."""
        transfer = self.transfer.trial() if trial else self.transfer
        whole, part = self.whole.graphs[body], self.part.graphs[body]
        facts = {i.value.name: f for i, f in zip(part.inputs, given, strict=True)}

        def read(operands: Sequence[Operand]) -> tuple[Fact, ...]:
            return tuple(literal_fact(o) if isinstance(o, Literal) else facts[o] for o in operands)

        for one, own in zip(whole.ops, part.ops, strict=True):
            found = transfer.op(one, own, read(own.operands), (whole, part))
            facts.update((v.name, f) for v, f in zip(own.results, found, strict=True))
        return read(part.outputs)

    def fault(self, text: str) -> None:
        """Note what forbids cutting the op."""
        self.transfer.fault(Why.COUPLED, f"{describe(self.whole)} {text}")

    def opaque(self) -> None:
        """Note that the op's bodies are not understood."""
        text = f"{describe(self.whole)} is code that autopar cannot see into"
        self.transfer.fault(Why.OPAQUE, text)


# -- linearity: twice the operands makes twice the results -----------------------------------


# A maximum of maxima over parts is one over all.
_IDEMPOTENT = {"max": "max", "min": "min", "and": "and", "or": "or"}


def _is_linear(op: Op, places: Collection[int], zeros: Collection[int], graph: Graph) -> bool:
    """True if the results are linear in the operands at these places, those at `zeros` being 0.

    Rounding to a floating-point type counts as linear.
    """
    if op.kind == "convert_element_type":
        operand = graph.value(op.operands[0])
        return operand.dtype != "bool" and op.results[0].is_floating
    groups = op.rule.linear if op.rule is not None else ()
    return any(
        set(places) <= set(group) and set(group) - set(places) <= set(zeros) for group in groups
    )
