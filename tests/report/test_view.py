"""A plan as rows, and the rows as a table."""

from dataclasses import replace

import pytest
from rich.console import Console

from autopar.cluster import Cluster
from autopar.ir.compiler_options import LATENCY_HIDING
from autopar.ir.inspection import AxisRole, AxisUse
from autopar.ir.listing import Traffic
from autopar.ir.peak import HeldItem, HeldKind, Peak
from autopar.ir.plan import Argument, Origin, Plan, Prediction
from autopar.ir.sharding import MeshShape, Sharding, spec_text
from autopar.ir.sharding_plan import Margin, Outcome, ShardingPlan, Status
from autopar.report.clusters import usual_meshes
from autopar.report.plan import collectives, headline, margins, memory, memory_in_full, parameters
from autopar.report.rows import holdings_of, plan_data, rows_of
from autopar.report.style import bar, sparkline
from autopar.report.table import SlashedPath, percent
from tests.report.pages import one_program_plan

WHOLE, SPLIT = Sharding(((), ())), Sharding((("data",), ()))


def plan_of(*traffic: Traffic) -> Plan:
    mesh = MeshShape(("data", "model"), (2, 4))
    arguments = (
        Argument("state/params/block0/kernel", (8, 4), "f32", "state", SPLIT),
        Argument("state/params/block1/kernel", (8, 4), "f32", "state", SPLIT),
        Argument("state/params/head", (4, 4), "f32", "state", WHOLE),
        Argument("batch", (8,), "i32", "batch", Sharding((("data", "model"),))),
    )
    cluster = Cluster.parse("8xcpu")
    origin = Origin(
        "step", "k", cluster.to_toml(), "8xcpu", cluster.fingerprint(), "0.10", "auto", 4096
    )
    outcome = Outcome(Status.OPTIMAL, 0.01, 0.01, "Solved exactly.")
    prediction = Prediction(0.01, 0.004, 0.002, traffic, 192, 1024)
    sharding = ShardingPlan(mesh, (), (), (), (), outcome)
    return one_program_plan(origin, sharding, arguments, prediction)


PLAN = plan_of(
    Traffic("all-gather", ("data",), 2, 1024, 0.001),
    Traffic("all-reduce", ("data", "model"), 3, 2048, 0.003),
)


def drawn(part: object, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_a_sharding_prints_as_its_user_writes_it() -> None:
    assert spec_text(WHOLE) == "P()"
    assert spec_text(Sharding(((), ("data", "model"), ()))) == "P(None, ('data', 'model'))"


def test_arguments_that_lie_alike_are_one_row() -> None:
    assert [(r.path, r.count, r.nbytes, r.local_bytes) for r in rows_of(PLAN)] == [
        ("state/params/block*/kernel", 2, 256, 128),
        ("state/params/head", 1, 64, 64),
        ("batch", 1, 32, 4),
    ]


def test_holdings_add_up_to_the_arguments() -> None:
    held = [(h.what, h.nbytes, h.local_bytes) for h in holdings_of(PLAN)]
    assert held == [("state/params", 320, 192), ("batch", 32, 4)]


def test_the_data_keep_every_argument() -> None:
    data = plan_data(PLAN)
    assert data["mesh"] == {"data": 2, "model": 4}
    assert isinstance(data["parameters"], list)
    assert len(data["parameters"]) == 4


def test_the_collectives_are_drawn_costliest_first() -> None:
    assert drawn(collectives(PLAN)).splitlines()[1:] == [
        "kind         axes           runs      bytes      time   share",
        "─────────────────────────────────────────────────────────────",
        "all-reduce   data + model      3   2.00 KiB   3.00 ms   75.0%",
        "all-gather   data              2   1.00 KiB   1.00 ms   25.0%",
        "",
        "all                            5   3.00 KiB   4.00 ms",
    ]
    assert drawn(collectives(plan_of())).startswith("No collectives")


def test_recipes_are_drawn_cheapest_first_and_those_that_fail_with_why() -> None:
    recipes = (
        Margin("dp", None, "does not fit: needs at least 9.00 GiB"),
        Margin("fsdp", 0.0108, "found"),
        Margin("megatron", 0.01, "found"),
    )
    outcome = replace(PLAN.outcome, recipes=recipes)
    plan = replace(PLAN, outcome=outcome)
    assert drawn(margins(plan)).splitlines()[1:] == [
        "method         cost   more   note",
        "──────────────────────────────────────────────────────────────────",
        "this plan   10.0 ms",
        "megatron    10.0 ms    +0%",
        "fsdp        10.8 ms    +8%",
        "dp                           does not fit: needs at least 9.00 GiB",
    ]
    data = plan_data(plan)["outcome"]
    assert isinstance(data, dict)
    assert data["recipes"] == [
        {"name": m.name, "seconds": m.seconds, "note": m.note} for m in recipes
    ]


def test_the_headline_says_what_for_what() -> None:
    lines = drawn(headline(PLAN), width=100).splitlines()
    assert lines[0] == "plan step on 8xcpu"
    assert "10.0 ms a step, 20.0% of it exposed communication (2.00 ms of 4.00 ms)" in lines[4]
    assert lines[3].startswith("outcome    optimal under the cost model: cost 10.0 ms, gap 0.00%.")
    assert lines[7].startswith("figures    a guess at one of eight virtual devices")
    assert "1.00 KiB a device of 4.00 KiB  █████···············  25.0%" in lines[6].replace(
        "· 25", "·  25"
    )


def test_the_headline_tells_what_it_is_compiled_with() -> None:
    options = ((LATENCY_HIDING, True), ("xla_gpu_autotune_level", 0))
    text = drawn(headline(replace(PLAN, compiler_options=options)))
    assert "compiler   latency_hiding_scheduler, autotune_level=0" in text.splitlines()
    assert "compiler " not in drawn(headline(PLAN))
    assert plan_data(replace(PLAN, compiler_options=options))["compiler_options"] == dict(options)


def test_the_headline_tells_what_the_axes_are_used_for() -> None:
    uses = (AxisUse(0, "data", 8, (AxisRole.FSDP, AxisRole.DATA), ("", "")),)
    assert "axes       data: fsdp, data" in drawn(headline(PLAN, uses)).splitlines()


def test_narrow_terminals_lose_nothing() -> None:
    text = f"{drawn(parameters(PLAN), width=60)}\n{drawn(memory(PLAN), width=60)}"
    for word in ("block*/", "kernel", "P('data')", "state/params", "peak", "limit"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 60


def test_a_path_breaks_after_its_slashes() -> None:
    assert drawn(SlashedPath("state/params/block/kernel"), width=14) == (
        "state/params/\n  block/kernel"
    )


def test_small_shares_are_not_nothing() -> None:
    assert [percent(s) for s in (0, 0.0001, 0.25, 1)] == ["0.0%", "<0.1%", "25.0%", "100.0%"]
    assert [bar(s, 4).plain for s in (0, 0.5, 2)] == ["····", "██··", "████"]
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"


def test_usual_meshes_end_in_a_small_axis() -> None:
    assert [str(m) for m in usual_meshes(Cluster.parse("8xh100"))] == [
        "data=8",
        "data=2, model=4",
        "data=4, model=2",
    ]
    assert usual_meshes(Cluster.parse("1xh100")) == ()


PEAK = Peak(
    "dot_general", "Net/up", "backward", "net.py:3", 0.4,
    (
        HeldItem("params/head", HeldKind.PARAMETER, (4, 4), "f32", WHOLE, 64, ""),
        HeldItem("Net/up tanh", HeldKind.ACTIVATION, (8, 4), "bf16", SPLIT, 32, "net.py:4"),
    ),
    ((HeldKind.PARAMETER, 192), (HeldKind.ACTIVATION, 768), (HeldKind.TEMPORARY, 64)),
)  # fmt: skip


def peaked() -> Plan:
    """The plan with a peak, and memory that costs 2 ms a GiB."""
    priced = replace(PLAN.outcome, memory_price_seconds_per_byte=2e-3 / 2**30)
    return replace(
        PLAN,
        prediction=replace(PLAN.prediction, peak=PEAK),
        outcome=priced,
    )


def test_the_peak_is_one_line_of_the_headline() -> None:
    text = drawn(headline(peaked()))
    assert "backward dot_general Net/up net.py:3, after 40% of its kernels" in text
    none = replace(PEAK, op="copy", module="", region="forward", line="")
    assert str(none).startswith("copy beside Net/up tanh net.py:4, after 40%")
    assert "of its kernels" not in drawn(headline(PLAN))


def test_memory_in_full_has_kinds_values_time_and_price() -> None:
    lines = drawn(memory_in_full(peaked()), width=100).splitlines()
    text = "\n".join(" ".join(line.split()) for line in lines)
    for shown in (
        "activation 768 B 75.0%",
        "params/head parameter f32[4,4] P() 64 B",
        "Net/up tanh activation bf16[8,4] P('data') 32 B net.py:4",
        "peak backward dot_general Net/up net.py:3, after 40% of its kernels",
        "one more GiB would save about 2.00 ms a step",
    ):
        assert shown in text
    assert "more memory would not make the step faster" in drawn(memory_in_full(PLAN))


def test_the_data_have_the_peak() -> None:
    memory_data = plan_data(peaked())["memory"]
    assert isinstance(memory_data, dict)
    assert memory_data["price_seconds_per_gib"] == pytest.approx(2e-3)
    peak = memory_data["peak"]
    assert isinstance(peak, dict)
    assert peak["bytes_by_kind"] == {"parameter": 192, "activation": 768, "temporary": 64}
    assert isinstance(peak["largest"], list)
    assert peak["largest"][1] == {
        "name": "Net/up tanh", "kind": "activation", "shape": [8, 4], "dtype": "bf16",
        "sharding": "P('data')", "local_bytes": 32, "line": "net.py:4",
    }  # fmt: skip


def test_a_guess_is_called_one() -> None:
    shown = " ".join(drawn(headline(PLAN)).split())
    assert "confidence low)" in shown
    assert "a guess and may be several times off; `autopar calibrate -o ours.toml`" in shown


def test_rows_that_no_axis_divides_are_told_of() -> None:
    def of_rows(rows: int) -> str:
        batch = Argument("x", (rows, 4), "f32", "batch", Sharding(((), ())), 0)
        return " ".join(drawn(headline(replace(PLAN, arguments=(batch,)))).split())

    assert "no axis of (data=2, model=4) divides the batch's 101 rows" in of_rows(101)
    assert "96 or 104 rows would be" in of_rows(101)
    assert "divides the batch" not in of_rows(96)
    assert "divides the batch" not in of_rows(1)
