"""Changes that a step makes to its arguments in place, which nobody would ever see.

A trace hands the step containers of its own, so that what the step puts into them is lost unless
it returns it:

    state["w"] = state["w"] - g; return loss          lost: refused
    state["w"] = state["w"] - g; return state, loss   returned, as it is or made into new state
    batch["mask"] = batch["x"] > 0; return loss(...)  read by what is returned
    batch["x"] = batch["x"] / 255; return loss(...)   the same, of nothing but its own argument
    batch.pop("id")                                   nothing that was computed is lost
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.errors import TraceError, bulleted
from autopar.frontend.trace.arguments import (
    StepSpec,
    check_results,
    dynamic_arguments,
    key_text,
    type_of_leaf,
)
from autopar.frontend.traced import FlatProgram, Ref, refs


@dataclass(frozen=True)
class Change:
    """A value that a step has put into an argument and does not return as it is."""

    path: str
    is_new: bool  # there was nothing at its path before
    value: Any
    others: frozenset[int]  # the arrays of other arguments, by their numbers

    def __str__(self) -> str:
        return f"{self.path} is {'added' if self.is_new else 'replaced'}"


@dataclass(frozen=True)
class _Notes:
    """The changes of a step that is being traced."""

    spec: StepSpec
    changes: list[Change]


_NOTES: ContextVar[_Notes | None] = ContextVar("changes in place", default=None)
# JAX keeps a trace as long as the function that it traced, so each step has one that watches it.
_WATCHES: weakref.WeakKeyDictionary[Any, _Watch] = weakref.WeakKeyDictionary()


@contextmanager
def noting_changes(spec: StepSpec) -> Generator[list[Change]]:
    """Within it, a watched step that is traced notes the changes that it does not return."""
    notes = _Notes(spec, [])
    token = _NOTES.set(notes)
    try:
        yield notes.changes
    finally:
        _NOTES.reset(token)


def watched(spec: StepSpec) -> Callable[..., Any]:
    """The step's function, which notes its changes to arguments where anybody asks for them."""
    if spec.fun not in _WATCHES:
        _WATCHES[spec.fun] = _Watch(spec)
    return _WATCHES[spec.fun]


class _Watch:
    """A function in place of another, by whose name and signature it goes; it keeps none alive."""

    def __init__(self, spec: StepSpec) -> None:
        self._fun = weakref.ref(spec.fun)
        self.__name__ = self.__qualname__ = spec.name

    @property
    def __wrapped__(self) -> Any:
        return self._fun()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        notes, fun = _NOTES.get(), self._fun()
        assert fun is not None  # who traces it holds it
        if notes is None:
            return fun(*args, **kwargs)
        arguments = dynamic_arguments(notes.spec, args, kwargs)
        before = [dict(jax.tree_util.tree_flatten_with_path(a.tree)[0]) for a in arguments]
        result = fun(*args, **kwargs)
        if notes.spec.result_of is None:  # else it becomes objects again
            check_results(notes.spec, result)
        returned = {id(leaf) for leaf in jax.tree_util.tree_leaves(result)}
        numbers, start = frozenset(range(sum(map(len, before)))), 0
        for argument, old in zip(arguments, before, strict=True):
            others = numbers - {*range(start, start := start + len(old))}
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument.tree)[0]:
                if old.get(path) is not leaf and id(leaf) not in returned and _is_number(leaf):
                    whole = "/".join([argument.name, *map(key_text, path)])
                    notes.changes.append(Change(whole, path not in old, leaf, others))
        if notes.changes:  # no cache knows of them: the next trace is another's
            _WATCHES.pop(fun, None)
        return result


def _is_number(leaf: Any) -> bool:
    try:
        type_of_leaf(leaf)
    except (TypeError, OverflowError):
        return False
    return True


def check_changes(
    spec: StepSpec, changes: Sequence[Change], trace: Callable[[StepSpec], FlatProgram | None]
) -> None:
    """Raise TraceError for those that are lost; `trace` is the program of a step like this one.

    That is None where it has none, as values of an inner `jax.grad` cannot be returned.
    """
    again: list[Change] = []

    @functools.wraps(spec.fun, updated=())
    def probe(*args: Any, **kwargs: Any) -> Any:
        with noting_changes(spec) as noted:
            result = watched(spec)(*args, **kwargs)
        again[:] = noted
        return result, [change.value for change in noted]

    program = trace(replace(spec, fun=probe)) if changes else None
    flows = None if program is None else _Flows(program, len(program.outputs) - len(again))
    wanted = {change.path for change in changes}
    lost = [
        change
        for i, change in enumerate(changes if flows is None else again)
        if change.path in wanted
        and (not change.is_new if flows is None else flows.loses(change, i))
    ]
    if lost:
        raise TraceError(
            bulleted(
                f"{spec.name}{spec.place} changes an argument in place and does not return what it "
                "puts there. Of a traced step only what it returns comes out:",
                [str(change) for change in lost],
                "Return the new state, as in `return state, loss`. What the step alone needs goes "
                "into a copy: batch = {**batch, ...}.",
            )
        )


@dataclass(frozen=True)
class _Flows:
    """A program whose first outputs are the step's `returned`, and its others changes."""

    program: FlatProgram
    returned: int

    def loses(self, change: Change, number: int) -> bool:
        """True if a change is not read by what is returned, or may be meant as new state."""
        value = self.program.outputs[self.returned + number]
        if not isinstance(value, int) or value in self.program.inputs:
            return not change.is_new
        results = refs(self.program.outputs[: self.returned])
        if self._after(value).isdisjoint(results):
            return True
        return not change.is_new and not change.others.isdisjoint(self._inputs_of(value))

    def _after(self, value: Ref) -> set[Ref]:
        """A value and all that is made of it."""
        found = {value}
        for equation in self.program.equations:
            if not found.isdisjoint(refs(equation.operands)):
                found.update(equation.results)
        return found

    def _inputs_of(self, value: Ref) -> set[int]:
        """The inputs that a value is made of, by their numbers."""
        found = {value}
        for equation in reversed(self.program.equations):
            if not found.isdisjoint(equation.results):
                found.update(refs(equation.operands))
        return {i for i, ref in enumerate(self.program.inputs) if ref in found}
