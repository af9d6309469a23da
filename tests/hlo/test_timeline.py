"""XLA's schedule dumps are added up loop by loop, and what they cannot tell is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.hlo.clock import read_timeline

_RECORDED = Path(__file__).parent / "recorded"

Row = tuple[int, float, float]


def _instruction(number: int, name: str, opcode: str, *more: str, array: bool = False) -> str:
    shape = ["shape {", "  dimensions: 8", "}"] if array else []
    fields = [f'name: "{name}"', f'opcode: "{opcode}"', *shape, f"id: {number}", *more]
    return "\n".join(["    instructions {", *(f"      {line}" for line in fields), "    }"])


def _computation(number: int, name: str, *instructions: str) -> str:
    head = ["  computations {", f'    name: "{name}"', *instructions]
    return "\n".join([*head, f"    id: {number}", "  }"])


def _schedule(computation: int, rows: Sequence[Row], rate: float = 1) -> str:
    lines = ["computation_schedules {", f"  computation_id: {computation}"]
    for number, start, end in rows:
        times = [f"    start_timestamp_cycles: {start}"] if start else []  # a proto leaves out zero
        lines += ["  instructions {", f"    id: {number}", *times]
        lines += [f"    end_timestamp_cycles: {end}", "  }"]
    return "\n".join([*lines, f"  cycles_per_microsecond: {rate}", "}"])


def _dump(entry: str, computations: Sequence[str], schedules: Sequence[str]) -> str:
    head = ["hlo_module {", f'  entry_computation_name: "{entry}"', *computations, "}"]
    return "\n".join([*head, *schedules]) + "\n"


def _fusion(number: int, name: str) -> str:
    return _instruction(number, name, "fusion", array=True)


def _loop(number: int, name: str, body: int, condition: int, trips: int | None = None) -> str:
    known = f'backend_config: "{{\\"known_trip_count\\":{{\\"n\\":\\"{trips}\\"}}}}"'
    called = (f"called_computation_ids: {body}", f"called_computation_ids: {condition}")
    return _instruction(number, name, "while", *called, *([known] if trips else []))


def _condition(number: int, limit: int, direction: str = "LT") -> str:
    constant = _instruction(number * 10, "limit", "constant", "literal {", f"  s32s: {limit}", "}")
    compare = _instruction(number * 10 + 1, "lt", "compare", f'comparison_direction: "{direction}"')
    return _computation(number, f"condition{number}", constant, compare)


def test_loops_within_loops_count_by_their_trips() -> None:
    text = _dump(
        "main",
        [
            _computation(3, "inner", _fusion(30, "work")),
            _condition(4, 5),
            _computation(2, "outer", _loop(20, "again", 3, 4), _fusion(21, "slice")),
            _computation(1, "main", _loop(10, "loop", 2, 4, trips=3), _fusion(11, "last")),
        ],
        [
            _schedule(1, [(10, 0, 0.5), (11, 1.5, 2)]),  # the entry is not the last one
            _schedule(3, [(30, 0.25, 4)]),
            _schedule(2, [(20, 0, 0), (21, 0, 1.5)]),
        ],
    )
    timeline = read_timeline(text)
    assert timeline is not None
    assert timeline.seconds == pytest.approx((2 + 3 * (1.5 + 5 * 4)) * 1e-6)
    assert timeline.exposed_seconds == pytest.approx((1 + 3 * 5 * 0.25) * 1e-6)
    assert not timeline.untimed
    (work,) = (s for s in timeline.spans if s.name == "work")
    assert (work.opcode, work.computation, work.runs) == ("fusion", "inner", 15)
    assert work.seconds == pytest.approx(3.75e-6)


@pytest.mark.parametrize(
    ("limit", "direction", "trips"), [(5, "LT", 5), (5, "LE", 6), (5, "GT", 5), (0, "LT", 1)]
)
def test_trips_are_read_off_the_condition(limit: int, direction: str, trips: int) -> None:
    text = _dump(
        "main",
        [
            _computation(2, "body", _fusion(20, "work")),
            _condition(3, limit, direction),
            _computation(1, "main", _loop(10, "loop", 2, 3)),
        ],
        [_schedule(2, [(20, 0, 1.5)], rate=1500)],
    )
    timeline = read_timeline(text)
    assert timeline is not None
    assert timeline.seconds == pytest.approx(trips * 1.5e-6 / 1500)


def _triton(number: int, name: str, operand: int) -> str:
    """A fusion of f32[8] to (f32[8], bf16[4,8]) by Triton: 32 bytes read and 96 written."""
    leaves = ("F32", (8,)), ("BF16", (4, 8))
    lines = ["shape {", "  element_type: TUPLE"]
    for dtype, sizes in leaves:
        lines += ["  tuple_shapes {", f"    element_type: {dtype}"]
        lines += [*(f"    dimensions: {n}" for n in sizes), "  }"]
    kind = 'backend_config: "{\\"fusion_backend_config\\":{\\"kind\\":\\"__triton\\",\\"x\\":1}}"'
    return _instruction(number, name, "fusion", *lines, "}", f"operand_ids: {operand}", kind)


def _typed(number: int, name: str, opcode: str, *more: str) -> str:
    shape = ("shape {", "  element_type: F32", "  dimensions: 8", "}")
    return _instruction(number, name, opcode, *shape, *more)


def test_kernels_by_triton_take_what_their_bytes_do() -> None:
    text = _dump(
        "main",
        [
            _computation(
                1, "main", _typed(10, "gather", "all-gather-start"), _typed(11, "work", "fusion"),
                _triton(12, "softmax", 11),
                _typed(13, "done", "all-gather-done", "operand_ids: 10"),
                _triton(14, "norm", 13),
            )
        ],
        # Of 5.5 us the gather takes, the work hides 2.
        [_schedule(1, [(10, 0, 0.5), (11, 0.5, 2.5), (12, 2.5, 2.51), (13, 6, 6), (14, 6, 6.01)])],
    )  # fmt: skip
    plain, timed = read_timeline(text), read_timeline(text, bytes_per_second=128e6)  # 1 us each
    assert plain is not None
    assert timed is not None
    assert plain.seconds == pytest.approx(6.01e-6)
    assert plain.exposed_seconds == pytest.approx(3.49e-6)
    # The first runs while the gather does; the second comes behind it.
    assert timed.seconds == pytest.approx(7e-6)
    assert timed.exposed_seconds == pytest.approx(2.5e-6)
    assert [s.seconds for s in timed.spans if s.name in ("softmax", "norm")] == pytest.approx(
        [1e-6, 1e-6]
    )


def test_memory_that_is_taken_as_it_is_found_takes_no_time() -> None:
    """XLA has for it what it has for any call of a library."""
    target = 'custom_call_target: "{}"'
    text = _dump(
        "main",
        [
            _computation(
                1, "main", _typed(10, "gather", "all-gather-start"),
                _typed(11, "empty", "custom-call", target.format("AllocateBuffer")),
                _typed(12, "solve", "custom-call", target.format("cusolver")),
                _typed(13, "done", "all-gather-done", "operand_ids: 10"),
            )
        ],
        [_schedule(1, [(10, 0, 0.5), (11, 0.5, 10.5), (12, 10.5, 20.5), (13, 30, 30)])],
    )  # fmt: skip
    timed = read_timeline(text, bytes_per_second=128e6)
    assert timed is not None
    assert timed.seconds == pytest.approx(20e-6)
    assert timed.exposed_seconds == pytest.approx(9.5e-6)  # no wait grows
    assert [s.seconds for s in timed.spans if s.name == "solve"] == pytest.approx([10e-6])


@pytest.mark.parametrize(("megabytes", "microseconds"), [(128, 4.0), (16, 6.0)])
def test_copies_beside_work_take_what_their_bytes_do(megabytes: int, microseconds: float) -> None:
    """Of a stack's row that is written as an async fusion XLA has 5 ms, whatever its size."""
    calls = "called_computation_ids: 2"
    text = _dump(
        "main",
        [
            _computation(2, "async", _typed(20, "write", "fusion")),
            _computation(
                1, "main", _typed(10, "row", "fusion"),
                _typed(11, "start", "async-start", "operand_ids: 10", calls),
                _typed(12, "work", "fusion"),
                _typed(13, "done", "async-done", "operand_ids: 11"),
            ),
        ],
        [_schedule(1, [(10, 0, 2), (11, 2, 2), (12, 2, 4), (13, 4961.5, 4961.5)])],
    )  # fmt: skip
    timed = read_timeline(text, bytes_per_second=megabytes * 1e6)  # of 32 bytes read and written
    assert timed is not None
    assert timed.seconds == pytest.approx(microseconds * 1e-6)
    assert timed.exposed_seconds == pytest.approx((microseconds - 4) * 1e-6)


def _product(number: int, name: str, sizes: tuple[int, int, int, int]) -> list[str]:
    """A batched product in bf16, and before it its two operands: (batch, rows, sum, columns)."""
    batch, rows, summed, columns = sizes

    def shape(*dims: int) -> list[str]:
        return ["shape {", "  element_type: BF16", *(f"  dimensions: {n}" for n in dims), "}"]

    one = _instruction(number - 2, f"{name} one", "bitcast", *shape(batch, rows, summed))
    two = _instruction(number - 1, f"{name} two", "bitcast", *shape(batch, summed, columns))
    kind = '{\\"dot_dimension_numbers\\":{\\"lhs_batch_dimensions\\":[\\"0\\"]}}'
    result = ["shape {", "  element_type: TUPLE", "  tuple_shapes {", "    element_type: BF16"]
    result += [*(f"    dimensions: {n}" for n in (batch, rows, columns)), "  }", "}"]
    made = _instruction(
        number, name, "custom-call", *result,
        f"operand_ids: {number - 2}", f"operand_ids: {number - 1}", f'backend_config: "{kind}"',
    )  # fmt: skip
    return [one, two, made]


def test_bytes_are_only_read_where_the_memory_is_known() -> None:
    """The tiles of a TPU's layouts make dims of more bytes than there are."""
    product = _product(10, "tiled", (10**200, 10**200, 64, 64))
    rows = [(10, 0, 400.5)]
    timeline = read_timeline(
        _dump("main", [_computation(1, "main", *product)], [_schedule(1, rows)])
    )
    assert timeline is not None
    assert timeline.seconds == pytest.approx(400.5e-6)


def test_a_batch_of_products_smaller_than_any_that_xla_knows_takes_what_its_bytes_do() -> None:
    products = {
        "small": (1024, 256, 64, 256),  # 2 * 1,024 * 2 * 256 * 64 bytes read, 1,024 * 2 * 256**2
        "wide": (1024, 512, 64, 256),
        "long": (1024, 64, 512, 64),
        "few": (8, 256, 64, 256),
    }
    made = enumerate(products.items())
    lines = [line for k, (name, sizes) in made for line in _product(10 * k + 12, name, sizes)]
    rows = [(10 * k + 12, 400.5 * k, 400.5 * (k + 1)) for k in range(len(products))]
    text = _dump("main", [_computation(1, "main", *lines)], [_schedule(1, rows)])
    timeline = read_timeline(text, bytes_per_second=1e12)
    assert timeline is not None
    taken = {s.name: s.seconds for s in timeline.spans}
    assert taken == pytest.approx(
        {"small": 201326592e-12, "wide": 400.5e-6, "long": 400.5e-6, "few": 400.5e-6}
    )
    assert timeline.seconds == pytest.approx(sum(taken.values()))
    untold = read_timeline(text)  # of a chip whose memory is not known
    assert untold is not None
    assert untold.seconds == pytest.approx(4 * 400.5e-6)


def test_what_waits_for_a_collective_waits_no_longer_beside_less_work() -> None:
    text = _dump(
        "main",
        [
            _computation(
                1, "main", _typed(9, "gather", "all-gather-start"),
                *_product(12, "small", (1024, 256, 64, 256)),
                _typed(13, "done", "all-gather-done", "operand_ids: 9"),
            )
        ],
        # The gather was done somewhere in the product, or up to 1.5 us behind it.
        [_schedule(1, [(9, 0, 0.5), (12, 0.5, 400.5), (13, 402, 402)])],
    )  # fmt: skip
    timeline = read_timeline(text, bytes_per_second=1e12)
    assert timeline is not None
    assert timeline.exposed_seconds == pytest.approx(1.5e-6)
    assert timeline.seconds == pytest.approx(0.5e-6 + 201326592e-12 + 1.5e-6)


def test_of_branches_the_longest_counts_and_a_call_is_looked_into() -> None:
    branches = ("called_computation_ids: 2", "called_computation_ids: 3")
    text = _dump(
        "main",
        [
            _computation(2, "short", _fusion(20, "a")),
            _computation(3, "long", _fusion(30, "b")),
            _computation(4, "callee", _fusion(40, "c")),
            _computation(
                1, "main", _instruction(10, "choice", "conditional", *branches),
                _instruction(11, "call", "call", "called_computation_ids: 4"),
            ),
        ],
        [_schedule(n, [(n * 10, 0, n + 0.5)]) for n in (2, 3, 4)],
    )  # fmt: skip
    timeline = read_timeline(text)
    assert timeline is not None
    assert timeline.seconds == pytest.approx((3.5 + 4.5) * 1e-6)


def test_work_without_times_is_named() -> None:
    scalar = _instruction(21, "counter", "add")
    text = _dump(
        "main",
        [
            _computation(2, "body", _fusion(20, "work"), scalar),
            _computation(5, "idle", scalar),
            _condition(3, 4),
            _computation(1, "main", _loop(10, "one", 2, 3), _loop(11, "two", 5, 3)),
        ],
        [_schedule(1, [(10, 0, 0.5)])],
    )
    timeline = read_timeline(text)
    assert timeline is not None
    assert timeline.untimed == ("body",)


@pytest.mark.parametrize(
    "schedules", [[], [_schedule(1, [(10, 0, 1000), (11, 5000, 6000)])]], ids=["none", "made up"]
)
def test_what_is_no_timeline_is_none(schedules: list[str]) -> None:
    main = _computation(1, "main", _fusion(10, "a"), _fusion(11, "b"))
    assert read_timeline(_dump("main", [main], schedules)) is None


def test_a_recorded_schedule_of_nested_loops_on_h100() -> None:
    timeline = read_timeline((_RECORDED / "nested_h100.schedule.txt").read_text())
    assert timeline is not None
    # 3 x 4 runs of the inner body, and the longer branch, which holds an all-reduce.
    expected = 52.632 + 12 * 47.543 + 52.944
    assert timeline.seconds * 1e6 == pytest.approx(expected, rel=1e-6)
    assert timeline.untimed == ("region_0.3_spmd",)
    starts = {s.name: s.runs for s in timeline.spans if s.opcode.endswith("-start")}
    assert starts == {"all-gather-start": 12, "all-reduce-start": 1, "all-reduce-start.1": 1}
