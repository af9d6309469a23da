"""A step out of another package, run plain and planned, and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import autopar

ROWS = 16
WAYS: Mapping[str, Mapping[str, Any]] = {
    "auto": {},
    "forced": {"mesh": (2, 4), "method": "fsdp+tp"},
    "microbatches": {"mesh": (2, 4), "microbatches": 2},
    "stages": {"stages": 2, "microbatches": 2},
}


@dataclass(frozen=True)
class Refusal:
    """What a way says that cannot be: the class of the error and a part of its text."""

    kind: type[Exception]
    told: str


@dataclass(frozen=True)
class Other:
    """A step `(state, batch) -> (state, metrics)`, what makes its state, and its batches.

    `plain` is what its users put around it. `in_place` steps change their state and return metrics
    alone; their state is a tuple of arguments. `rtol` is relative to a leaf's largest item.
    """

    step: Callable[..., Any]
    create: Callable[[], Any]
    batch: Callable[[int], Any]
    plain: Callable[[Any], Any] = jax.jit
    in_place: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    refusals: Mapping[str, Refusal] = field(default_factory=dict[str, Refusal])
    rtol: float = 2e-4


def ran(case: Other, fun: Callable[..., Any], steps: int = 2) -> Any:
    """State and metrics after some steps of the function."""
    state, metrics = case.create(), []
    for i in range(steps):
        if case.in_place:
            metrics.append(fun(*state, case.batch(i)))
        else:
            state, found = fun(state, case.batch(i))
            metrics.append(found)
    return state, metrics


def planned(case: Other, way: str) -> autopar.ParallelStep[..., Any]:
    """The parallel step of a case under one of the ways."""
    found = autopar.parallelize(case.step, cluster="8xcpu", **WAYS[way], **case.options)
    assert isinstance(found, autopar.ParallelStep)
    return found


def expected(case: Other) -> Any:
    """What its users get."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        return ran(case, case.plain(case.step))


def check_same(found: Any, wanted: Any, rtol: float) -> None:
    """Both trees have one structure, and their arrays are equal but for rounding."""
    left, right = _arrays(found), _arrays(wanted)
    assert left.keys() == right.keys()
    for path, have in left.items():
        want = right[path]
        assert have.shape == want.shape, path
        assert have.dtype == want.dtype, path
        if np.issubdtype(want.dtype, np.inexact):
            assert np.array_equal(np.isfinite(have), np.isfinite(want)), path
            scale = float(np.max(np.abs(np.where(np.isfinite(want), want, 0)), initial=1e-3))
            np.testing.assert_allclose(have, want, rtol=0, atol=rtol * scale, err_msg=path)
        else:
            np.testing.assert_array_equal(have, want, err_msg=path)


def _arrays(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays and numbers of a tree by path; what stages keep apart is put together."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    held = {p: x for p, x in leaves if isinstance(x, float | int) or hasattr(x, "dtype")}
    return {jax.tree_util.keystr(path): _on_host(leaf) for path, leaf in held.items()}


def _on_host(leaf: Any) -> np.ndarray[Any, Any]:
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def rows(width: int, seed: int = 0, count: int = ROWS, scale: float = 1.0) -> Any:
    """Rows of floats."""
    drawn = np.random.default_rng(seed).standard_normal((count, width)) * scale
    return drawn.astype(np.float32)


def tokens(length: int, most: int, seed: int = 0, count: int = ROWS) -> Any:
    """Rows of token numbers."""
    drawn = np.random.default_rng(seed).integers(0, most, (count, length))
    return drawn.astype(np.int32)
