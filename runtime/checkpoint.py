"""Checkpoints of a step's state with Orbax, written under one plan and read under any other.

A checkpoint has each leaf of the user's tree whole, under the user's own path, in Orbax's format. A
process writes the pieces that it keeps and reads the pieces that it needs; nothing is gathered:

    two stages, a process each        the array on disk         one mesh of four devices
    process 0 keeps rows 0:4   --->   rows 0:4, a chunk   --->   devices 0 and 1 read 0:2 and 2:4
    process 1 keeps rows 4:8   --->   rows 4:8, a chunk   --->   devices 2 and 3 read 4:6 and 6:8

Orbax's own handler of arrays refuses leaves that live on one process of several, and knows no stack
in pieces. The one here stands in its place, under the same CheckpointManager: when to save, how
many to keep, writing in the background, and the commit by which a checkpoint is there or is not.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import future, type_handlers

from autopar.errors import ArgumentError, CheckpointError, bulleted
from autopar.ir.text import show_bytes
from autopar.runtime.bind import is_key, without_pieces, words_of
from autopar.runtime.pieces import StackedPieces, box_in_whole, pieces_of, with_first_rows
from autopar.runtime.place import deleted

STATE, RECORD = "state", "autopar"  # the items of a checkpoint
_SHOWN = 6  # differences that a message names
_CHUNKS = 64  # that a leaf should have at least, of these bytes each, least and most
_CHUNK_BYTES = 2**16, 2**20
_COMMIT_BYTES, _TYPE_BYTES = 2**16, 2**10  # on disk, of a checkpoint and of each leaf beside that
_BATCH_BYTES = 256 * 2**20  # that a process reads at a time, beside what is on its devices


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read: the number of its step, the state, and what was saved beside it.

    `plan_hash` is the SHA-256 of the plan under which it was saved, "" where none is on record.
    """

    step: int
    state: Any
    extras: dict[str, Any]
    plan_hash: str


def save(
    manager: Any,
    number: int,
    state: Any,
    extras: Mapping[str, Any],
    plan_hash: Callable[[], str],
    force: bool,
) -> bool:
    """Save a state as step `number`; False where the manager's policy skips it.

    With `force` it is saved in any case, unless it is there already. The hash of the plan is asked
    for where something is saved, for it takes the plan's whole text.

    When this returns, the values have been copied to the host, so that a step may consume the
    state. They are written in the background if the manager does so. Raises ArgumentError where an
    array was deleted or `extras` hold no JSON, CheckpointError where the folder cannot be written.
    """
    gone = deleted(jax.tree_util.tree_leaves(state))
    if gone:
        path = list(_types(state))[gone[0]]
        raise ArgumentError(
            f"{path} of the state to save is deleted: a step consumed it. Save the state that the "
            "last step returned."
        )
    if manager.latest_step() == number if force else not manager.should_save(number):
        return False
    what = f"step {number} in {manager.directory}"
    record = {"plan_hash": plan_hash(), "extras": {k: _encoded(k, v) for k, v in extras.items()}}
    try:
        written = jax.tree_util.tree_map(_written, state)
        _check_folder(manager.directory, jax.tree_util.tree_leaves(written))
        saved = manager.save(
            number,
            force=True,
            args=ocp.args.Composite(
                **{
                    STATE: _StateSave(written),
                    RECORD: ocp.args.JsonSave(record),
                }
            ),
        )
    except (OSError, ValueError) as error:
        raise _unwritable(what, error) from error
    return bool(saved)


def _check_folder(folder: Any, leaves: Sequence[_Written]) -> None:
    """Raise OSError where a folder of this machine may not be written, or is too full for leaves.

    Orbax finds both out in the background: there it waits for minutes for a folder that cannot be
    made, and what it raises where a disk is full may name no file.
    """
    if "://" in str(folder):
        return
    effective = os.access in os.supports_effective_ids
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=effective):
        raise PermissionError("no right to write there")
    needed = _COMMIT_BYTES + sum(leaf.nbytes + _TYPE_BYTES for leaf in leaves)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it takes up to {show_bytes(needed)}, of which {show_bytes(free)} are free")


def restore(
    manager: Any, wanted: Any, number: int | None = None, planned: Sequence[str] = ()
) -> Restored | None:
    """The state of step `number`, else of the latest, laid out as the leaves of `wanted`.

    `wanted` has shapes, dtypes and shardings, as `ParallelStep.abstract_state` gives them. None
    where no checkpoint is there and none is asked for. Paths of state that are `planned` name the
    items of a tuple of states as the step's arguments. Raises CheckpointError where one cannot be
    read or is of another state; it names the folder, the leaf and what to do.
    """
    number = manager.latest_step() if number is None else number
    if number is None:
        return None
    folder = f"{manager.directory}/{number}"
    if number not in manager.all_steps():
        there = ", ".join(map(str, sorted(manager.all_steps()))) or "none"
        raise CheckpointError(
            f"{manager.directory} has no checkpoint of step {number} (there: {there})"
        )
    asked: dict[str, Any] = {
        STATE: _StateRestore(
            item=wanted,
            restore_args=jax.tree_util.tree_map(
                lambda leaf: _Wanted(leaf=leaf), wanted, is_leaf=_is_leaf
            ),
        )
    }
    if (manager.directory / str(number) / RECORD).exists():  # not where another program saved it
        asked[RECORD] = ocp.args.JsonRestore()
    try:
        found = manager.restore(number, args=ocp.args.Composite(**asked))
    except (OSError, ValueError, KeyError) as error:
        faults = _differences(manager.directory / str(number) / STATE, wanted, planned)
        if faults:
            remedy = "Restore it with the model and the optimizer that it was saved with"
        elif "registered handler" in str(error):  # of a manager that has saved it by other means
            faults = ["this manager has saved or read it with other arguments of Orbax"]
            remedy = "Restore it with a CheckpointManager of its own"
        else:
            remedy = "Its files are damaged, or cannot be reached: delete it"
        others = ", ".join(str(n) for n in sorted(manager.all_steps()) if n != number)
        other = f", or name another step (there: {others})" if others else ""
        raise CheckpointError(
            bulleted(
                f"{folder} cannot be read as the state of this step:",
                faults or [_first_lines(error)],
                f"{remedy}{other}.",
            )
        ) from error
    record = found.get(RECORD) or {}
    extras = {k: _decoded(v) for k, v in record.get("extras", {}).items()}
    return Restored(number, found[STATE], extras, record.get("plan_hash", ""))


def left_out(state: Any, planned: Sequence[str]) -> list[str]:
    """The planned paths of state of which a tree that is to be saved has nothing.

    An argument that is one array may have any name there: it is one of the leaves that are nothing
    else.
    """
    leaves = _types(state)
    there = {end for path in leaves for end in (path, _end(path))}
    missing = [path for path in planned if there.isdisjoint((path, _end(path)))]
    known = {end for path in planned for end in (path, _end(path))}
    others = sum(known.isdisjoint((path, _end(path))) for path in leaves)
    alone = [path for path in missing if "/" not in path]
    return [path for path in missing if path not in alone[:others]]


def _end(path: str) -> str:
    return path.partition("/")[2] or path


def _arguments_of(paths: Iterable[str], planned: Sequence[str]) -> dict[str, str]:
    """The argument of the step that each item of a tuple of states is, by the paths in common.

    restored (net, optimizer)   0/d1/kernel     1/step
    planned                     net/d1/kernel   optimizer/step
    """
    heads: dict[str, Counter[str]] = {}
    of = {_end(path): path.partition("/")[0] for path in planned}
    for path in paths:
        head, _, end = path.partition("/")
        if head.isdecimal() and end in of:
            heads.setdefault(head, Counter())[of[end]] += 1
    return {head: counts.most_common(1)[0][0] for head, counts in heads.items()}


def _differences(folder: Any, wanted: Any, planned: Sequence[str]) -> list[str]:
    """The leaves that a checkpoint or this step alone has, and those of two types."""
    try:
        there = _types(_StateHandler().metadata(folder).tree)
    except (OSError, ValueError, KeyError):
        return []  # the first error says it
    here = _types(wanted)
    names = _arguments_of(here, planned)

    def named(path: str) -> str:
        head, slash, end = path.partition("/")
        return f"{names.get(head, head)}{slash}{end}"

    faults = [
        f"{named(path)} is {there.get(path, 'not in the checkpoint')}"
        + (f", and {here[path]} in this step" if path in here else ", and not in this step")
        for path in sorted(there.keys() | here.keys())
        if there.get(path) != here.get(path)
    ]
    more = len(faults) - _SHOWN
    return [*faults[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _types(tree: Any) -> dict[str, str]:
    """The type of each leaf, as it is on disk, by its path."""
    found: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf):
        kind = _on_disk(leaf)
        dtype, sizes = jax.dtypes.canonicalize_dtype(kind.dtype), ",".join(map(str, kind.shape))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = f"{np.dtype(dtype).name}[{sizes}]"
    return found


def _first_lines(error: Exception, count: int = 4) -> str:
    return "\n".join(str(error).strip().splitlines()[:count])


def _unwritable(what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{what} cannot be written: {_first_lines(error, 2)}\nFree some space, or give the manager "
        "a folder that can be written. Checkpoints that were committed before are untouched."
    )


def _on_disk(leaf: Any) -> Any:
    """The shape and dtype that a leaf has on disk: those of its words where it is random keys."""
    if isinstance(leaf, complex | float | int):  # numbers of Python's
        leaf = np.asarray(leaf)
    return words_of(leaf) if is_key(leaf.dtype) else leaf


def _is_leaf(node: Any) -> bool:
    return isinstance(node, StackedPieces | ocp.metadata.ArrayMetadata)


# -- values beside the state ---------------------------------------------------------------------


def _encoded(name: str, value: Any) -> Any:
    """A value as JSON has it; a random key is its words and its kind."""
    if isinstance(value, jax.Array) and is_key(value.dtype):
        words = np.asarray(jax.random.key_data(value)).tolist()
        return {"key": str(jax.random.key_impl(value)), "words": words}
    if isinstance(value, Mapping):
        return {"of": {str(k): _encoded(f"{name}/{k}", v) for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [_encoded(f"{name}/{i}", v) for i, v in enumerate(value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ArgumentError(
        f"{name} among the extras is {type(value).__name__}: what goes beside the state is JSON "
        "(numbers, text, lists, mappings) or a random key. Put arrays in the state."
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_decoded, value))
    if not isinstance(value, dict):
        return value
    if "of" in value:
        return {k: _decoded(v) for k, v in value["of"].items()}
    words = jnp.asarray(value["words"], jnp.uint32)
    return jax.random.wrap_key_data(words, impl=value["key"])


# -- writing -------------------------------------------------------------------------------------

_Box = tuple[slice, ...]


@dataclass(frozen=True)
class _Written:
    """A leaf on its way to the disk: its whole type, and the parts that this process writes."""

    shape: tuple[int, ...]
    dtype: Any
    chunk: tuple[int, ...]
    parts: tuple[tuple[_Box, np.ndarray[Any, Any]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes."""
        return sum(part.nbytes for _, part in self.parts)


def _written(leaf: Any) -> _Written:
    """A leaf's parts, copied to the host: of replicas the first writes.

    Chunks on disk fit into the pieces of all devices, whoever has them: then no two processes write
    to one.
    """
    pieces = pieces_of(leaf)
    if not isinstance(pieces[0], jax.Array):  # a host array, or a number, that all processes have
        host = np.asarray(leaf)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
        whole = tuple(slice(0, n) for n in host.shape)
        own = ((whole, host),) if jax.process_index() == 0 else ()
        chunk = _chunk(host.shape, host.dtype.itemsize, [host.shape])
        return _Written(host.shape, host.dtype, chunk, own)
    words = [_words(piece) for piece in pieces]
    for piece in words:
        for shard in _first_replicas(piece):
            shard.data.copy_to_host_async()
    parts = tuple(
        (box_in_whole(shard.index, piece.shape, first), _host_copy(shard.data))
        for piece, first in with_first_rows(words)
        for shard in _first_replicas(piece)
    )
    shape, dtype = tuple(_on_disk(leaf).shape), words[0].dtype
    shapes = [piece.sharding.shard_shape(piece.shape) for piece in words]
    return _Written(shape, dtype, _chunk(shape, dtype.itemsize, shapes), parts)


def _words(piece: jax.Array) -> jax.Array:
    """Random keys as the words that they are."""
    if not is_key(piece.dtype):
        return piece
    if piece.addressable_shards:
        return jax.random.key_data(piece)
    words = words_of(piece)
    sharding: Any = piece.sharding
    return without_pieces(words.shape, words.dtype, sharding)


def _first_replicas(piece: jax.Array) -> Iterator[Any]:
    return (shard for shard in piece.addressable_shards if shard.replica_id == 0)


def _host_copy(data: jax.Array) -> np.ndarray[Any, Any]:
    """A device's piece on the host; on CPUs the host sees the memory that a step may consume."""
    is_view = next(iter(data.devices())).platform == "cpu"
    return np.array(data, copy=True) if is_view else np.asarray(data)


def _chunk(whole: Sequence[int], itemsize: int, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """A shape that divides all of these, small enough for whoever cuts the whole up otherwise.

    A chunk is read as a whole, so one that lies across the pieces of another plan is read for each:

        written by rows       read by columns       of chunks cut both ways a column has its own
        | c0 c0 c0 c0 |       | d0 | d1 | d2 |      | c0 | c1 | c2 |
        | c1 c1 c1 c1 |       | d0 | d1 | d2 |      | c3 | c4 | c5 |

    So of the largest shape that divides them, the dim that is cut least is cut again, until a leaf
    has some chunks along every dim.
    """
    found = [max(1, math.gcd(*sizes)) for sizes in zip(*shapes, strict=True)]
    enough = min(_CHUNK_BYTES[1], max(_CHUNK_BYTES[0], math.prod(whole) * itemsize // _CHUNKS))
    while math.prod(found) * itemsize > enough:
        dim = min((d for d, n in enumerate(found) if n > 1), key=lambda d: whole[d] // found[d])
        found[dim] //= next(k for k in range(2, found[dim] + 1) if found[dim] % k == 0)
    return tuple(found)


# -- reading -------------------------------------------------------------------------------------


@dataclass
class _Wanted(ocp.RestoreArgs):  # type: ignore[misc]
    """A leaf as it is wanted: shape, dtype and sharding, or those of the pieces of a stack."""

    restore_type: Any = _Written
    leaf: Any = None


class _Reader:
    """Reads one leaf: the boxes that this process's devices need, each once, and no others."""

    def __init__(self, store: Any, leaf: Any) -> None:
        self._store, self._leaf = store, leaf
        self._pieces = list(map(_on_disk, pieces_of(leaf)))
        self._shardings = [piece.sharding for piece in pieces_of(leaf)]
        self._boxes: list[dict[Any, _Box]] = []  # of each piece, by device
        placed = zip(with_first_rows(self._pieces), self._shardings, strict=True)
        for (piece, first), sharding in placed:
            here = sharding.addressable_devices_indices_map(piece.shape)
            own = {device: box_in_whole(box, piece.shape, first) for device, box in here.items()}
            self._boxes.append(own)
        self._needed = dict.fromkeys(map(_ends, (b for on in self._boxes for b in on.values())))

    @property
    def nbytes(self) -> int:
        """Bytes that this process reads."""
        item = np.dtype(self._pieces[0].dtype).itemsize
        return sum(item * math.prod(b - a for a, b in box) for box in self._needed)

    async def read(self) -> Any:
        """The leaf on its devices."""
        boxes = [tuple(slice(a, b) for a, b in box) for box in self._needed]
        arrays = await _all(self._store[box].read() for box in boxes)
        dtype = self._pieces[0].dtype
        data = {b: a.astype(dtype, copy=False) for b, a in zip(self._needed, arrays, strict=True)}
        made = [
            jax.make_array_from_single_device_arrays(
                piece.shape,
                sharding,
                [jax.device_put(data[_ends(box)], device) for device, box in on.items()],
                dtype=piece.dtype,
            )
            for piece, sharding, on in zip(self._pieces, self._shardings, self._boxes, strict=True)
        ]
        if is_key(self._leaf.dtype):
            made = [_as_keys(words, self._leaf) for words in made]
        return StackedPieces(tuple(made)) if isinstance(self._leaf, StackedPieces) else made[0]


def _ends(box: _Box) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in box)


def _as_keys(words: jax.Array, wanted: Any) -> Any:
    """Words as the random keys that are wanted."""
    if not words.addressable_shards:
        sharding: Any = words.sharding
        return without_pieces(words.shape[:-1], wanted.dtype, sharding)
    kinds: list[Any] = []
    kind = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype)
    jax.eval_shape(lambda keys: kinds.append(jax.random.key_impl(keys)), kind)
    return jax.random.wrap_key_data(words, impl=kinds[0])


# -- Orbax's side --------------------------------------------------------------------------------


class _LeafHandler(type_handlers.TypeHandler):  # type: ignore[misc]
    """Writes and reads leaves where Orbax has a handler of `jax.Array`, in the format of that."""

    _array_metadata_store = None  # Orbax asks: no file beside the arrays says how they are cut

    def typestr(self) -> str:
        """The name that Orbax's own handler has: without autopar it reads what this one wrote."""
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """Shapes and dtypes of arrays on disk."""
        stores = await _all(map(_opened, infos))
        return [
            ocp.metadata.ArrayMetadata(
                name=info.name,
                directory=info.parent_dir,
                shape=store.shape,
                sharding=None,
                dtype=store.dtype.numpy_dtype,
            )
            for info, store in zip(infos, stores, strict=True)
        ]

    async def serialize(
        self, values: Sequence[_Written], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Write in the background what is on the host already."""
        del args
        own = [(leaf, info) for leaf, info in zip(values, infos, strict=True) if leaf.parts]

        async def write() -> None:
            await _all(_write(*one) for one in own)

        return [future.CommitFutureAwaitingContractedSignals(write(), name="autopar_state")]

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """The leaves, as many at a time as the host should hold."""
        stores = await _all(map(_opened, infos))
        leaves = [wanted.leaf for wanted in args]
        for info, store, leaf in zip(infos, stores, leaves, strict=True):
            _check(info, store, leaf)
        made: list[Any] = []
        for batch in _batches([_Reader(s, leaf) for s, leaf in zip(stores, leaves, strict=True)]):
            made += await _all(reader.read() for reader in batch)
        return made


async def _write(leaf: _Written, info: Any) -> None:
    await info.await_path_creation()
    spec = type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=leaf.shape,
        local_shape=leaf.chunk,
        dtype=leaf.dtype,
        process_index=jax.process_index(),
    )
    try:
        store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        await _all(store[box].write(part) for box, part in leaf.parts)
    except (OSError, ValueError) as error:
        raise _unwritable(f"{info.name} in {info.parent_dir}", error) from error


async def _all(awaited: Iterable[Any]) -> list[Any]:
    """What each gives, once all have ended; raises what the first of those that failed raised."""
    ends = await asyncio.gather(*awaited, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return ends


async def _opened(info: Any) -> Any:
    spec = type_handlers.get_json_tspec_read(info, use_ocdbt=bool(info.is_ocdbt_checkpoint))
    return await ts.open(ts.Spec(spec), open=True, context=info.ts_context)


def _check(info: Any, store: Any, wanted: Any) -> None:
    """Raise ValueError where an array on disk is of another type than the leaf that is wanted."""
    expected = _on_disk(wanted)
    there = jax.dtypes.canonicalize_dtype(store.dtype.numpy_dtype)  # a Python number is 64 bits
    saved = np.dtype(there), tuple(store.shape)
    asked = np.dtype(expected.dtype), tuple(expected.shape)
    if saved != asked:
        (dtype, shape), (own, own_shape) = saved, asked
        raise ValueError(
            f"{info.name} is {dtype}{list(shape)} there, and {own}{list(own_shape)} in this step."
        )


def _batches(readers: Sequence[_Reader]) -> Iterator[list[_Reader]]:
    batch, nbytes = list[_Reader](), 0
    for reader in readers:
        if batch and nbytes + reader.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(reader)
        nbytes += reader.nbytes
    yield batch


class _StateHandler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of trees, with the leaves handled here."""

    def __init__(self) -> None:
        leaves = _LeafHandler()
        kinds = [(jax.Array, leaves), (_Written, leaves)]
        registry = type_handlers.create_type_handler_registry(*kinds)
        ocp.PyTreeCheckpointHandler.__init__(self, type_handler_registry=registry)


_registered: Callable[..., Any] = ocp.args.register_with_handler


@_registered(_StateHandler, for_save=True)
@dataclass
class _StateSave(ocp.args.PyTreeSave):  # type: ignore[misc]
    """The argument by which a manager finds the handler to save with."""


@_registered(_StateHandler, for_restore=True)
@dataclass
class _StateRestore(ocp.args.PyTreeRestore):  # type: ignore[misc]
    """The argument by which a manager finds the handler to restore with."""
