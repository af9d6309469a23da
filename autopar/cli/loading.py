"""The user's file: its step, its example arguments, and what is wrong with them in their terms."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from autopar.api import with_created
from autopar.errors import InputError, TraceError
from autopar.frontend import StepSpec, defined_at, goes_through

_DEFAULT_STEP, _DEFAULT_ARGUMENTS = "train_step", "example_args"
_TARGET = re.compile(r"(.*\.py|[^:]*)(?::([^:]+))?(?::([^:]+))?")  # a path may have a drive's colon
_SHOWN, _LONG, _LINES = 60, 400, 8
_EXAMPLE = "def {}():\n    return state, batch   # arrays, or jax.ShapeDtypeStruct"


@dataclass(frozen=True)
class Target:
    """A step out of a file, and what it is called with."""

    path: Path
    step: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, Any]
    arguments: str  # the function that gave them
    create_state: Callable[..., object] | None = None

    def with_state(self) -> tuple[object, ...]:
        """The arguments with a fresh state in the place of its shapes, if the file can make one.

        That is what `create_state(key)` gives, for the first argument of its type.
        """
        if self.create_state is None:
            return self.args
        with _user_code(self.path, "is what create_state() does; let it return"):
            return with_created(self.create_state, self.args)


def load_target(text: str) -> Target:
    """The step that FILE.py:FUNCTION names; FILE.py alone means its train_step.

    `example_args()` of the file, or what FILE.py:FUNCTION:ARGS names instead, returns the tuple of
    the step's positional arguments, and `example_kwargs()`, where there is one, the dict of its
    keyword arguments. Raises InputError where the file, the step or the arguments cannot be had.
    """
    found = _TARGET.fullmatch(text)
    name, function, arguments = found.groups() if found is not None else (text, None, None)
    path = Path(name)
    function, arguments = function or _DEFAULT_STEP, arguments or _DEFAULT_ARGUMENTS
    module = _module(path)
    step = _function(module, path, function)
    args = _call(module, path, arguments)
    if not isinstance(args, tuple):
        raise InputError(
            f"{path}: {arguments}() returned {type(args).__name__}; return the tuple of the "
            f"arguments that {function} is called with, as in `return state, batch`"
        )
    kwargs: object = {}
    if "example_kwargs" in vars(module):
        kwargs = _call(module, path, "example_kwargs")
    kind = type(kwargs).__name__
    names = list(cast("dict[object, object]", kwargs)) if isinstance(kwargs, dict) else [None]
    if not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{path}: example_kwargs() returned {kind}; return a dict of the "
            f"names and values of the keyword arguments that {function} is called with"
        )
    create: object = vars(module).get("create_state")
    return Target(
        path, step, cast("tuple[object, ...]", args), cast("dict[str, Any]", kwargs),
        arguments, create if callable(create) else None,
    )  # fmt: skip


@contextlib.contextmanager
def tracing(loaded: Target) -> Generator[None]:
    """Adds to a TraceError of the block the user's line, and where the arguments came from."""
    try:
        yield
    except TraceError as error:
        cause = error.__cause__
        if cause is None:
            raise
        where = _line_of_step(cause, loaded) or _last_line_in(cause, loaded.path.resolve())
        told = [f"  {loaded.path}, {where}"] if where else []
        if not type(cause).__module__.startswith("jax."):  # JAX's own are of what the step does
            told.append(
                f"The arguments are what {loaded.arguments}() of {loaded.path.name} returns: if "
                "the step is called with others, let it return such."
            )
        raise TraceError("\n".join([str(error), *told])) from error


def _line_of_step(error: BaseException, loaded: Target) -> str:
    """The line that defines the step, for an error of the call itself; else ""."""
    code = StepSpec(loaded.step).code
    if code is None or goes_through(error, code):
        return ""
    number, text = defined_at(code)
    return f"line {number}: {text}" if Path(code.co_filename) == loaded.path.resolve() else ""


def _last_line_in(error: BaseException, path: Path) -> str:
    """The last line of the user's file that an exception went through: "line 12: source", or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f"line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


class _AsWritten(SourceFileLoader):
    """The user's file as it is now, with no bytecode beside it.

    Python takes bytecode for a file's own by size and second: a file that was changed at once, as
    by a script, could run as it was.
    """

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """No stats, by which bytecode would be known."""
        raise OSError(path)


def _module(path: Path) -> ModuleType:
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long
        shown = f"{str(path)[:_SHOWN]}..."
        raise InputError(f"{shown!r} cannot be read: {error.strerror}") from error
    if is_folder:
        raise InputError(f"{str(path)!r} is a folder; write FILE.py:FUNCTION")
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        there = f" Python files there: {', '.join(near[:8])}." if near else ""
        raise InputError(f"there is no file {str(path)!r}; write FILE.py:FUNCTION.{there}")
    resolved = path.resolve()
    name = resolved.stem if resolved.stem not in sys.modules else f"_autopar_{resolved.stem}"
    if resolved.suffix != ".py":
        raise InputError(f"{str(path)!r} is not a Python file; write FILE.py:FUNCTION")
    loader = _AsWritten(name, str(resolved))
    spec = importlib.util.spec_from_file_location(name, resolved, loader=loader)
    assert spec is not None  # there is a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    for place, folder in enumerate(_import_folders(path)):
        if folder not in sys.path:
            sys.path.insert(place, folder)
    with _user_code(path, "runs when it is imported; put it under `if __name__ == '__main__':`"):
        loader.exec_module(module)
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., object]:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found
    names = [
        n for n, f in vars(module).items()
        if callable(f) and not n.startswith("_") and getattr(f, "__module__", "") == module.__name__
    ]  # fmt: skip
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    listed = f" It has {', '.join(sorted(names))}." if names else " It defines no functions."
    what = "is no function" if found is not None else "does not exist"
    raise InputError(f"{name} {what} in {path}.{hint}{listed}")


def _call(module: ModuleType, path: Path, name: str) -> object:
    make: object = getattr(module, name, None)
    if not callable(make):
        raise InputError(
            f"{path} has no {name}(), so there is nothing to call the step with. Add to it:\n"
            f"{_EXAMPLE.format(name)}"
        )
    with _user_code(path, f"is what {name}() does; let it return"):
        return make()


@contextlib.contextmanager
def _user_code(path: Path, on_exit: str) -> Generator[None]:
    """Turns what the user's code raises into an InputError, and keeps its prints off stdout."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise InputError(f"{path}: sys.exit {on_exit}") from error
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise InputError(f"{error.filename}, line {error.lineno}: {error.msg}\n  {line}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = _last_line_in(error, path.resolve())
        lines = f"{type(error).__name__}: {error}".splitlines()
        few = [*(line[:_LONG] for line in lines[:_LINES]), *["..."] * (len(lines) > _LINES)]
        said = "\n".join(few)
        told = "".join(f"\n  {text}" for text in (where, _searched(error, path)) if text)
        raise InputError(f"{path} fails: {said}{told}") from error


def _searched(error: BaseException, path: Path) -> str:
    """The places where a module that is not there was looked for; "" for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    folders = ", ".join(_import_folders(path))
    return f"looked for in {folders} and the packages of {sys.executable}"


def _import_folders(path: Path) -> tuple[str, ...]:
    """The folders that a file imports from: as by `python FILE.py`, then as by `python -m` here."""
    return tuple(dict.fromkeys((str(path.resolve().parent), str(Path.cwd()))))
