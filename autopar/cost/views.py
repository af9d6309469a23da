"""Views that matrix products have of what they read: which dims are one to them.

XLA for GPUs multiplies matrices, or batches of them: the dims of a batch are one to it, and so are
an operand's that are kept, and those that are summed over. What has more dims is viewed (a
bitcast), by whoever asks for another form anew:

    h[batch, seq, features] @ w        [(batch seq), features]
    h.T @ dy                           [features, (batch seq)]

A product's result begins with its dims as one, and element-wise work of such values and of numbers
alone is done on them so (XLA's ReshapeMover), unless something else reads these with all dims. That
needs no view where the next product has the same dims as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from autopar.cost.layouts import by_kind
from autopar.cost.line import read_line
from autopar.cost.ops import is_fused_into_readers, made_by, operand_shape, summed_dims
from autopar.cost.sizes import Sizes
from autopar.ir.graph import Op
from autopar.ir.listing import Block, LocalOp

Dims: TypeAlias = tuple[int, ...]
View: TypeAlias = tuple[Dims, ...]  # the dims of a value, those in brackets that are one


def product_views(block: Block, sizes: Sizes) -> Mapping[str, Mapping[str, View]]:
    """By a product's result, its views of the values that it reads; of those as they lie, none."""
    return sizes.once(_Views, block, {}, lambda: _Views(block, sizes)).found


class _Views:
    """A block read forward, for the values that have dims as one, and back for those that cannot.

    `found` are the views of each product.
    """

    def __init__(self, block: Block, sizes: Sizes) -> None:
        self._sizes, self._steps, self._line = sizes, block.instructions, read_line(block, sizes)
        self._outputs = {o for o in block.outputs if o is not None}
        self._forms: dict[str, dict[str, View]] = {}  # in which each product reads its operands
        self._joined: dict[str, frozenset[Dims]] = {}  # the dims of values that are one
        for i in range(len(self._steps) if sizes.platform == "gpu" else 0):
            self._read(i)
        self._take_back()
        self.found: dict[str, dict[str, View]] = {}
        for made, forms in self._forms.items():
            views = {n: form for n, form in forms.items() if self._is_view(n, form)}
            if views:
                self.found[made] = views

    def _is_view(self, name: str, form: View) -> bool:
        joined = _joined(form)
        return bool(joined) and joined != self._joined.get(name)

    def _read(self, i: int) -> None:
        """Notes in which form a product reads, and which dims are one in what is made."""
        step, op = self._steps[i], self._line.ops[i]
        if not isinstance(step, LocalOp) or op is None or op.rule is None or not step.results:
            return
        made = step.results[0]
        if op.kind == "dot_general":
            self._forms[made] = dict(self._read_by(step, op))
            self._joined[made] = self._made_by(step, op)
        elif (product := self._biased(i, op)) is not None:
            self._joined[made] = self._joined[product]
        elif _is_item_by_item(op):
            joined = {self._joined.get(name) for name in self._values(step, op)}
            own = joined.pop() if len(joined) == 1 else None
            if own is not None:
                self._joined[made] = own

    def _read_by(self, step: LocalOp, op: Op) -> Iterator[tuple[str, View]]:
        assert op.rule is not None
        for place, name in enumerate(step.operands):
            if name is None:
                continue
            shard = self._sizes.shard(step, op, place)
            kinds = by_kind((d for d, size in enumerate(shard) if size > 1), op.rule, place)
            batch, kept, summed = (tuple(d for kind, d in kinds if kind == n) for n in range(3))
            is_first = (place == 0) is not step.swapped
            yield name, (batch, kept, summed) if is_first else (batch, summed, kept)

    def _made_by(self, step: LocalOp, op: Op) -> frozenset[Dims]:
        assert op.rule is not None
        local, makers = self._sizes.made(step, op), made_by(op.rule)
        large = [d for d, size in enumerate(local) if size > 1]
        return _joined(tuple(tuple(d for d in large if makers[d] == m) for m in (0, 1, 2)))

    def _values(self, step: LocalOp, op: Op) -> list[str]:
        """The values that element-wise work is made of, numbers that are everywhere left out."""
        named = (o for k, o in enumerate(step.operands) if operand_shape(op, k))
        return [name for name in named if name is not None and not self._is_spread(name, 0)]

    def _is_spread(self, name: str, dims: int) -> bool:
        """True for what is spread out of a value of so many dims."""
        at = self._line.maker.get(name)
        op = self._line.ops[at] if at is not None else None
        return (
            op is not None and op.kind == "broadcast_in_dim" and len(operand_shape(op, 0)) == dims
        )

    def _biased(self, i: int, op: Op) -> str | None:
        """The product's result that a vector is added to and nothing else reads: BLAS adds it."""
        reads = self._line.reads[i]
        if op.kind != "add" or len(reads) != 2 or not self._is_spread(reads[1], 1):
            return None
        is_alone = reads[0] in self._forms and len(self._line.readers[reads[0]]) == 1
        return reads[0] if is_alone else None

    # -- what needs all dims -------------------------------------------------------------------

    def _take_back(self) -> None:
        """Leave out what is made of values of which something needs all dims."""
        waiting = [name for name in self._joined if self._needs_all_dims(name)]
        while waiting:
            for i in self._line.readers.get(waiting.pop(), ()):
                step, op = self._steps[i], self._line.ops[i]
                if not isinstance(step, LocalOp) or op is None or not _is_item_by_item(op):
                    continue
                if self._biased(i, op) is None and step.results[0] in self._joined:
                    del self._joined[step.results[0]]
                    waiting += (name for name in self._values(step, op) if name in self._joined)

    def _needs_all_dims(self, name: str) -> bool:
        """True if something that reads a value does not have the same dims as one."""
        joined = self._joined[name]
        readers = self._line.readers.get(name, ())
        return name in self._outputs or any(self._parts(i, name, joined) for i in readers)

    def _parts(self, i: int, name: str, joined: frozenset[Dims]) -> bool:
        """True if an instruction reads a value otherwise than with these dims as one."""
        op = self._line.ops[i]
        if op is None or not self._line.makes[i]:
            return True
        made = self._line.makes[i][0]
        if made in self._forms:
            return _joined(self._forms[made].get(name, ())) != joined
        if (summed := summed_dims(op)) is not None:
            return not all(set(dims) <= set(summed) for dims in joined)
        return self._joined.get(made) != joined or not _is_item_by_item(op)


def _is_item_by_item(op: Op) -> bool:
    """True for element-wise work on values of one shape, and on numbers."""
    if not is_fused_into_readers(op) or op.rule is None or not op.rule.is_elementwise:
        return False
    return all(dims in ((), op.rule.results[0]) for dims in op.rule.operands)


def _joined(view: View) -> frozenset[Dims]:
    return frozenset(tuple(sorted(dims)) for dims in view if len(dims) > 1)
