"""The pytest plugin `autopar_golden`: a test fails when a plan is not what it was.

What pytest loads with it at its start is this file alone; the rest is imported where a test asks.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from autopar.ir.comparison import Comparison
    from autopar.ir.plan import Plan

TOLERANCE = 0.01
_WRITTEN = "autopar_golden"
_WIDTH = 100


class Golden:
    """Compares the plans of one test with those that are kept beside its file."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._node, self._updates = request.node, bool(request.config.getoption("autopar_update"))
        self._folder = request.path.parent / "golden" / request.path.stem
        self._used = set[str]()

    def __call__(self, plan: Plan, name: str | None = None, tolerance: float = TOLERANCE) -> None:
        """Fail unless the plan decides what the kept one does, and predicts about the same.

        It is kept as golden/<test module>/<name>.plan.json beside the test's file, the name being
        the test's own if none is given. Predictions may be off by `tolerance`, a share.
        """
        __tracebackhide__ = True
        path = self._folder / f"{self._own(name)}.plan.json"
        if self._updates:
            self._write(plan, path)
        elif not path.is_file():
            pytest.fail(f"there is no golden plan {self._told(path)}.\n{self._remedy()}", False)
        else:
            self._compare(plan, path, tolerance)

    def _own(self, name: str | None) -> str:
        """The file's name; a test that keeps several plans must tell them apart."""
        test = ".".join(str(self._node.nodeid).split("::")[1:])
        found = re.sub(r"[^\w.=+-]+", "-", name or test).strip("-")
        if found in self._used:
            pytest.fail(f"two plans of this test are called {found!r}: give each a name", False)
        self._used.add(found)
        return found

    def _write(self, plan: Plan, path: Path) -> None:
        """Whole or not at all; without the step, as the test has that."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(plan, record=None).save(path)
        self._node.user_properties.append((_WRITTEN, self._told(path)))

    def _compare(self, plan: Plan, path: Path, tolerance: float) -> None:
        __tracebackhide__ = True
        from autopar.errors import PlanFileError
        from autopar.inspecting.compare import compare
        from autopar.ir.plan_file import load_plan

        try:
            kept = load_plan(path)
        except PlanFileError as error:
            pytest.fail(f"{error}\n{self._remedy()}", False)
        found = compare(kept, plan).beyond(tolerance)
        if not found.is_equal:
            told = f"the plan is not the golden one, {self._told(path)}"
            pytest.fail(f"{told}:\n\n{_drawn(found)}\n\n{self._remedy()}", False)

    def _told(self, path: Path) -> str:
        root = self._node.config.rootpath
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def _remedy(self) -> str:
        return f"To keep the plan as it is now: pytest {self._node.nodeid!r} --autopar-update"


def _drawn(found: Comparison) -> str:
    from rich.console import Console

    from autopar.report.comparison import comparison

    text = io.StringIO()
    Console(file=text, width=_WIDTH, highlight=False).print(comparison(found, ("kept", "now")))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@pytest.fixture
def autopar_golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a plan with the one kept for this test: see `Golden`."""
    return Golden(request)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --autopar-update."""
    group = parser.getgroup("autopar")
    group.addoption(
        "--autopar-update",
        action="store_true",
        help="Keep the plans of autopar_golden as they are.",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell which golden plans were written."""
    reports = [r for word in ("passed", "failed") for r in terminalreporter.getreports(word)]
    for report in reports:
        for key, value in report.user_properties if report.when == "call" else ():
            if key == _WRITTEN:
                terminalreporter.write_line(f"autopar_golden: wrote {value}")
