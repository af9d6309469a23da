"""The views of an inspection made by hand, drawn."""

from dataclasses import replace

import pytest
from rich.console import Console

from autopar.ir.inspection import (
    AxisRole,
    AxisUse,
    CommRow,
    Inspection,
    KernelSpan,
    MemoryCurve,
    MemoryLevel,
    ModuleRow,
    OpRow,
    Spot,
)
from autopar.ir.peak import HeldKind
from autopar.ir.sharding import MeshShape, Sharding
from autopar.report.inspection import (
    axes,
    axis_roles,
    communication,
    memory_over_time,
    modules,
    ops,
    roles_of,
)
from autopar.report.rows import inspection_data
from tests.report.pages import one_program, staged

ROWS, SPLIT = Sharding((("data",), ())), Sharding(((), ("model",)))
USES = (
    AxisUse(0, "data", 4, (AxisRole.DATA, AxisRole.FSDP), ("Rows lie over it.", "So do weights.")),
    AxisUse(0, "model", 2, (AxisRole.TENSOR,), ("Products are split.",)),
)
FORWARD, BACKWARD = Spot("forward", "Net/up", "net.py:3"), Spot("backward", "Net/up", "net.py:3")


def op(kind: str, seconds: float, sharding: Sharding = ROWS) -> OpRow:
    spot = Spot("forward", "Net/up", "net.py:3")
    return OpRow(
        (0,), kind, spot, "%0", (8, 4), "f32", sharding, (2, 4), (("f32[8,8]", ROWS),), 2, 2,
        1000, seconds,
    )  # fmt: skip


def moved(kind: str, value: str, seconds: float, exposed: float, reader: str = "") -> CommRow:
    members = (value, "another") if reader else (value,)
    return CommRow(
        kind, ("data",), (AxisRole.FSDP,), 0, FORWARD, value, (8, 4), "f32", ROWS, SPLIT, reader,
        1024, 3, seconds, exposed, members,
    )  # fmt: skip


def module(path: str, seconds: float, count: int = 1, stages: tuple[int, ...] = ()) -> ModuleRow:
    depth = path.count("/") + 1 if path else 0
    return ModuleRow(path, depth, count, 5, 2000, 1024, seconds, stages)


MODULES = (
    module("", 4e-3),
    module("Net", 3e-3),
    module("loss", 1e-3),
    module("Net/layer*", 2e-3, 2),
    module("Net/layer*/up", 1e-3, 2),
    module("Net/head", 1e-3),
)
CURVE = MemoryCurve(
    0,
    (
        MemoryLevel(0.0, "copy", ((HeldKind.PARAMETER, 512),)),
        MemoryLevel(1e-3, "dot", ((HeldKind.PARAMETER, 512), (HeldKind.ACTIVATION, 512))),
        MemoryLevel(2e-3, "add", ((HeldKind.PARAMETER, 512), (HeldKind.ACTIVATION, 256))),
        MemoryLevel(4e-3, "", ((HeldKind.PARAMETER, 512),)),
    ),
    4096,
)
FOUND = Inspection(
    (MeshShape(("data", "model"), (4, 2)),), USES, MODULES, (op("dot_general", 2e-3),),
    (moved("all-gather", "params/up", 1e-3, 2.5e-4, "dot_general"),),
    (KernelSpan("work", 0.0, 1e-3, "dot_general", BACKWARD),), (CURVE,),
)  # fmt: skip


def drawn(part: object, width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(part)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_axes_say_what_they_are_used_for_and_why() -> None:
    assert drawn(axes(USES))[1:] == [
        "axis    size   roles        evidence",
        "────────────────────────────────────────────────────────────",
        "data       4   data, fsdp   Rows lie over it. So do weights.",
        "model      2   tensor       Products are split.",
    ]


def test_an_argument_lies_over_axes_in_the_roles_that_fit_it() -> None:
    roles = roles_of(USES)
    both = Sharding((("data",), ("model",)))
    assert axis_roles(both, "state", 0, roles) == "fsdp, tensor"
    assert axis_roles(ROWS, "batch", 0, roles) == "data"
    assert axis_roles(Sharding(((), ())), "state", 0, roles) == ""


def test_ops_are_drawn_costliest_first_and_what_is_left_out_is_counted() -> None:
    partial = Sharding(((), ()), ("data",))
    lines = drawn(ops([op("tanh", 0.0), op("dot_general", 2e-3, partial), op("mul", 1e-3)], 2))
    assert lines[1:] == [
        "op                   line       part      sharding           runs         FLOP      time",
        "────────────────────────────────────────────────────────────────────────────────────────",
        "Net/up dot_general   net.py:3   forward   P() partial data      2   1.00 kFLOP   2.00 ms",
        "Net/up mul           net.py:3   forward   P('data')             2   1.00 kFLOP   1.00 ms",
        "",
        "all                                                             6   3.00 kFLOP   3.00 ms",
        "and 1 more row: --all shows it",
        *lines[-2:],
    ]


def test_collectives_have_op_line_axes_roles_and_what_is_hidden() -> None:
    rows = [
        moved("all-reduce", "Net/up dot_general", 1e-3, 1e-3),
        moved("all-gather", "params/up", 3e-3, 0.0, "dot_general"),
    ]
    found, one = replace(FOUND, collectives=tuple(rows)), one_program().plan
    text = "\n".join(" ".join(r.split()) for r in drawn(communication(found, one, None), 160))
    for line in (
        "Collectives of a device in a step",
        "all-gather data 3 3.00 KiB 3.00 ms 100.0%",
        "all 6 6.00 KiB 4.00 ms 75.0%",
        "params/up for dot_general net.py:3 forward all-gather data (fsdp) 3 x 1.00 KiB 3.00 ms "
        "100.0%",
        "Net/up dot_general net.py:3 forward all-reduce data (fsdp) 3 x 1.00 KiB 1.00 ms 0.0%",
    ):
        assert line in text
    nothing = replace(FOUND, collectives=())
    told = ["No collectives: devices do not communicate."]
    assert drawn(communication(nothing, one, None)) == told


def test_collectives_of_stages_are_added_up_for_one_device() -> None:
    row = moved("all-gather", "params/up", 3e-3, 0.0)
    other = replace(row, submesh=1, nbytes=512)
    found = replace(FOUND, collectives=(row, other), busiest=1)
    lines = drawn(communication(found, staged().plan, None))
    assert lines[0] == (
        "Collectives of a device of mesh1, the busiest of 2, in a step, all 4 microbatches"
    )
    assert lines[3].split()[:5] == ["all-gather", "data", "3", "1.50", "KiB"]
    assert "a device of mesh0: 3.00 KiB, 3.00 ms" in lines


def test_modules_are_a_tree_of_which_the_deepest_are_left_out() -> None:
    names = [line[:16].rstrip() for line in drawn(modules(MODULES, 5))[3:-1]]
    assert names == [
        "the whole step", "Net", "  2 x layer*", "  head", "loss", "and 1 more row:"
    ]  # fmt: skip
    assert [line[:10].rstrip() for line in drawn(modules(MODULES, None))[5:7]] == [
        "  2 x laye", "    2 x up"
    ]  # fmt: skip


def test_modules_of_one_stage_are_under_the_layers_of_that_stage() -> None:
    rows = [
        module("Net/layer*", 1e-3, 2, (0,)),
        module("Net/layer*", 1e-3, 2, (1,)),
        module("Net/layer*/up", 1e-3, 2, (0,)),
        module("Net/layer*/up", 1e-3, 2, (1,)),
    ]
    found = [line.split()[:4] for line in drawn(modules(rows, None))[3:-1]]
    assert [(words[-2], words[-1]) for words in found] == [
        ("Net/layer*", "S0"), ("up", "S0"), ("Net/layer*", "S1"), ("up", "S1")
    ]  # fmt: skip


def test_memory_over_time_marks_its_peak() -> None:
    assert drawn(memory_over_time([CURVE]), 31) == [
        "Memory over a step",
        "1.00 KiB ┤     ██████",
        "         ┤     ██████▄▄▄▄▄▄▄▄▄▄",
        "         ┤     ████████████████",
        "         ┤█████████████████████",
        "         ┤█████████████████████",
        "     0 B ┤█████████████████████",
        "          0 s  ▲        4.00 ms",
        "▲ 1.00 KiB at 1.00 ms: dot",
    ]
    assert "has no step in it" in drawn(memory_over_time([]))[0]


def test_the_data_have_every_row() -> None:
    data = inspection_data(FOUND)
    assert data["collectives_total"] == {
        "runs": 3, "bytes": 3072, "seconds": 1e-3, "hidden_share": pytest.approx(0.75)
    }  # fmt: skip
    (made,) = data["ops"] if isinstance(data["ops"], list) else []
    assert isinstance(made, dict)
    assert made["sharding"] == {"spec": "P('data')", "partial": []}
    assert made["spot"] == {
        "region": "forward", "module": "Net/up", "line": "net.py:3", "stage": None, "part": ""
    }  # fmt: skip
    assert data["memory_peaks"] == [{"submesh": 0, "level": 1, "bytes": 1024}]
