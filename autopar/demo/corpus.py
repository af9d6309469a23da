"""A corpus that is on every machine: the source text of Python's own standard library."""

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.errors import InputError

Text: TypeAlias = npt.NDArray[np.uint8]

# Installed packages differ from machine to machine, tests hold broken text on purpose, and the
# codecs are tables of numbers.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and the bytes of other files to be judged on."""

    train: Text
    held_out: Text


def load_corpus(limit: int = 6_000_000, root: Path | None = None) -> Corpus:
    """The `.py` files under `root` in order of their paths, up to about `limit` bytes.

    One file in ten is held out, chosen by a checksum of its path: the split depends on the
    Python release, and on nothing else.
    """
    folder = root or Path(sysconfig.get_path("stdlib"))
    train, held_out, total = bytearray(), bytearray(), 0
    for name, path in _python_files(folder):
        if total >= limit:
            break
        text = path.read_bytes()
        total += len(text)
        part = held_out if zlib.crc32(name.encode()) % 10 == 0 else train
        part += text
    if not train or not held_out:
        message = f"{folder} holds {total} bytes of Python source, too little for a corpus. "
        raise InputError(message + "Pass the folder of a project of yours as root.")
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8))


def batches(text: Text, seed: int, batch: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of random windows: `tokens`, and `targets` one byte further on.

    Both are int32 of shape [batch, sequence]; the same arguments give the same batches.
    """
    rng = np.random.default_rng(seed)
    offsets = np.arange(sequence + 1)
    while True:
        starts = rng.integers(len(text) - sequence, size=(batch, 1))
        windows = text[starts + offsets].astype(np.int32)
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    paths = ((path.relative_to(folder), path) for path in folder.rglob("*.py"))
    return sorted(
        (relative.as_posix(), path)
        for relative, path in paths
        if _SKIPPED.isdisjoint(relative.parts) and path.is_file()
    )
