"""Paths that differ in numbers as one, what several are in, and the module of a parameter."""

import pytest

from autopar.ir.paths import enclosing_path, module_of, ranged_path


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["layers/3/mlp"], "layers/3/mlp"),
        (["layers/3/mlp", "layers/4/mlp", "layers/5/mlp"], "layers/3..5/mlp"),
        (["scan[9]", "scan[10]"], "scan[9..10]"),
        (["q/1", "q/6"], "q/1,6"),
        (["q/1", "q/3", "q/5", "q/8"], "q/*"),
    ],
)
def test_numbers_in_a_row_are_a_range(paths: list[str], said: str) -> None:
    assert ranged_path(paths) == said


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["layers/3", "layers/3/mlp"], "layers/3"),
        (["layers/3", "layers/33"], "layers"),
        (["q/3", "k/3"], ""),
        ([], ""),
    ],
)
def test_what_several_are_in(paths: list[str], said: str) -> None:
    assert enclosing_path(paths) == said


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("net/block/0/kernel/value", "block/0"),
        ("state/params/mlp/w", "mlp"),
        ("state/params/head", "head"),
        ("state/w", "w"),
        ("w", "w"),
    ],
)
def test_the_module_of_a_parameter(path: str, said: str) -> None:
    assert module_of(path) == said
