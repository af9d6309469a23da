"""Rules of random bits: keys stay whole, and each shard keeps its slice of the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.primitive import Factors, Fusion, Primitive, Work, alike, replicated_rule


def _random_bits(op: Op, operands: Sequence[Value]) -> Rule:
    found = Factors()
    keys = [found.each(v.shape, Kind.REPLICATE) for v in operands]
    return found.rule(keys, [found.each(op.results[0].shape)])


def _rng_bit_generator(op: Op, operands: Sequence[Value]) -> Rule:
    """The state that comes back is whole; the bits may lie anyhow."""
    found = Factors()
    state: list[Dim] = found.each(operands[0].shape, Kind.REPLICATE)
    return found.rule([state], [state, found.each(op.results[1].shape)])


PRIMITIVES: Mapping[str, Primitive] = {
    **alike(["random_clone", "random_fold_in"], Primitive(replicated_rule)),
    # Not by shard: a gamma draw splits its key by position in the whole tensor, and rng_uniform
    # gives every device numbers of its own.
    **alike(["random_gamma", "rng_uniform"], Primitive(replicated_rule, draws=True)),
    "random_seed": Primitive(replicated_rule, fusion=Fusion.KERNEL),
    "random_split": Primitive(replicated_rule, fusion=Fusion.KERNEL, draws=True),
    **alike(["random_unwrap", "random_wrap"], Primitive(replicated_rule, Work.NONE)),
    "random_bits": Primitive(_random_bits, redo_bytes=16.0, draws=True, local=True),
    "rng_bit_generator": Primitive(_rng_bit_generator, draws=True, local=True),
}
