"""Lists whose entries repeat with other numbers: what is written once, and what is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.repeats import fold, fold_lines, unfold, unfold_lines

LAYERS = 40


@pytest.fixture(scope="module")
def model() -> list[str]:
    order = sorted(range(LAYERS), key=str)
    text = ["graph step("]
    for n, i in enumerate(order):
        text += [f'  %{2 * n + k}: f32[8]  state "layer{i}/w{k}",' for k in range(2)]
    first = 2 * LAYERS
    for i in range(LAYERS):
        weight, at = 2 * order.index(i), first + 3 * i
        text.append(f"  %{at}: f32[8] = mul(%{weight}, %{at - 1})  # m.py:7")
        text.append(f'  %{at + 1}: f32[8] = tanh(%{at})  forward "layer{i}/act"')
        text.append(f"  %{at + 2}: f32[8] = add(%{weight + 1}, %{at + 1})")
    return [*text, "}"]


def blocks(folded: list[Any]) -> list[Any]:
    return [entry for entry in folded if isinstance(entry, dict)]


def test_layers_are_written_once_with_the_names_that_change(model: list[str]) -> None:
    folded = fold_lines(model)
    assert unfold_lines(folded) == model
    (layer,) = (b for b in blocks(folded) if "tanh" in json.dumps(b))
    assert len(layer["of"]) == 3
    assert layer["times"] >= LAYERS - 2
    # Values grow by three a layer, its number by one; weights are in the order of names as texts.
    kinds = {name: type(step) for name, step in layer["by"].items()}
    assert sorted(map(str, layer["by"].values()))[:2] == ["1", "3"]
    assert [*kinds.values()].count(list) == 1
    assert len(json.dumps(folded)) < 0.5 * len(json.dumps(model))


def test_what_is_short_or_grows_alone_is_left_as_it_is() -> None:
    short = [f"%{n}: f32[8] = mul(%{n - 1}, %{n - 2})" for n in range(100)]
    assert fold_lines(short) == short
    apart = [f"op{chr(97 + n % 26)}{'x' * n}" for n in range(300)]
    assert fold_lines(apart) == apart


def test_entries_repeat_with_their_own_numbers() -> None:
    values: list[Any] = [[f"%{n}", (0, 3, 3, 1)[n % 4]] for n in range(7, 1007)]
    folded = fold(values)
    assert unfold(folded) == values
    (block,) = blocks(folded)
    assert (len(block["of"]), block["times"], block["by"]) == (4, 250, {"a": 4})
    assert block["of"][1] == ["%8~a", 0]
    paths: list[Any] = [[[n], [n % 3]] for n in range(300)]
    assert unfold(fold(paths)) == paths
    assert blocks(fold(paths))[0]["of"][0] == [["0~a"], [0]]
    devices: list[Any] = [*range(4096)]
    assert fold(devices) == [{"times": 4096, "of": ["0~a"], "by": {"a": 1}}]
    assert unfold(fold(devices)) == devices


ENTRY = st.recursive(
    st.one_of(
        st.integers(-5, 2000), st.none(), st.booleans(), st.floats(0, 9, width=16),
        st.sampled_from(["%7", "%7~a", "x/3/y", "layer3_", "7", "07/", "7~a", 'a"3~b"', "%s", "é"]),
    ),
    lambda inner: st.lists(inner, max_size=3), max_leaves=4,
)  # fmt: skip


@settings(max_examples=12)
@given(st.lists(ENTRY, min_size=1, max_size=5), st.integers(30, 110), st.integers(0, 3))
def test_whatever_repeats_comes_back(block: list[Any], times: int, step: int) -> None:
    def later(entry: Any, n: int) -> Any:
        if isinstance(entry, list):
            return [later(e, n) for e in entry]
        if isinstance(entry, int) and not isinstance(entry, bool):
            return entry + step * n
        return entry.replace("7", str(7 + step * n)) if isinstance(entry, str) else entry

    entries = [later(entry, n) for n in range(times) for entry in block]
    assert unfold(json.loads(json.dumps(fold(entries)))) == entries
    texts = [str(entry).replace("\n", "") for entry in entries]
    assert unfold_lines(json.loads(json.dumps(fold_lines(texts)))) == texts


GOOD: dict[str, Any] = {"times": 3, "of": ["%5~a: f32[8]"], "by": {"a": 1}}


@pytest.mark.parametrize(
    "change",
    [
        {"times": 10**9}, {"times": -1}, {"times": True}, {"times": "3"}, {"of": []}, {"of": "x"},
        {"of": [7]}, {"by": []}, {"by": {}}, {"by": {"a": 1.5}}, {"by": {"a": [1]}},
        {"by": {"a": [1, 2, 3]}}, {"by": {"a": [1, None]}}, {"by": {"a": 2**70}},
    ],
)  # fmt: skip
def test_a_repetition_that_is_none_is_refused(change: dict[str, Any]) -> None:
    assert unfold_lines([GOOD]) == ["%5: f32[8]", "%6: f32[8]", "%7: f32[8]"]
    with pytest.raises(ValueError, match="repetition"):
        unfold_lines([{**GOOD, **change}])


def test_a_small_file_asks_for_no_more_than_there_may_be() -> None:
    many = {**GOOD, "times": 2**23}
    with pytest.raises(ValueError, match="more than"):
        unfold_lines([many, many, many])


def test_no_entry_is_made_where_another_repetition_is_none() -> None:
    """Negative times make no room for what others ask for."""
    comes_first = {**GOOD, "by": {}}  # refused by another sentence, once its entries are made
    with pytest.raises(ValueError, match="1 entries -8 times"):
        unfold_lines([comes_first, {**GOOD, "times": -8}])
