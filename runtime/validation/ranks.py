"""A planned step over several processes of this machine, as one function of host arrays.

this process   arguments --> rank 0, rank 1, ...   each runs its part of the step
               results   <-- the pieces that each has on its devices, put together
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from socket import create_server
from typing import Any

import jax
import numpy as np

from autopar.errors import VerifyError
from autopar.frontend.trace.arguments import StepSpec, join_static, split_static
from autopar.runtime.bind import is_key
from autopar.runtime.pieces import box_in_whole, pieces_of, with_first_rows
from autopar.runtime.validation.remote import answer_calls, asked_processes
from autopar.runtime.validation.steps import FlatStep, unpacked


@dataclass(frozen=True)
class Pieces:
    """The pieces of an array that a process has: boxes of numbers, and the kind of keys or ""."""

    impl: str
    shape: tuple[int, ...]
    dtype: Any
    held: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(cls, leaf: Any) -> Pieces:
        """The pieces of an array, or of rows on several submeshes."""
        parts = pieces_of(leaf)
        impl = str(jax.random.key_impl(parts[0])) if is_key(parts[0].dtype) else ""
        numbers = [jax.random.key_data(p) if impl else p for p in parts]
        held = tuple(
            (box_in_whole(shard.index, part.shape, first), np.asarray(shard.data))
            for part, first in with_first_rows(numbers)
            for shard in part.addressable_shards
        )
        shape = (*leaf.shape, *numbers[0].shape[leaf.ndim :])
        return cls(impl, shape, numbers[0].dtype, held)


def whole(pieces: Sequence[Pieces]) -> Any:
    """An array from what all processes have of it; raises VerifyError where some is missing."""
    made, known = np.zeros(pieces[0].shape, pieces[0].dtype), np.zeros(pieces[0].shape, bool)
    for own in pieces:
        for box, numbers in own.held:
            made[box], known[box] = numbers, True
    if not known.all():
        raise VerifyError(
            f"no process has {int((~known).sum())} of {known.size} numbers of a result"
        )
    return unpacked((pieces[0].impl, made))


def serve(step: Callable[..., Any], spec: StepSpec, args: Sequence[Any], kwargs: Any) -> None:
    """Answer with this process's pieces of the step's results, until nobody asks.

    Arguments come on stdin, and of `args` only the trees count.
    """
    tree = jax.tree_util.tree_structure(split_static(spec, args, kwargs))

    def run(leaves: list[Any]) -> list[Pieces]:
        given, named = join_static(spec, args, kwargs, jax.tree_util.tree_unflatten(tree, leaves))
        return [Pieces.of(leaf) for leaf in jax.tree_util.tree_leaves(step(*given, **named))]

    answer_calls(run)


@contextmanager
def over_processes(count: int, module: str, main: str, words: Sequence[str]) -> Generator[FlatStep]:
    """The step that `main` of a module serves, in so many processes, while this lasts.

    Each is called with `words`, its number, the number of all, and the port of the first.
    Calls raise VerifyError where a process gave up.
    """
    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own = [[*words, str(n), str(count), str(port)] for n in range(count)]
    where = [f"in process {n} of {count}" for n in range(count)]
    with asked_processes(module, main, own, where) as ask:
        yield lambda leaves: [whole(pieces) for pieces in zip(*ask(leaves), strict=True)]
