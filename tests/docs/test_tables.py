"""Tables of the documentation that are no command's output hold what autopar computes."""

import re

from tests.cli.running import run
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "explanation" / "schedules.md"


def test_the_bubbles_with_transfers_are_those_of_the_simulator() -> None:
    head, *rows = _table("| transfer |")
    names = [re.match(r"`([\w-]+)`", cell) for cell in head[1:]]
    for latency, *told in rows:
        found = [_bubble(name[1], latency) for name in names if name]
        assert [float(t) for t in told] == found, f"transfers of {latency}: {found}"


def _bubble(name: str, latency: str) -> float:
    """With eight devices, 32 microbatches and F, I and W of 1."""
    words = ("--stages", "8", "--microbatches", "32", "--latency", latency, "--json")
    return float(run("schedule", name, *words).data["makespan_bubble"])


def _table(start: str) -> list[list[str]]:
    """The cells of the table whose first line begins so, without the rule below its head."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    found: list[list[str]] = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return [found[0], *found[2:]]
