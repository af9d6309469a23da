"""A planned step over several processes of this machine, as one function of host arrays.

this process   arguments --> rank 0, rank 1, ...   each runs its part of the step
               results   <-- the pieces that each has on its devices, put together
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Any

import jax
import numpy as np

from autopar.errors import VerifyError
from autopar.frontend.trace.arguments import StepSpec, join_static, split_static
from autopar.runtime.bind import is_key
from autopar.runtime.pieces import StackedPieces
from autopar.runtime.validation.steps import FlatStep, packed, unpacked

# Each process finds modules where this one does; nothing else of it is taken over.
_START = "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from {0} import {1}; {1}()"
_TOLD = 3000  # characters of what a process said, in an error


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
        parts: Sequence[Any] = leaf.pieces if isinstance(leaf, StackedPieces) else (leaf,)
        impl = str(jax.random.key_impl(parts[0])) if is_key(parts[0].dtype) else ""
        numbers = [jax.random.key_data(p) if impl else p for p in parts]
        held: list[tuple[Any, Any]] = []
        first = 0
        for part in numbers:
            for shard in part.addressable_shards:
                rows, *rest = shard.index or (slice(None),)
                if part.ndim:
                    start, stop, _ = rows.indices(part.shape[0])
                    rows = slice(first + start, first + stop)
                held.append(((rows, *rest) if part.ndim else (), np.asarray(shard.data)))
            first += part.shape[0] if part.ndim else 0
        shape = (first, *numbers[0].shape[1:]) if numbers[0].ndim else ()
        return cls(impl, shape, numbers[0].dtype, tuple(held))


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
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a step may print
    tree = jax.tree_util.tree_structure(split_static(spec, args, kwargs))
    while True:
        try:
            leaves = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        dynamic = jax.tree_util.tree_unflatten(tree, [unpacked(leaf) for leaf in leaves])
        given, named = join_static(spec, args, kwargs, dynamic)
        made = jax.tree_util.tree_leaves(step(*given, **named))
        pickle.dump([Pieces.of(leaf) for leaf in made], answers)
        answers.flush()


@contextmanager
def over_processes(count: int, module: str, main: str, words: Sequence[str]) -> Generator[FlatStep]:
    """The step that `main` of a module serves, in so many processes, while this lasts.

    Each is called with `words`, its number, the number of all, and the port of the first.
    Calls raise VerifyError where a process gave up.
    """
    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = _START.format(module, main)
    with tempfile.TemporaryDirectory(prefix="autopar-ranks-") as name:
        logs = [Path(name) / f"stderr{n}.txt" for n in range(count)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for n, log in enumerate(logs):
                own = [*words, str(n), str(count), str(port)]
                command = [sys.executable, "-P", "-c", program, json.dumps(sys.path), *own]
                with log.open("wb") as said:
                    pipe = subprocess.PIPE
                    ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said))
            yield lambda leaves: _asked(ranks, logs, leaves)
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.communicate()


def _asked(
    ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], leaves: Sequence[Any]
) -> list[Any]:
    """The results of a step, from the pieces of all processes."""
    found: list[list[Pieces]] = []
    given = pickle.dumps([packed(leaf) for leaf in leaves])
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(given)
            rank.stdin.flush()
        for rank in ranks:
            assert rank.stdout is not None
            found.append(pickle.load(rank.stdout))
    except (OSError, EOFError, pickle.UnpicklingError):
        number = len(found)
        said = logs[number].read_text(errors="replace").strip()
        raise VerifyError(
            f"the planned step did not run in process {number} of {len(ranks)}:\n{said[-_TOLD:]}"
        ) from None
    return [whole(own) for own in zip(*found, strict=True)]
