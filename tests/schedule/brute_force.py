"""A slow simulator of grids, written from the definitions alone."""

from itertools import pairwise

from autopar.schedule.grid import Grid
from autopar.schedule.simulate import StageTimes

Key = tuple[str, int, int]
Edge = tuple[int, Key, float]


def spans(grid: Grid, times: StageTimes) -> dict[Key, tuple[float, float]]:
    """Start and end of every task: starts are put off until nothing contradicts them any more."""
    keys = [[(t.kind.value, t.stage, t.microbatch) for t in row] for row in grid.rows]
    seconds = {key: _seconds(key, times) for row in keys for key in row}
    before = {after: first for row in keys for first, after in pairwise(row)}
    start = dict.fromkeys(seconds, 0.0)
    late = True
    while late:
        late = False
        for key in start:
            ready = [start[k] + seconds[k] + wait for k, wait in _needs(key, grid, times)]
            if key in before:
                ready.append(start[before[key]] + seconds[before[key]])
            if max(ready, default=0.0) > start[key]:
                start[key], late = max(ready), True
    return {key: (start[key], start[key] + seconds[key]) for key in start}


def peak_in_flight(grid: Grid, found: dict[Key, tuple[float, float]]) -> tuple[int, ...]:
    """The most microbatches, by chunk, between a forward's start and the end of the backward."""
    return _peaks(grid, found, [1] * grid.stage_count, [1] * grid.stage_count)


def peak_bytes(
    grid: Grid, times: StageTimes, found: dict[Key, tuple[float, float]]
) -> tuple[int, ...]:
    """The most bytes that each device holds at one time."""
    return _peaks(grid, found, list(times.activation_bytes), list(times.kept_bytes))


def _peaks(
    grid: Grid, found: dict[Key, tuple[float, float]], activations: list[int], kept: list[int]
) -> tuple[int, ...]:
    split = grid.splits_backward
    peaks = [0] * grid.device_count
    for now in sorted({start for start, _ in found.values()} | {end for _, end in found.values()}):
        held = [0] * grid.device_count
        for (kind, s, i), (start, _) in found.items():
            if kind != "F" or now < start:
                continue
            d = grid.device_of[s]
            if now < found["I" if split else "B", s, i][1]:
                held[d] += activations[s]
            elif split and now < found["W", s, i][1]:
                held[d] += kept[s]
        peaks = [max(pair) for pair in zip(peaks, held, strict=True)]
    return tuple(peaks)


def _seconds(key: Key, times: StageTimes) -> float:
    kind, s, _ = key
    return {
        "F": times.forward[s],
        "B": times.input_gradient[s] + times.weight_gradient[s],
        "I": times.input_gradient[s],
        "W": times.weight_gradient[s],
    }[kind]


def _needs(key: Key, grid: Grid, times: StageTimes) -> list[tuple[Key, float]]:
    """What a task reads, and how long it is under way."""
    kind, s, i = key
    needs: list[tuple[Key, float]] = []
    if kind == "W":
        needs.append((("I", s, i), 0.0))
    elif kind != "F":
        needs.append((("F", s, i), 0.0))
    if kind == "F" and s > 0:
        moves = grid.device_of[s] != grid.device_of[s - 1]
        needs.append((("F", s - 1, i), times.send_seconds[s - 1] if moves else 0.0))
    if kind in "BI" and s < grid.stage_count - 1:
        moves = grid.device_of[s] != grid.device_of[s + 1]
        back = times.return_seconds or times.send_seconds
        needs.append(((kind, s + 1, i), back[s] if moves else 0.0))
    return needs
