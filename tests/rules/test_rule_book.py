"""Rules that a user writes."""

from __future__ import annotations

import pytest

from autopar.errors import InputError
from autopar.ir.graph import Op
from autopar.ir.rule import Factor, Kind
from autopar.ir.values import Value
from autopar.rules.custom import RuleBook, parse_rule
from autopar.rules.table import rule_for

MATMUL = [Value("%x", (8, 4), "f32"), Value("%y", (4, 2), "f32")]
PRODUCT = (Value("%z", (8, 2), "f32"),)


@pytest.mark.smoke
def test_a_text_becomes_a_rule() -> None:
    rule = parse_rule("b k, k n -> b n; k:reduce; linear 0; linear 1", MATMUL, PRODUCT)
    assert rule.factors == (Factor(8), Factor(4, Kind.REDUCE), Factor(2))
    assert rule.operands == (((0,), (1,)), ((1,), (2,)))
    assert rule.results == (((0,), (2,)),)
    assert rule.linear == ((0,), (1,))
    assert str(rule) == "(a b, b c) -> (a c); b:reduce"


def test_scalars_whole_dims_and_dims_of_two_factors() -> None:
    operands = [Value("%x", (8, 6), "f32"), Value("%s", (), "f32")]
    rule = parse_rule(
        "[g c] ., - -> g c .; c:reduce-max", operands, (Value("%y", (4, 2, 6), "f32"),)
    )
    assert str(rule) == "([ab] [], -) -> (a b []); b:reduce-max"
    assert rule.factors == (Factor(4), Factor(2, Kind.REDUCE, "max"))


def test_sizes_that_shapes_do_not_tell_are_given() -> None:
    rule = parse_rule(
        "[g c] -> [g c]; g=4", [Value("%x", (8,), "f32")], (Value("%y", (8,), "f32"),)
    )
    assert rule.factors == (Factor(4), Factor(2))


def test_no_operands() -> None:
    assert str(parse_rule("-> a", [], (Value("%y", (8,), "f32"),))) == "() -> (a)"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b k, k n", "has no '->'"),
        ("b k -> b n", "has 1 operands, the op 2"),
        ("b k, k n -> b n, b", "has 2 results, the op 1"),
        ("b, k n -> b n", r"gives 1 dims to f32\[8,4\]"),
        ("b b, k n -> b n", "do not make 4"),
        ("b k, k n -> b n; k:shuffle", "'shuffle' is no kind"),
        ("b k, k n -> b n; k:reduce-mean", "'reduce-mean' is no kind"),
        ("b k, k n -> b n; q:reduce", r"says something of \['q'\]"),
        ("b k, k n -> b n; what", "'what' is not understood"),
        ("[b c] k, k n -> [b c] n", r"\['b', 'c'\] do not make 8"),
        ("b k, k n -> b n; linear 2", "'linear 2' does not number its operands from 0 to 1"),
        ("b k, k n -> b n; linear x", "'linear x' does not number its operands from 0 to 1"),
        ("b k, k n -> b n; k=four", "'k=four' is not understood"),
    ],
)
def test_texts_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_rule(text, MATMUL, PRODUCT)


@pytest.mark.smoke
def test_the_book_goes_before_the_table_and_the_target_before_the_name() -> None:
    book = RuleBook({"ffi_call:mine": "a b, b c -> a c; b:reduce", "ffi_call": "a ., . c -> a c"})
    mine = Op("ffi_call", ("%x", "%y"), PRODUCT, (("target_name", "mine"),))
    other = Op("ffi_call", ("%x", "%y"), PRODUCT, (("target_name", "other"),))
    assert str(rule_for(mine, MATMUL, book)) == "(a b, b c) -> (a c); b:reduce"
    assert str(rule_for(other, MATMUL, book)) == "(a [], [] b) -> (a b)"
    assert rule_for(mine, MATMUL).shardable == ()
