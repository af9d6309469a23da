"""Profiles: what is read, what is refused and how, and the chain that stages are cut from."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.ir.profile import Profile, ProfileLayer
from autopar.ir.profile_file import load_profile, profile_from_json, profile_to_json, save_profile


def layer(called: str, **changed: Any) -> dict[str, Any]:
    """A layer as JSON has it; a change to None leaves the key out."""
    entry = {
        "name": called, "op": "Linear", "forward_ms": 1.0, "backward_ms": 2.0,
        "activation_bytes": 10, "parameter_bytes": 100,
    }  # fmt: skip
    return {k: v for k, v in {**entry, **changed}.items() if v is not None}


def data(*layers: Any, edges: Any = ()) -> dict[str, Any]:
    return {"model": "toy", "layers": list(layers), "edges": list(edges)}


def read(given: Any) -> Profile:
    return profile_from_json(json.dumps(given), "toy.json")


def test_the_text_is_read_back_as_it_was() -> None:
    profile = read(data(layer("a", op="Conv"), layer("b"), edges=[["a", "b"]]))
    assert profile.edges == (("a", "b"),)
    assert profile.layers[0] == ProfileLayer("a", "Conv", 1.0, 2.0, 10, 100)
    assert read(json.loads(profile_to_json(profile))) == profile
    assert profile_to_json(read(json.loads(profile_to_json(profile)))) == profile_to_json(profile)


def test_a_saved_profile_is_loaded(tmp_path: Path) -> None:
    profile = read(data(layer("a"), layer("b"), edges=[["a", "b"]]))
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    with pytest.raises(InputError, match="cannot write"):
        save_profile(profile, tmp_path / "no" / "p.json")


def test_notes_are_read_past_and_whole_floats_are_bytes() -> None:
    given = data({**layer("a", activation_bytes=4.0, op=None), "colour": "red"})
    profile = read({**given, "units": {}, "seen": [1], "source": {"project": "x"}})
    assert profile.layers[0].activation_bytes == 4
    assert profile.layers[0].op == ""
    assert "project" in profile.source


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1], "it is not an object with 'layers' and 'edges'"),
        ({"edges": []}, "'layers' is missing"),
        ({"layers": [layer("a")]}, "'edges' is missing"),
        ({"layers": {}, "edges": []}, "'layers' is not a list"),
        (data(), "it has no layers"),
        ({**data(layer("a")), "model": 3}, "'model' is 3"),
        (data(layer("a"), "b"), 'layer 2 is "b", not an object'),
        (data(layer("a", name=None)), "layer 1 has no name"),
        (data(layer("a", op=7)), "layer 1, 'a': op is 7"),
        (data(layer("a", forward_ms=None)), "layer 1, 'a': forward_ms is missing"),
        (data(layer("a", backward_ms="2")), "layer 1, 'a': backward_ms is \"2\"; give"),
        (data(layer("a", backward_ms=True)), "backward_ms is true"),
        (data(layer("a", parameter_bytes=1.5)), "parameter_bytes is 1.5; give a whole number"),
        (data(layer("a", forward_ms=-0.5)), "layer 1, 'a': forward_ms is -0.5"),
        (data(layer("a", forward_ms=float("nan"))), "forward_ms is nan"),
        (data(layer("a", activation_bytes=float("inf"))), "activation_bytes is inf"),
        (data(layer("a", activation_bytes=10**400)), "activation_bytes is 1000"),
        (data(layer("a"), layer("b"), layer("a")), "layers 1 and 3 are both named 'a'"),
        (data(layer("a"), edges=[["a"]]), "edge 1 is [\"a\"]; give [producer, consumer]"),
        (data(layer("a"), edges=[["a", "z"]]), "edge 'a' -> 'z': no layer is named 'z'"),
        (data(layer("a"), edges=[["a", "a"]]), "edge 'a' -> 'a' goes from a layer to itself"),
        (
            data(layer("a"), layer("b"), edges=[["b", "a"]]),
            "edge 'b' -> 'a' goes backwards, from layer 2 to layer 1: list the layers in",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        read(given)
    assert told in str(caught.value)
    assert str(caught.value).startswith("toy.json cannot be used:")


def test_every_fault_is_listed() -> None:
    wrong = data(layer("a", forward_ms=-1), layer("b", backward_ms=-2), edges=[["b", "a"]])
    with pytest.raises(InputError) as caught:
        read(wrong)
    told = str(caught.value)
    assert told.count("\n* ") == 3
    assert "layer 2, 'b': backward_ms is -2" in told


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no JSON"):
        profile_from_json(text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read profile .*: No such file"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="it is no text"):
        load_profile(tmp_path / "binary.json")


def test_inputs_and_unused_items_are_not_of_the_chain() -> None:
    profile = read(
        data(
            layer("in", op="Input0"), layer("a"), layer("late", op="Input"),
            layer("item", op="__getitem__(0)"), layer("used", op="__getitem__(1)"), layer("b"),
            edges=[["in", "a"], ["a", "late"], ["a", "item"], ["a", "used"], ["used", "b"]],
        )
    )  # fmt: skip
    assert [x.name for x in profile.chain().layers] == ["a", "late", "used", "b"]
    with pytest.raises(InputError, match="only Input layers"):
        read(data(layer("in", op="Input"))).chain()


def test_a_tensor_counts_once_in_each_cut_that_it_crosses() -> None:
    profile = read(
        data(
            layer("a", activation_bytes=1), layer("b", activation_bytes=10),
            layer("c", activation_bytes=100), layer("d", activation_bytes=1000),
            edges=[["a", "b"], ["a", "d"], ["a", "d"], ["b", "c"], ["b", "d"]],
        )
    )  # fmt: skip
    # c has no reader, so nothing of it is sent.
    assert profile.chain().cut_bytes == (1, 11, 11, 0)


@st.composite
def graphs(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(1, 8))
    ops = st.sampled_from(["Linear", "Input", "__getitem__(0)"])
    layers = tuple(
        ProfileLayer(f"n{i}", draw(ops), 1.0, 1.0, draw(st.integers(0, 9)), 0) for i in range(count)
    )
    pairs = [(f"n{i}", f"n{j}") for j in range(count) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    return Profile("random", layers, tuple(edges))


@given(graphs())
def test_cuts_are_as_they_are_defined(profile: Profile) -> None:
    fed, consumed = {b for _, b in profile.edges}, {a for a, _ in profile.edges}
    kept = [
        x
        for x in profile.layers
        if (x.op != "Input" or x.name in fed) and (x.op[0] != "_" or x.name in consumed)
    ]
    if not kept:
        return
    names = [x.name for x in kept]
    cuts = [
        sum(
            x.activation_bytes
            for x in kept[: i + 1]
            if any((x.name, later) in profile.edges for later in names[i + 1 :])
        )
        for i in range(len(kept))
    ]
    assert list(profile.chain().cut_bytes) == cuts
