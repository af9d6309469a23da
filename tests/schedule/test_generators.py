"""Every schedule drawn as it has to be: one slot a task, so that the order and the waits show."""

import re
from collections.abc import Callable
from textwrap import dedent

import pytest

from autopar.schedule.grid import Kind, Task
from autopar.schedule.table import SCHEDULES, make_grid

PICTURES = {
    ("gpipe", 3, 4, 1): """
        device 0 | F0 F1 F2 F3 ··········· B0 B1 B2 B3
        device 1 | ·· F0 F1 F2 F3 ····· B0 B1 B2 B3 ··
        device 2 | ····· F0 F1 F2 F3 B0 B1 B2 B3 ·····
        """,
    ("1f1b", 4, 6, 1): """
        device 0 | F0 F1 F2 F3 ········ B0 F4 B1 F5 B2 ·· B3 ·· B4 ·· B5
        device 1 | ·· F0 F1 F2 ····· B0 F3 B1 F4 B2 F5 B3 ·· B4 ·· B5 ··
        device 2 | ····· F0 F1 ·· B0 F2 B1 F3 B2 F4 B3 F5 B4 ·· B5 ·····
        device 3 | ········ F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 ········
        """,
    ("1f1b", 3, 1, 1): """
        device 0 | F0 ··········· B0
        device 1 | ·· F0 ····· B0 ··
        device 2 | ····· F0 B0 ·····
        """,
    ("eager-1f1b", 3, 6, 1): """
        device 0 | F0 F1 F2 F3 F4 B0 F5 B1 ·· B2 ·· B3 ·· B4 ·· B5
        device 1 | ·· F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 ·· B4 ·· B5 ··
        device 2 | ····· F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 ·····
        """,
    ("interleaved", 2, 4, 2): """
        device 0 | F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 ···· B2.2 ···· B2.3 B0.2 B0.3
        device 1 | ···· F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 ····
        """,  # noqa: E501
    ("looped-bfs", 2, 3, 2): """
        device 0 | F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 ········· B2.0 B2.1 B2.2 B0.0 B0.1 B0.2
        device 1 | ···· F1.0 F1.1 F1.2 F3.0 F3.1 F3.2 B3.0 B3.1 B3.2 B1.0 B1.1 B1.2 ····
        """,
    ("zb-h1", 3, 4, 1): """
        device 0 | F0 F1 F2 ····· I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1 | ·· F0 F1 ·· I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2 | ····· F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ("zb-h2", 3, 6, 1): """
        device 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 ·····
        device 1 | ·· F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ··
        device 2 | ····· F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
        """,
    ("zb-v", 2, 3, 2): """
        device 0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2 ····
        device 1 | ···· F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2
        """,  # noqa: E501
    ("zb-interleaved", 2, 2, 2): """
        device 0 | F0.0 F0.1 F2.0 F2.1 ···· I2.0 W2.0 I2.1 W2.1 I0.0 W0.0 I0.1 W0.1
        device 1 | ···· F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 W3.0 I1.0 W3.1 I1.1 W1.0 W1.1
        """,
    ("serial", 3, 2, 1): """
        device 0 | F0 ··········· B0 F1 ··········· B1
        device 1 | ·· F0 ····· B0 ····· F1 ····· B1 ··
        device 2 | ····· F0 B0 ··········· F1 B1 ·····
        """,
    ("serial-split", 2, 1, 2): """
        device 0 | F0.0 ···· F2.0 ········· I2.0 W2.0 I0.0 W0.0
        device 1 | ···· F1.0 ···· F3.0 I3.0 W3.0 I1.0 W1.0 ····
        """,
    ("forward-only", 2, 3, 2): """
        device 0 | F0.0 F0.1 F2.0 F2.1 F0.2 ···· F2.2 ····
        device 1 | ···· F1.0 F1.1 F3.0 F3.1 F1.2 ···· F3.2
        """,
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("case", PICTURES, ids=str)
def test_the_picture_is_this(case: tuple[str, int, int, int]) -> None:
    headline, _, picture = str(make_grid(*case)).partition("\n")
    assert picture == dedent(PICTURES[case]).strip()
    assert headline == "grid {}  p={} m={} v={}".format(*case)


def test_every_schedule_has_a_picture() -> None:
    assert {name for name, *_ in PICTURES} == set(SCHEDULES)


DRAWN = re.compile(r"p=(\d+) m=(\d+) v=(\d+)\n((?: +device.*\n)+)")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_above_a_generator_is_what_it_makes(name: str) -> None:
    schedule = SCHEDULES[name]
    drawings = DRAWN.findall(schedule.row.__doc__ or "")
    fitting = [d for d in drawings if schedule.chunks[1] is None or int(d[2]) == schedule.chunks[1]]
    assert fitting
    for p, m, v, picture in fitting:
        lines = str(make_grid(name, int(p), int(m), int(v))).splitlines()[1:]
        assert lines == [line.strip() for line in picture.splitlines()]


SAMPLES = {
    ("zb-h1", 3, 4, 1): """
        F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ("interleaved", 2, 4, 2): """
        F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
        F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
        """,
}


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_the_published_lists(case: tuple[str, int, int, int]) -> None:
    grid = make_grid(*case)
    rows = [" ".join(map(grid.label, row)) for row in grid.rows]
    assert rows == dedent(SAMPLES[case]).strip().splitlines()


def zb_as_published(p: int, m: int, d: int, warmup: int, cap: int) -> list[str]:
    """H1 and H2 in the words of the paper: a cap on the microbatches in flight."""
    done: list[str] = [f"F{i}" for i in range(warmup)]
    forwards, weights, flying = warmup, 0, warmup
    for i in range(m):
        done.append(f"I{i}")
        if forwards < m:
            if flying == cap:
                done.append(f"W{weights}")
                weights, flying = weights + 1, flying - 1
            done.append(f"F{forwards}")
            forwards, flying = forwards + 1, flying + 1
        else:
            done.append(f"W{weights}")
            weights += 1
    return done + [f"W{i}" for i in range(weights, m)]


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", range(1, 16))
def test_zero_bubble_lists_are_those_of_a_cap(p: int, m: int) -> None:
    for name, cap, ahead in (("zb-h1", p, 1), ("zb-h2", 2 * p - 1, 2)):
        grid = make_grid(name, p, m)
        for d, row in enumerate(grid.rows):
            warmup = min(m, ahead * (p - 1 - d) + 1)
            assert [grid.label(t) for t in row] == zb_as_published(p, m, d, warmup, cap)


def interleaved_as_published(p: int, m: int, v: int, d: int) -> list[Task]:
    """The k-th forward and backward by index, as Megatron-LM numbers them."""
    group = m // max(1, m // p)

    def numbered(kind: Kind, chunk_of: Callable[[int], int]) -> list[Task]:
        seen = [0] * v
        tasks: list[Task] = []
        for k in range(m * v):
            chunk = chunk_of(k)
            tasks.append(Task(kind, chunk * p + d, seen[chunk]))
            seen[chunk] += 1
        return tasks

    forwards = numbered(Kind.FORWARD, lambda k: (k // group) % v)
    backwards = numbered(Kind.BACKWARD, lambda k: v - 1 - (k // group) % v)
    warmup = min(m * v, (v - 1) * group + 2 * (p - 1 - d))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    paired = [task for pair in pairs for task in pair]
    return forwards[:warmup] + paired + backwards[m * v - warmup :]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 3), (4, 6), (4, 10), (3, 9), (1, 5)])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_lists_are_those_by_index(p: int, m: int, v: int) -> None:
    rows = make_grid("interleaved", p, m, v).rows
    assert [list(row) for row in rows] == [interleaved_as_published(p, m, v, d) for d in range(p)]
