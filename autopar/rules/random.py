"""Rules of random bits: keys stay whole, and each shard keeps its slice of the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.factors import Factors, RuleMaker, replicated_rule


def _random_bits(op: Op, operands: Sequence[Value]) -> Rule:
    found = Factors()
    keys = [found.each(v.shape, Kind.REPLICATE) for v in operands]
    return found.rule(keys, [found.each(op.results[0].shape)])


def _rng_bit_generator(op: Op, operands: Sequence[Value]) -> Rule:
    """The state that comes back is whole; the bits may lie anyhow."""
    found = Factors()
    state: list[Dim] = found.each(operands[0].shape, Kind.REPLICATE)
    return found.rule([state], [state, found.each(op.results[1].shape)])


# Not by shard: a gamma draw splits its key by position in the whole tensor, and rng_uniform
# gives every device numbers of its own.
_WHOLE = """
    random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
    rng_uniform
""".split()

RULES: Mapping[str, RuleMaker] = {
    **dict.fromkeys(_WHOLE, replicated_rule),
    "random_bits": _random_bits,
    "rng_bit_generator": _rng_bit_generator,
}
