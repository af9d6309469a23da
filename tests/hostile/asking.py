"""Asks everything of a plan file that autopar can ask, and runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import autopar
from autopar.errors import PlanFileError, PlanMismatchError
from tests.cli.running import run
from tests.hostile.steps import FILE, Base, difference

_EQUAL = 1e-4
_QUESTIONS = (
    ("show", "{plan}"),
    ("show", "{plan}", "--params", "--ops", "--stages", "--comm", "--memory", "--all"),
    ("show", "{plan}", "--json"),
    ("show", "{plan}", "--match", "**"),
    ("explain", "{plan}", "**/out"),
    ("explain", "{plan}", "dot_general", "forward", "--json"),
    ("why-not", "{plan}", "**/out=P('data')"),
    ("diff", "{plan}", "{good}"),
    ("diff", "{good}", "{plan}", "--json"),
    ("export", "{plan}", "--as", "partition-specs"),
    ("export", "{plan}", "--as", "python"),
    ("export", "{plan}", "--as", "flax-rules"),
    ("export", "{plan}", "--as", "maxtext-rules", "--logical", "{names}"),
    ("report", "{plan}", "-o", "{page}", "--against", "{good}"),
    ("schedule", "--plan", "{plan}"),
    ("schedule", "--plan", "{plan}", "-o", "{drawing}"),
)
_COMPILING = (
    ("verify", "{plan}", "{step}", "--level", "memory"),
    ("verify", "{plan}", "{step}", "--level", "numerics", "--steps", "1"),
)
_CODES = (0, 1, 2)


def outcome(base: Base, text: str, folder: Path, *, compiles: bool = False) -> str:
    """What becomes of a plan's text: "refused", "other" (of another step), or "runs".

    Fails where a command ends otherwise than with an answer or an error of its own, or where the
    plan runs and computes something else than plain jit.
    """
    paths = {name: str(folder / name) for name in ("page", "names")}
    paths |= {"plan": str(folder / "plan.json"), "good": str(folder / "good.json")}
    paths |= {"drawing": str(folder / "grid.svg"), "step": str(folder / "step.py")}
    (folder / "plan.json").write_text(text, encoding="ascii")
    (folder / "names").write_text('{"**": []}', encoding="ascii")
    (folder / "step.py").write_text(FILE.format(name=base.name), encoding="ascii")
    try:
        plan = autopar.load(folder / "plan.json")
    except PlanFileError:
        done = run("show", folder / "plan.json")
        assert done.code == 2, done
        assert len(done.err) < 2000, "the error is not short"
        return "refused"
    for words in (*_QUESTIONS, *(_COMPILING if compiles else ())):
        done = run(*(word.format(**paths) for word in words))
        assert done.code in _CODES, (words, done.err)
        assert "Traceback" not in done.err, (words, done.err)
    return ran(base, plan)


def ran(base: Base, plan: autopar.Plan) -> str:
    """Whether a plan "runs", and right, or is "refused", or is of an "other" step."""
    try:
        found: Any = autopar.parallelize(base.step, plan=plan)(*base.fresh())
    except PlanFileError:
        return "refused"
    except PlanMismatchError:
        return "other"
    error = difference(found, base.plain)
    assert error < _EQUAL, f"it runs and is off by {error}"
    return "runs"
