"""Plans as others' rules, and others' rules as pins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.exporting.rules import (
    Dims,
    Rules,
    axes_by_rules,
    logical_rules,
    path_rules,
    pins_from,
    read_rules,
)
from autopar.frontend import StepSpec
from autopar.frontend.trace.logical import logical_names
from autopar.ir.plan import Argument
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Input, Role, Value

AXES = ("x", "y", "z")
NAMES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True).map(tuple)
CHOSEN = st.lists(st.sampled_from(AXES), max_size=2, unique=True).map(tuple)


def argument(path: str, dims: Dims, size: int = 8) -> Argument:
    return Argument(path, (size,) * len(dims), "f32", "state", Sharding(dims))


@given(rules=st.lists(st.tuples(st.sampled_from("abcde"), CHOSEN), max_size=8), names=NAMES)
def test_rules_mean_what_flax_means(
    rules: list[tuple[str, tuple[str, ...]]], names: tuple[str, ...]
) -> None:
    theirs = nn.logical_to_mesh_axes(names, tuple((n, axes or None) for n, axes in rules))
    entries = (None, *theirs)[1:] if theirs is not None else ()
    wanted = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
    assert axes_by_rules(rules, names) == wanted


def test_a_name_that_lies_alike_everywhere_is_one_rule() -> None:
    up, down = argument("up", (("x",), ("y",))), argument("down", (("y",), ("x",)))
    found = logical_rules([up, down], {"up": ("embed", "mlp"), "down": ("mlp", "embed")})
    assert found.rules == (("embed", ("x",)), ("mlp", ("y",)))
    assert not found.conflicts


def test_a_second_rule_counts_where_the_first_ones_axes_are_taken() -> None:
    big = argument("big", (("x",), ()), 64)
    small = argument("small", (("y",), ("x",)))
    names = {"big": ("embed", "kv"), "small": ("embed", "experts")}
    found = logical_rules([big, small], names)
    assert not found.conflicts
    for a in (big, small):
        assert axes_by_rules(found.rules, names[a.path]) == a.sharding.dims


def test_what_rules_cannot_say_is_named() -> None:
    big, small = argument("big", (("x",), ()), 64), argument("small", ((), ()))
    names = {"big": ("embed", "kv"), "small": ("embed", "kv")}
    (conflict,) = logical_rules([big, small], names).conflicts
    assert (conflict.path, conflict.planned, conflict.ruled) == ("small", ((), ()), (("x",), ()))


PATHS = st.lists(
    st.lists(
        st.sampled_from(["mu", "nu", "layer_0", "layer_1", "w", "b.c"]), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=12,
    unique_by=tuple,
)


@given(paths=PATHS, data=st.data())
def test_path_rules_lay_every_argument_out_as_planned(
    paths: list[list[str]], data: st.DataObject
) -> None:
    dims = st.sampled_from([((),), (("x",),), (("y",),)])
    held = [argument("s/" + "/".join(path), data.draw(dims)) for path in paths]
    rules = path_rules(held)
    for a in held:
        first = next(dims for pattern, dims in rules if re.search(pattern, a.path))
        assert (first or ((),)) == a.sharding.dims


def test_layers_that_lie_alike_are_one_rule() -> None:
    held = [argument(f"state/params/layer_{i}/wq/kernel", ((), ("x",))) for i in range(12)]
    held += [argument(f"state/params/layer_{i}/wo/kernel", (("x",), ())) for i in range(12)]
    assert [pattern for pattern, _ in path_rules(held)] == [
        "(^|/)wo/kernel$",
        "(^|/)wq/kernel$",
        ".*",
    ]


MAXTEXT = """
base_config: "base.yml"
mesh_axes: ['data', 'fsdp', 'tensor']
logical_axis_rules: [
                      ['activation_batch', ['data', 'fsdp']],  # rows
                      # weights
                      ['mlp', ['fsdp_transpose', 'tensor']],
                      ['embed', ['fsdp', 'fsdp_transpose']],
                      ['embed', ['fsdp']],
                      ["kv", []],
                    ]
data_sharding: [['data']]
"""


def test_maxtext_rules_are_read(tmp_path: Path) -> None:
    path = tmp_path / "base.yml"
    path.write_text(MAXTEXT, encoding="utf-8")
    rules = read_rules(path)
    assert rules.logical[1:] == (
        ("mlp", ("fsdp_transpose", "tensor")),
        ("embed", ("fsdp", "fsdp_transpose")),
        ("embed", ("fsdp",)),
        ("kv", ()),
    )
    inputs = [
        Input(Value("%0", (8, 6), "f32"), Role.STATE, "w"),
        Input(Value("%1", (8,), "f32"), Role.STATE, "scale"),
    ]
    mesh = MeshShape(("fsdp", "tensor"), (2, 4))
    found = pins_from(rules, inputs, {"w": ("embed", "mlp")}, mesh)
    # mlp comes first and takes fsdp_transpose, so that embed's second rule counts.
    assert found.pins == (("w", (("fsdp",), ())),)
    assert [text.split(":")[0] for text in found.unplaced] == [
        "the mesh (fsdp=2, tensor=4) has no axis data, fsdp_transpose",
        "w f32[8,6]",
        "scale f32[8]",
    ]


def test_the_same_rules_in_other_files(tmp_path: Path) -> None:
    dashes = "logical_axis_rules:\n  - ['embed', 'x']\n  - ['mlp', null]\nother: 1\n"
    python = 'import os\nRULES = [("embed", "x"), ("mlp", None)]\nos.abort()\n'
    for name, text in {
        "r.yaml": dashes,
        "r.py": python,
        "r.json": json.dumps([["embed", "x"], ["mlp", None]]),
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_rules(tmp_path / name) == Rules((("embed", ("x",)), ("mlp", ())), ())


@pytest.mark.parametrize(
    ("name", "text"),
    [("r.yml", "x: 1"), ("r.yml", "logical_axis_rules: [['a', 'b']"), ("r.py", "x = 1"),
     ("r.py", 'R = [("[", P())]'), ("r.json", "{"), ("r.txt", "")],
)  # fmt: skip
def test_files_without_rules_are_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=name):
        read_rules(tmp_path / name)


def test_names_stand_on_flax_boxes() -> None:
    init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed", "mlp"))
    dense = nn.Dense(8, kernel_init=init)
    state = jax.eval_shape(dense.init, jax.random.key(0), jnp.ones((2, 4)))

    def step(state: object, batch: jax.Array) -> object:
        del batch
        return state

    names = logical_names(StepSpec(step), (state, jnp.ones((2, 4))), {})
    assert names == {"state/params/kernel/value": ("embed", "mlp")}
