"""The rules of the main families, written out."""

from __future__ import annotations

import pytest

from autopar.ir.graph import Op, Plain
from autopar.ir.rule import Factor, Kind
from autopar.ir.values import Literal, Value
from autopar.rules.primitive import Factors
from autopar.rules.shape import gcd_chain
from autopar.rules.table import rule_for


def value(text: str) -> Value:
    """A value from its type: f32[4,8]."""
    dtype, _, dims = text.rstrip("]").partition("[")
    return Value("%x", tuple(int(n) for n in dims.split(",") if n), dtype)


def rule_text(kind: str, operands: str, results: str, **params: Plain) -> str:
    """The text of an op's rule; types are parted by spaces."""
    values = [value(t) for t in operands.split()]
    outs = tuple(value(t) for t in results.split())
    names = tuple("%x" for _ in values)
    return str(rule_for(Op(kind, names, outs, tuple(sorted(params.items()))), values))


CONTRACT_BATCHED: Plain = (((2,), (1,)), ((0,), (0,)))
CONV: Plain = (("lhs_spec", (0, 1, 2)), ("rhs_spec", (0, 1, 2)), ("out_spec", (0, 1, 2)))
EMBED: Plain = (
    ("offset_dims", (2,)),
    ("collapsed_slice_dims", (0,)),
    ("start_index_map", (0,)),
    ("operand_batching_dims", ()),
    ("start_indices_batching_dims", ()),
)
ADD_ROWS: Plain = (
    ("update_window_dims", (1,)),
    ("inserted_window_dims", (0,)),
    ("scatter_dims_to_operand_dims", (0,)),
    ("operand_batching_dims", ()),
    ("scatter_indices_batching_dims", ()),
)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "operands", "results", "params", "expected"),
    [
        ("add", "f32[4,8] f32[4,8]", "f32[4,8]", {}, "(a b, a b) -> (a b)"),
        ("add", "f32[4,8] f32[1,8]", "f32[4,8]", {}, "(a b, [] b) -> (a b)"),
        ("select_n", "bool[] f32[4] f32[4]", "f32[4]", {}, "(-, a, a) -> (a)"),
        (
            "dot_general", "f32[2,3,4] f32[2,4,5]", "f32[2,3,5]",
            {"dimension_numbers": CONTRACT_BATCHED}, "(a b d, a d c) -> (a b c); d:reduce",
        ),
        (
            "reduce_max", "f32[4,8]", "f32[4]", {"axes": (1,)},
            "(a b) -> (a); b:reduce-max",
        ),
        ("reduce_prod", "f32[4,8]", "f32[4]", {"axes": (1,)}, "(a b) -> (a); b:replicate"),
        ("reduce_and", "i32[4,8]", "i32[4]", {"axes": (1,)}, "(a b) -> (a); b:replicate"),
        ("reduce_and", "bool[4,8]", "bool[4]", {"axes": (1,)}, "(a b) -> (a); b:reduce-and"),
        ("argmax", "f32[4,8]", "i32[4]", {"axes": (1,)}, "(a b) -> (a); b:replicate"),
        ("cumsum", "f32[4,8]", "f32[4,8]", {"axis": 1}, "(a b) -> (a b); b:replicate"),
        ("rev", "f32[4,8]", "f32[4,8]", {"dimensions": (1,)}, "(a b) -> (a b); b:permute"),
        ("iota", "", "i32[4,8]", {"dimension": 0}, "() -> (a b)"),
        (
            "broadcast_in_dim", "f32[4,1]", "f32[2,4,8]", {"broadcast_dimensions": (1, 2)},
            "(b []) -> (a b c)",
        ),
        ("tile", "f32[2,3]", "f32[8,3]", {"reps": (4, 1)}, "(a b) -> ([ca] b)"),
        (
            "slice", "f32[4,8]", "f32[4,5]", {}, "(a b) -> (a c); b:permute; c:permute",
        ),
        (
            "concatenate", "f32[4,2] f32[4,3]", "f32[4,5]", {"dimension": 1},
            "(a b, a c) -> (a d); b:replicate; c:replicate; d:replicate",
        ),
        (
            "gather", "f32[16,4] i32[2,3,1]", "f32[2,3,4]",
            {"dimension_numbers": EMBED, "slice_sizes": (1, 4), "mode": "CLIP"},
            "(c d, a b e) -> (a b d); c:reduce; e:replicate",
        ),
        (
            "scatter-add", "f32[16,4] i32[8,1] f32[8,4]", "f32[16,4]",
            {"dimension_numbers": ADD_ROWS},
            "(b c, a d, a c) -> (b c); a:reduce; d:replicate",
        ),
        (
            "scatter", "f32[16,4] i32[8,1] f32[8,4]", "f32[16,4]",
            {"dimension_numbers": ADD_ROWS},
            "(b c, a d, a c) -> (b c); a:replicate; d:replicate",
        ),
        (
            "dynamic_update_slice", "f32[4,8] f32[4,2] i32[] i32[]", "f32[4,8]", {},
            "(a b, a c, -, -) -> (a b); c:replicate",
        ),
        (
            "conv_general_dilated", "f32[2,8,6] f32[8,2,3]", "f32[2,8,6]",
            {
                "dimension_numbers": CONV, "feature_group_count": 4, "batch_group_count": 1,
                "window_strides": (1,), "lhs_dilation": (1,), "padding": ((1, 1),),
            },
            "(b [ad] e, [ac] d f) -> (b [ac] e); d:reduce; e:permute; f:replicate",
        ),
        (
            "triangular_solve", "f32[2,3,3] f32[2,3,4]", "f32[2,3,4]", {"left_side": True},
            "(a c d, a c b) -> (a c b); c:replicate; d:replicate",
        ),
        ("random_bits", "key<fry>[2]", "u32[2,8]", {}, "(a) -> (b c); a:replicate"),
        ("transpose", "key<fry>[4]", "key<fry>[4]", {"permutation": (0,)},
         "(a) -> (a); a:replicate"),
        ("my_primitive", "f32[4]", "f32[4]", {}, "no rule"),
    ],
)  # fmt: skip
def test_rule_reads(
    kind: str, operands: str, results: str, params: dict[str, Plain], expected: str
) -> None:
    assert rule_text(kind, operands, results, **params) == expected


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 4), (8,), "(a b) -> ([ab])"),
        ((8,), (2, 4), "([ab]) -> (a b)"),
        ((8, 4), (2, 16), "([ab] c) -> (a [bc])"),
        ((3, 2), (2, 3), "(a d) -> (b c)"),
        ((6, 4), (4, 6), "([ab] [ef]) -> ([ac] [df])"),
        ((4, 1, 2), (1, 4, 2), "(a [] b) -> ([] a b)"),
        ((1,), (), "([]) -> (-)"),
        ((12, 5), (5, 12), "(a d) -> (b c)"),
    ],
)
def test_reshape_is_a_chain_of_common_factors(
    before: tuple[int, ...], after: tuple[int, ...], expected: str
) -> None:
    found = Factors()
    left, right = gcd_chain(before, after, found)
    assert str(found.rule([left], [right])).partition(";")[0] == expected


def test_only_factors_that_come_first_on_both_sides_can_be_sharded() -> None:
    found = Factors()
    left, right = gcd_chain((6, 4), (4, 6), found)
    assert found.rule([left], [right]).shardable == (0,)


def test_reshape_of_nothing_stays_whole() -> None:
    rule = rule_for(Op("reshape", ("%x",), (value("f32[8,0]"),)), [value("f32[0,4]")])
    assert rule.shardable == ()


@pytest.mark.parametrize(
    ("old", "new", "linear"),
    [
        ("bf16[4]", "f32[4]", ((0,),)),
        ("f32[4]", "f32[4]", ((0,),)),
        ("f32[4]", "bf16[4]", ()),
        ("f16[4]", "bf16[4]", ()),
        ("f32[4]", "i32[4]", ()),
        ("i32[4]", "f32[4]", ()),
    ],
)
def test_partial_sums_may_only_widen(old: str, new: str, linear: object) -> None:
    op = Op("convert_element_type", ("%x",), (value(new),))
    assert rule_for(op, [value(old)]).linear == linear


@pytest.mark.parametrize(
    ("fill", "linear"), [("0.0", ((0,),)), ("-0.0", ((0,),)), ("1.0", ()), ("opaque", ())]
)
def test_padding_keeps_partial_sums_only_with_zeros(fill: str, linear: object) -> None:
    params: tuple[tuple[str, Plain], ...] = (("padding_config", ((1, 1, 0),)),)
    op = Op("pad", ("%x", Literal(fill, "f32")), (value("f32[6]"),), params)
    assert rule_for(op, [value("f32[4]"), value("f32[]")]).linear == linear


def test_booleans_combine_by_or() -> None:
    op = Op("reduce_max", ("%x",), (value("bool[]"),), (("axes", (0,)),))
    assert rule_for(op, [value("bool[8]")]).factors == (Factor(8, Kind.REDUCE, "or"),)
