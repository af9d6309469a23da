"""Plans and what they mean, written by hand, to make pages of."""

from dataclasses import replace

from autopar.cluster import Cluster
from autopar.ir.codec import Json
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
from autopar.ir.listing import Traffic
from autopar.ir.peak import HeldItem, HeldKind, Peak
from autopar.ir.plan import (
    Argument,
    Origin,
    Plan,
    PlannedStage,
    PlannedSubmesh,
    Prediction,
)
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.sharding_plan import Margin, Outcome, ShardingPlan, Status
from autopar.ir.stages import Remat
from autopar.report.html.data import OtherPlan, ReportView
from autopar.report.trace import TracedSpan

MESH = MeshShape(("data", "model"), (4, 2))
ROWS, WHOLE, BOTH = (
    Sharding((("data",), ())),
    Sharding(((), ())),
    Sharding((("data",), ("model",))),
)
SPOT = Spot("forward", "Net/layer0/mlp", "net.py:12")
OUTCOME = Outcome(
    Status.FEASIBLE, 0.011, 0.0105, "Stopped at its limit.",
    (Margin("fsdp", 0.012, "found"), Margin("dp", None, "does not fit")), 1e-12,
)  # fmt: skip
VERIFICATION: dict[str, Json] = {
    "step": "train_step", "cluster": "8xcpu", "level": "memory", "target": "8xcpu",
    "agrees": False, "numerics": None, "notes": ["a note"],
    "parts": [
        {"name": None, "alike": [], "agrees": False, "fits": True, "device_bytes": 2**30,
         "differences": ["one all-gather more"],
         "figures": [
             {"name": "peak", "kind": None, "axes": [], "predicted_bytes": 100,
              "compiled_bytes": 200, "ratio": 0.5, "agrees": False, "negligible": False},
             {"name": "all of it", "kind": None, "axes": [], "predicted_seconds": 0.1,
              "compiled_seconds": 0.0, "ratio": None, "agrees": None, "negligible": False},
         ],
         "compiled": {"target": "8xcpu", "compiler": "XLA", "out_of_memory": None}},
    ],
}  # fmt: skip


def one_program_plan(
    origin: Origin, sharding: ShardingPlan, arguments: tuple[Argument, ...], prediction: Prediction
) -> Plan:
    """A plan of one program, which is one stage on one submesh."""
    once = PlannedStage("", 1, 1, 0, Remat.NONE, (), 0.0, 0.0, 0.0, prediction.seconds, 0, 0, 0)
    return Plan(
        origin, (PlannedSubmesh((), sharding),), (once,), arguments, (), prediction,
        sharding.outcome,
    )  # fmt: skip


def plan_of(layers: int = 3, step: str = "train_step") -> Plan:
    """A plan of one program: each layer with a matrix that an optimizer mirrors, and a bias."""
    arguments = [Argument("batch/tokens", (64, 32), "i32", "batch", ROWS)]
    for number in range(layers):
        for tree in ("params", "opt/mu"):
            path = f"state/{tree}/layer{number}/mlp"
            arguments.append(Argument(f"{path}/kernel", (32, 128), "f32", "state", BOTH))
        arguments.append(Argument(f"{path}/odd{number % 2}", (32, 32), "f32", "state", WHOLE))
    cluster = Cluster.parse("8xcpu")
    origin = Origin(
        step, "k", cluster.to_toml(), "8xcpu", cluster.fingerprint(), "0.10", "auto", 2**20
    )
    item = HeldItem(
        "Net/layer0/mlp dot", HeldKind.ACTIVATION, (8, 64), "f32", ROWS, 999, "net.py:3"
    )
    totals = ((HeldKind.ACTIVATION, 600_000), (HeldKind.PARAMETER, 100_000))
    peak = Peak("dot_general", "Net/layer0/mlp", "backward", "net.py:12", 0.5, (item,), totals)
    traffic = (Traffic("all-gather", ("data",), 6, 40_960, 0.002),)
    return one_program_plan(
        origin,
        ShardingPlan(MESH, (), (), (), (), OUTCOME),
        tuple(arguments),
        Prediction(0.01, 0.002, 0.0005, traffic, 100_000, 700_000, peak),
    )


def inspection_of(meshes: tuple[MeshShape, ...] = (MESH,), spans: int = 40) -> Inspection:
    """What such a plan means, over some submeshes."""
    uses = tuple(
        AxisUse(
            k,
            name,
            size,
            (AxisRole.DATA, AxisRole.FSDP),
            ("Data: 1 of 1 batch arguments.",),
        )
        for k, mesh in enumerate(meshes)
        for name, size in zip(mesh.names, mesh.sizes, strict=True)
    )
    op = OpRow(
        (0,), "dot_general", SPOT, "%1", (64, 128), "f32", ROWS, (16, 128), (), 3, 3, 10**9, 1e-3
    )
    moved = CommRow(
        "all-gather", ("data",), (AxisRole.FSDP,), 0, SPOT, "state/params/layer*/mlp/kernel",
        (32, 128), "f32", BOTH, WHOLE, "dot_general", 4096, 6, 0.002, 0.0005, ("a", "b"),
    )  # fmt: skip
    curve = tuple(
        MemoryLevel(
            i * 1e-4, f"op {i}", ((HeldKind.PARAMETER, 100_000), (HeldKind.ACTIVATION, i * 6000))
        )
        for i in range(100)
    )
    return Inspection(
        meshes,
        uses,
        (
            ModuleRow("", 0, 1, 9, 10**9, 50_000, 0.009, ()),
            ModuleRow("Net", 1, 1, 8, 10**9, 50_000, 0.008, ()),
            ModuleRow("Net/layer*", 2, 3, 6, 10**9, 50_000, 0.007, ()),
        ),
        (op,),
        (moved, replace(moved, spot=replace(SPOT, line="net.py:99"), seconds=0.001)),
        tuple(
            KernelSpan("wires" if i % 4 == 3 else "work", i * 2e-4, i * 2e-4 + 3e-4, f"op{i}", SPOT)
            for i in range(spans)
        ),
        tuple(MemoryCurve(k, curve, 2**20) for k in range(len(meshes))),
    )


def one_program(layers: int = 3, step: str = "train_step") -> ReportView:
    """A page's view of a plan of one program, beside another and what was compiled."""
    plan = plan_of(layers, step)
    other = OtherPlan(
        "other.json", replace(plan, prediction=replace(plan.prediction, seconds=0.02))
    )
    return ReportView(
        plan, inspection_of(), "autopar 1.2.3", others=(other,), verification=VERIFICATION
    )


def staged() -> ReportView:
    """A page's view of a plan of two stages whose step was measured."""
    meshes = (MeshShape(("data",), (4,)),) * 2
    submeshes = tuple(
        PlannedSubmesh(tuple(range(4 * k, 4 * k + 4)), ShardingPlan(mesh, (), (), (), (), OUTCOME))
        for k, mesh in enumerate(meshes)
    )
    stages = tuple(
        PlannedStage(f"Net/layer{k}", 2, 9 * k, k, remat, (), 1e-3, 1e-3, 1e-3, 5e-4, 9000, 900,
                     600_000)
        for k, remat in enumerate((Remat.FULL, Remat.NONE))
    )  # fmt: skip
    arguments = (Argument("state/params/w", (32, 8), "f32", "state", Sharding((("data",), ())), 1),)
    plan = plan_of()
    plan = replace(
        plan,
        submeshes=submeshes,
        stages=stages,
        arguments=arguments,
        prediction=replace(
            plan.prediction, send_seconds=(1e-4,), launch_seconds=1e-6, bubble_seconds=2e-3,
            peak_in_flight=(2, 1),
        ),
        schedule="1f1b",
        microbatches=4,
        batch=64,
        notes=("1 loop",),
    )  # fmt: skip
    measured = tuple(
        TracedSpan(k, f"F{k}", "F", k, m, 1e-3 * (m + k), 1e-3 * (m + k + 1))
        for k in range(2)
        for m in range(4)
    )
    return ReportView(plan, inspection_of(meshes, spans=0), "autopar 1.2.3", measured=measured)
