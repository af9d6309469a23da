"""Writes files whole or not at all, over nothing but what autopar wrote; reads text files.

The rules, for every file that autopar writes:

* A link is followed, and stays. The file it leads to is replaced in one step, and keeps its
  permissions; a new one has those that the user's umask gives.
* What is no file (a pipe, a terminal, /dev/stdout) is written to as it is. Folders, disks and
  sockets are refused.
* A file that holds something else than what is written is left alone: a plan replaces a plan, a
  page a page, and nothing replaces a program. An empty file counts for nothing.
* What a killed process left behind, a hidden .part beside the file, goes with the next write of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
from collections.abc import Generator
from pathlib import Path

from autopar.errors import InputError

if sys.platform != "win32":  # which has no such locks: there what is left behind stays
    import fcntl

# What files of autopar begin with, by what they hold.
_KINDS = {
    "a plan": rb'\{\s*"checksum":',
    "partition specs": rb'\{\s*"step": .*\s*"cluster":',
    "pins": rb'\{\s*"pins":',
    "a profile": rb'\{\s*"model":',
    "a trace": rb'\{\s*"traceEvents":',
    "a module of autopar": rb'"""(The step .* laid out for|Sharding rules of the step) ',
    "rules for MaxText": rb"# Sharding of the step ",
    "a cluster": rb'(#.*\n)*(like|name) = "',
    "a page": rb"\s*<!doctype html>",
    "a drawing": rb"\s*<svg[ >]",
    "a picture": rb"\x89PNG\r\n",
}
# Beginnings of some of them, for `check_output`.
PLAN, TRACE, PAGE, CLUSTER = '{"checksum":', '{"traceEvents":', "<!doctype html>", 'name = "'
_HEAD = 4096
_VIRTUAL = ("/dev/", "/proc/")


def write_text(text: str, path: str | Path) -> None:
    """Write ASCII text; raises InputError where the path cannot be written, or should not be."""
    write_bytes(text.encode("ascii"), path)


def write_bytes(data: bytes, path: str | Path) -> None:
    """Write bytes likewise."""
    with _explain_os_errors(path):
        target = _target(path, data)
        if target is None:
            # It is no file, or is open elsewhere: nothing of it is cut off.
            with open(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as out:
                out.write(data)
        else:
            _replace(target, data)


def check_output(path: str | Path, like: str = "") -> None:
    """Raise InputError where a file that begins `like` this could not be written to a path.

    For before work is done that would be lost.
    """
    with _explain_os_errors(path):
        target = _target(path, like.encode("ascii"))
        if target is not None and not os.access(target.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def read_text(path: str | Path, what: str) -> str:
    """The text of a file that should hold `what`; raises InputError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {what} {str(path)!a}: {error.strerror or error}") from None
    except ValueError:  # no UTF-8, or a NUL in the path
        raise InputError(f"cannot read {what} {str(path)!a}: it is no text file") from None


@contextlib.contextmanager
def _explain_os_errors(path: str | Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            why = f"there is no folder {str(Path(path).parent)!a}: make it"
        raise InputError(f"cannot write {str(path)!a}: {why}") from None
    except ValueError:
        raise InputError(f"cannot write {str(path)!a}: a name cannot have a NUL in it") from None


# -- where to -----------------------------------------------------------------------------------


def _target(path: str | Path, data: bytes) -> Path | None:
    """The file to replace, links followed; None for what is no file and is written to as it is."""
    if str(path) in ("", "-"):
        raise InputError(f"{str(path)!r} is no name of a file: write one, or leave it out")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        target = Path(os.path.realpath(path))
        os.stat(target.parent)
        return target
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        what = "folder" if stat.S_ISDIR(mode) else "disk" if stat.S_ISBLK(mode) else "socket"
        raise InputError(f"cannot write {str(path)!a}: it is a {what}; write the name of a file")
    if not stat.S_ISREG(mode) or _is_virtual(path):
        return None
    target = Path(os.path.realpath(path))
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    _check_kind(target, path, data)
    return target


def _is_virtual(path: str | Path) -> bool:
    """True if a path goes through /dev or /proc: such a file is open in a shell, or elsewhere."""
    here, seen = os.path.abspath(path), set[str]()
    while not here.startswith(_VIRTUAL):
        if here in seen or not os.path.islink(here):
            return False
        seen.add(here)
        here = os.path.abspath(os.path.join(os.path.dirname(here), os.readlink(here)))
    return True


def _check_kind(target: Path, path: str | Path, data: bytes) -> None:
    """Raise InputError where a file holds something else than what is to be written."""
    with target.open("rb") as held:
        before = held.read(_HEAD)
    wanted = _kind(data[:_HEAD])
    if not before or (wanted is not None and _kind(before) == wanted):
        return
    raise InputError(
        f"{str(path)!a} holds {_kind(before) or 'something that autopar did not write'}, not "
        f"{wanted or 'this'}, and is left as it is: remove it first, or write another name"
    )


def _kind(head: bytes) -> str | None:
    return next((name for name, form in _KINDS.items() if re.match(form, head, re.I)), None)


# -- writing ------------------------------------------------------------------------------------


def _replace(target: Path, data: bytes) -> None:
    """Write a file beside the target, then put it in its place."""
    name = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]
    _sweep(target.parent, name)
    part, out = _part_of(target.parent, name)
    try:
        with open(out, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                _keep_rights(file.fileno(), os.stat(target))
            file.write(data)
            file.flush()
            os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _keep_rights(file: int, before: os.stat_result) -> None:
    """Give a file the owner, as far as one may, and the permissions that another had."""
    if sys.platform != "win32":
        with contextlib.suppress(PermissionError):
            os.fchown(file, before.st_uid, before.st_gid)
        os.fchmod(file, stat.S_IMODE(before.st_mode))


def _part_of(folder: Path, name: str) -> tuple[Path, int]:
    """A new hidden file, which is locked for as long as it is written."""
    attempt = 0
    while True:
        part = folder / f".{name}.{os.getpid()}-{attempt}.part"
        try:
            # Not mkstemp, whose files nobody else may read.
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            attempt += 1
            continue
        if _locked(file) and _is_there(part, file):
            return part, file
        os.close(file)  # somebody took it for left behind before it was locked


def _sweep(folder: Path, name: str) -> None:
    """Remove what killed processes left of a file: the parts that nobody has locked.

    Process numbers would not tell: in containers each run has the same.
    """
    for part in folder.glob(f".{name}.*.part") if sys.platform != "win32" else ():
        with contextlib.suppress(OSError):
            file = os.open(part, os.O_WRONLY)
            try:
                if _locked(file):
                    part.unlink()
            finally:
                os.close(file)


def _locked(file: int) -> bool:
    """Lock a file unless another has; where there are no locks, nobody has."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
    return True


def _is_there(part: Path, file: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(part).st_ino == os.fstat(file).st_ino
    return False
