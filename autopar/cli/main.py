"""The command line `autopar`: its commands, with their arguments, options and help.

What a command does is imported when it is called, so that help, the version and a shell's
completion wait neither for JAX nor for anything else that plans: this module imports click, and the
tables of choices here are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from autopar.cli.group import Commands
from autopar.errors import InputError

CACHE_ACTIONS = ("list", "size", "clear")
AFTER = ("graph", "batch", "layer", "stage", "shard", "lower")
EXPORTS = ("partition-specs", "python", "flax-rules", "maxtext-rules", "perfetto")
LAUNCHERS = ("slurm", "mpi", "kubernetes", "ray")
LEVELS = ("numerics", "collectives", "memory", "full")
METHODS = (
    "auto", "dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "sequence", "fsdp+tp", "expert",
)  # fmt: skip
SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v",
    "zb-interleaved", "serial", "serial-split", "forward-only",
)  # fmt: skip
TASKS = {
    "Plan": ("plan", "lint", "clusters", "demo"),
    "Look into a plan": ("show", "explain", "why-not", "diff", "report"),
    "Check and run a plan": ("verify", "launch", "export", "import"),
    "Pipelines": ("schedule", "profile", "partition"),
    "This machine": ("calibrate", "cache", "completion"),
}
SHELLS = ("bash", "zsh", "fish")
SYNCS = ("ps", "ring", "sosp19")

Command = TypeVar("Command", bound=Callable[..., object])
Items = list[CompletionItem[str]]
Completion = Callable[[click.Context, click.Parameter, str], Items]


# -- what completion offers, and options that several commands have --------------------------------


def files(context: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """The shell's own files: for FILE.py:FUNCTION, of which a shell can complete the file."""
    del context, parameter
    return [CompletionItem(begun, type="file")]


def offer(names: Iterable[str]) -> Completion:
    """These names, of which others may be as good."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> Items:
        del context, parameter
        return [CompletionItem(name) for name in names if name.startswith(begun)]

    return complete


def cluster_names(context: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """The usual clusters of the catalog; files where none begins so."""
    from autopar.cluster.catalog import usual_clusters

    return offer(usual_clusters())(context, parameter, begun) or files(context, parameter, begun)


def read_count(text: str) -> int | Literal["auto"]:
    """The number that a text is, or "auto"; raises BadParameter for anything else."""
    if text == "auto":
        return "auto"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise click.BadParameter(f"{text!r} is neither a whole number from 1 on nor 'auto'")


_PATH = click.Path(path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)
_plan_argument = click.argument("path", metavar="PLAN.json", type=_PATH)
_step_argument = click.argument("target", metavar="FILE.py:FUNCTION", shell_complete=files)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_method_option = click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="auto searches all shardings; the others are textbook recipes.",
)


def _stage_options(command: Command) -> Command:
    """Add --stages, --microbatches and --schedule."""
    options = (
        click.option(
            "--stages",
            type=read_count,
            metavar="N|auto",
            default="1",
            show_default=True,
            help="Pipeline stages, each on a submesh of its own; auto searches them.",
        ),
        click.option(
            "--microbatches",
            type=read_count,
            metavar="N|auto",
            help="How many the batch is split into. Default: 1 for one stage, else auto.",
        ),
        click.option(
            "--schedule",
            type=click.Choice(["auto", *SCHEDULES]),
            metavar="NAME",
            default="auto",
            show_default=True,
            help="The order of forwards and backwards; see `autopar schedule`.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


# -- the commands ----------------------------------------------------------------------------------


@click.group(
    cls=Commands,
    tasks=TASKS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="autopar", prog_name="autopar")
def main() -> None:
    """Auto-parallelize JAX train steps: plan for a cluster that need not be there, and run.

    Exit codes: 0 all is well, 1 there is no such plan, 2 something given cannot be used, 130 Ctrl-C
    ended it.
    """


@main.command("plan")
@_step_argument
@click.option(
    "--cluster",
    required=True,
    help="A name such as 8xh100 or v5p:4x4x4, or a .toml file.",
    shell_complete=cluster_names,
)
@click.option("--mesh", help="Sizes or named sizes: 2,4 or data=2,model=4. Default: searched.")
@click.option(
    "--mesh-axes",
    type=click.IntRange(1, 3),
    default=2,
    show_default=True,
    help="The most axes of a searched mesh.",
)
@_method_option
@_stage_options
@click.option(
    "--passes",
    metavar="TEXT",
    help="The passes with their options, in place of --method, --stages, --microbatches and "
    "--schedule, as a plan prints them: 'shard{recipe=fsdp},lower'.",
)
@click.option(
    "--memory-gb", type=float, help="Memory limit of a device in GiB. Default: all of it."
)
@click.option(
    "--no-remat", is_flag=True, help="Never recompute forward values, even where memory binds."
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="PATTERN=P(...)",
    help="Fix a sharding, as in 'params/**/kernel=P(None,\"model\")'; may be repeated.",
)
@click.option(
    "--pins",
    "pins_file",
    type=_FILE,
    help="A file of pins, as `autopar import` writes them; --pin counts before it.",
)
@click.option(
    "--compiler-option",
    "compiler_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of XLA, as in xla_gpu_enable_pipelined_all_gather=false, put over those that "
    "are chosen; may be repeated.",
)
@click.option(
    "-o",
    "--output",
    type=_PATH,
    help="Save the plan there; loading it needs no solving. With --fallbacks, a folder of plans.",
)
@click.option(
    "--fallbacks",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Plan for 1 to N hosts fewer as well, with the same batch, and tell what each costs.",
)
@click.option(
    "--confirm-fit",
    is_flag=True,
    help="Have the cluster's compiler lay the plan out, with no device; what does not fit is "
    "planned again within less.",
)
@click.option("--after", type=click.Choice(AFTER), help="Print the IR after this slot instead.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder of plans to look in first. Default: that beside JAX's compilation cache.",
)
@click.option("--no-cache", is_flag=True, help="Plan anew, and keep nothing.")
@click.option(
    "--compare",
    metavar="METHODS",
    help="Plan by these methods too, and show all side by side: fsdp,megatron.",
)
@_json_option
def plan(
    target: str, output: Path | None, after: str | None, as_json: bool, **options: Any
) -> None:
    """Plan a step for a cluster; no device of it is needed.

    The file's example_args() returns the tuple of arguments that the step is called with, as
    arrays or as jax.ShapeDtypeStruct.
    """
    from autopar.cli.plan import Wanted, plan_step

    plan_step(target, Wanted(**options), output, after, as_json)


@main.command("lint")
@_step_argument
@click.option(
    "--cluster", required=True, help="A name such as 8xh100 or v5p:4x4x4, or a .toml file."
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Ask for so many; default: whether there are any.",
)
@_json_option
def lint(target: str, cluster: str, microbatches: int, as_json: bool) -> None:
    """Check how well a step can be sharded for a cluster, before planning it.

    Rules that are missing, dims that do not divide, ops that force gathers, whether microbatches
    are exact, and what is odd about the arguments. The file is as for `autopar plan`.

    Exit codes: 0 the step can be planned, 1 there is an error, 2 it cannot be read.
    """
    from autopar.cli.lint import lint_step

    lint_step(target, cluster, microbatches, as_json)


@main.command("show")
@_plan_argument
@click.option("--params", is_flag=True, help="The sharding of every argument, by path.")
@click.option("--ops", is_flag=True, help="Ops by time: FLOP, sharding, your line.")
@click.option("--stages", is_flag=True, help="The modules, and the stages with their schedule.")
@click.option("--comm", is_flag=True, help="Every collective: its op, its line, its overlap.")
@click.option(
    "--memory", is_flag=True, help="Memory of a device over the step; the largest values."
)
@click.option(
    "--match",
    metavar="PATTERN",
    help="Of arguments, ops and collectives those whose path matches, as in 'params/**/kernel'.",
)
@click.option("--all", "in_full", is_flag=True, help="Every row of a table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all of it.")
def show(path: Path, match: str | None, in_full: bool, as_json: bool, **views: bool) -> None:
    """Print a saved plan: what it was made for, predicts and decides.

    Without an option that names a part, a little of everything.
    """
    from autopar.cli.show import Views, show_plan

    show_plan(path, Views(**views), match, in_full, as_json)


@main.command("explain")
@_plan_argument
@click.argument("words", metavar="PATH|OP", nargs=-1, required=True)
@_json_option
def explain(path: Path, words: tuple[str, ...], as_json: bool) -> None:
    """Explain why an argument or an op is sharded as it is, and what the alternatives would cost.

    \b
    params/layer0/mlp/up/kernel     an argument by its path, or the end of it
    'params/**/up/kernel'           the largest that matches
    dot_general layer0/mlp/up       an op by kind, module, line or region
    dot_general model.py:12
    """
    from autopar.cli.questions import explain_plan

    explain_plan(path, words, as_json)


@main.command("why-not")
@_plan_argument
@click.argument("pins", metavar="PATTERN=P(...)", nargs=-1, required=True)
@_json_option
def why_not(path: Path, pins: tuple[str, ...], as_json: bool) -> None:
    """Solve a saved plan again with pins, and show the difference or why there is no such plan.

    A pin is 'params/**/kernel=P(None,"model")'. Mesh, stages and recomputation are kept.
    """
    from autopar.cli.lint import try_pins

    try_pins(path, pins, as_json)


@main.command("diff")
@click.argument("before", metavar="A.json", type=_PATH)
@click.argument("after", metavar="B.json", type=_PATH)
@click.option("--exit-code", "exits", is_flag=True, help="End with 1 where the plans differ.")
@_json_option
def diff(before: Path, after: Path, exits: bool, as_json: bool) -> None:
    """Compare two saved plans: what changed from A to B, and what it costs.

    Plans may be of different steps, clusters or releases of JAX: a line says so, and what can
    be compared is.
    """
    from autopar.cli.questions import compare_plans

    compare_plans(before, after, exits, as_json)


@main.command("report")
@click.argument("path", metavar="PLAN.json", type=_FILE)
@click.option("-o", "--output", type=_FILE, help="The page. Default: PLAN.html beside the plan.")
@click.option(
    "--against",
    "others",
    multiple=True,
    metavar="OTHER.json",
    type=_FILE,
    help="Another plan to compare with; may be repeated.",
)
@click.option("--trace", type=_FILE, help="A step that ran, as step.trace(PATH) wrote it.")
@click.option(
    "--verification",
    metavar="VERIFIED.json",
    type=_FILE,
    help="What `autopar verify --json` printed, to stand beside what was predicted.",
)
def report(
    path: Path,
    output: Path | None,
    others: tuple[Path, ...],
    trace: Path | None,
    verification: Path | None,
) -> None:
    """Write a saved plan as one HTML page: open it in a browser, send it, print it.

    It loads nothing from anywhere, and the same plan gives the same bytes.
    """
    from autopar.cli.report import write_report

    write_report(path, output, others, trace, verification)


@main.command("export")
@_plan_argument
@click.option("--as", "kind", type=click.Choice(EXPORTS), required=True, help="What to write.")
@click.option("-o", "--output", type=_FILE, help="Default: stdout.")
@click.option(
    "--for",
    "target",
    metavar="FILE.py:FUNCTION",
    help="Rules: take the logical names that flax has put on the step's arguments.",
    shell_complete=files,
)
@click.option(
    "--logical",
    "names",
    type=_PATH,
    help='Rules: a JSON object of names by path pattern: {"**/wq/kernel": ["embed", "heads"]}.',
)
@click.option("--force", is_flag=True, help="Write rules even where they are wrong.")
def export(path: Path, kind: str, output: Path | None, **options: Any) -> None:
    """Write a plan for use without autopar.

    \b
    partition-specs  JSON: the mesh, and the PartitionSpec of each argument and output
    python           a module that puts a step under jax.jit, laid out inside as planned, too
    flax-rules       path patterns with PartitionSpecs and, where names are known, logical rules
    maxtext-rules    logical_axis_rules, mesh_axes and data_sharding for a MaxText config

    Exit codes: 0 written, 1 the plan cannot be said in that form, 2 something cannot be used.
    """
    from autopar.cli.export import Asked, export_plan

    export_plan(path, kind, output, Asked(**options))


@main.command("import")
@click.argument("rules", metavar="RULES.yml|.py|.json", type=_PATH)
@click.option(
    "--for",
    "target",
    metavar="FILE.py:FUNCTION",
    required=True,
    help="The step whose arguments the rules are for.",
    shell_complete=files,
)
@click.option("--mesh", help="As for autopar plan: axes it does not have leave the rules.")
@click.option("-o", "--output", type=_FILE, help="Default: stdout.")
def import_rules(rules: Path, target: str, mesh: str | None, output: Path | None) -> None:
    """Read sharding rules as pins, for `autopar plan --pins`.

    \b
    .yml   logical_axis_rules of a MaxText config
    .py    lists of ("embed", "data") for flax, or of (r"kernel$", P(None, "model")) for paths
    .json  such a list, or what logical_axis_rules and partition_rules hold

    Logical rules need arrays with names: flax boxes in what example_args() returns. What the
    rules leave open is listed, and the planner decides it.
    """
    from autopar.cli.export import import_as_pins

    import_as_pins(rules, target, mesh, output)


@main.command("verify")
@_plan_argument
@_step_argument
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="memory",
    show_default=True,
    help="How far to go; each takes longer than the one before.",
)
@click.option(
    "--target",
    "other",
    metavar="CLUSTER",
    help="Compile for these devices instead of the plan's own, as many of them.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="numerics: so many steps.",
)
@click.option(
    "--shrink",
    type=click.IntRange(min=1),
    metavar="N",
    help="numerics: on at most N devices, mesh axes and batch rows cut down alike.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="numerics: over N processes of this machine, which share the plan's devices.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="How long a compiler may take for one program.",
)
@_json_option
def verify(path: Path, target: str, as_json: bool, **options: Any) -> None:
    """Check a saved plan against a compiler or the plain step; no device of its cluster is needed.

    \b
    numerics     the planned step and the plain one, on virtual CPU devices
    collectives  what the cluster's own compiler sends, by kind and mesh axes
    memory       also what a device holds, and a GPU compiler's timeline
    full         also the cycles of a TPU's kernels

    The file is as for `autopar plan`. A create_state(key) beside the step makes the state that
    numbers start from; else it is drawn like the batches.

    Exit codes: 0 the plan agrees, 1 it differs, 2 it cannot be verified.
    """
    from autopar.cli.verify import Asked, verify_plan

    verify_plan(path, target, Asked(**options), as_json)


@main.command("launch")
@click.option("--on", type=click.Choice(LAUNCHERS), required=True, help="What starts it.")
@_plan_argument
@click.argument("script", metavar="SCRIPT.py", shell_complete=files)
@click.argument("words", nargs=-1, metavar="[-- ARGUMENTS]")
@click.option("--name", default="train", show_default=True, help="The job's name.")
@click.option(
    "--python", default="python", show_default=True, help="slurm, mpi: the Python of the hosts."
)
@click.option("--image", default="", help="kubernetes: the container that has the script.")
@click.option("--hosts", "places", default="", help="mpi: hosts as in mpirun's --host.")
@click.option("-o", "--output", type=_FILE, help="Write it there instead of to stdout.")
@click.option("--submit", is_flag=True, help="Hand it to the engine's own client.")
def launch(
    path: Path, script: str, on: str, output: Path | None, submit: bool, **options: Any
) -> None:
    """Write what starts a script on the hosts of a plan's cluster, one process on each.

    \b
    slurm        an sbatch script          --submit: sbatch
    mpi          a line of Open MPI        --submit: bash
    kubernetes   a JobSet                  --submit: kubectl apply
    ray          a script of Ray actors    --submit: ray job submit

    The script calls autopar.distributed() first. What follows -- is its own.
    """
    from autopar.cli.launch import Asked, launch_plan

    launch_plan(path, script, on, output, submit, Asked(**options))


@main.command("clusters")
@click.argument("name", required=False, shell_complete=cluster_names)
@_json_option
def clusters(name: str | None, as_json: bool) -> None:
    """List the known clusters, or show one (a name or a .toml file) with its usual meshes."""
    from autopar.cli.clusters import show_clusters

    show_clusters(name, as_json)


@main.command("cache")
@click.argument("action", type=click.Choice(CACHE_ACTIONS), default="list")
@click.argument("folder", required=False, type=_PATH)
@_json_option
def cache(action: str, folder: Path | None, as_json: bool) -> None:
    """List the plans that are kept in a folder, tell their size, or clear them.

    FOLDER is what `autopar plan --cache` or `parallelize(cache=...)` names. Left out, it is that
    beside JAX's compilation cache, where there is one.
    """
    from autopar.cli.cache import tell_cache

    tell_cache(action, folder, as_json)


@main.command("calibrate")
@click.option(
    "--devices",
    default="",
    help="'4' (the first four), '0,2,3' (their ids) or 'cpu:8' (virtual). Default: all there are.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=_FILE,
    help="The file to write, as --cluster reads it.",
)
@click.option("--quick", is_flag=True, help="Fewer sizes and runs, smaller arrays.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="How long to measure at most. Default: 180, quick 30.",
)
@click.option(
    "--job",
    default="",
    help="Measure several hosts, one process on each: 'auto' (Slurm, MPI, TPU pods) or "
    "HOST:PORT,PROCESSES,NUMBER.",
)
@click.option(
    "--from",
    "measured",
    metavar="CLUSTER.toml",
    type=_PATH,
    help="Measure nothing: fit again what this file carries.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the cluster as one JSON object.")
def calibrate(
    devices: str,
    output: Path,
    quick: bool,
    seconds: float | None,
    job: str,
    measured: Path | None,
    as_json: bool,
) -> None:
    """Measure the devices that are here, and write a cluster with the figures fitted to it.

    Matmuls, passes over memory, tiny ops and every collective over the axes of meshes are timed
    at several sizes, on all devices at once; nothing else should run on them. Stopped before its
    end it writes nothing.
    """
    from autopar.cli.calibrate import calibrate_devices

    calibrate_devices(devices, output, quick, seconds, job, measured, as_json)


@main.command("schedule", epilog=f"Schedules: {', '.join(SCHEDULES)}.")
@click.argument("name", required=False, shell_complete=offer(SCHEDULES))
@click.option("--stages", type=int, help="Devices (or submeshes) in the pipeline.")
@click.option("--microbatches", type=int, help="Parts the batch is cut into.")
@click.option("--chunks", type=int, help="Stages a device holds; if not given, what is usual.")
@click.option(
    "--times",
    default="F=1,I=1,W=1",
    show_default=True,
    help="Times of a device's forward, input and weight gradient; B is I and W together.",
)
@click.option("--latency", default="0", help="Time of a transfer between devices.")
@click.option(
    "--plan",
    metavar="PLAN.json",
    type=_PATH,
    help="Instead of all the above: the schedule of a plan with stages, in its own times.",
)
@click.option(
    "--trace",
    metavar="TRACE.json",
    type=_PATH,
    help="In the picture of a plan's schedule, the step that step.trace(PATH) measured.",
)
@click.option(
    "-o",
    "--output",
    metavar="NAME.svg|png",
    type=_PATH,
    help="Save a picture, as SVG or PNG.",
)
@_json_option
@click.pass_context
def schedule(
    context: click.Context,
    name: str | None,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    times: str,
    latency: str,
    plan: Path | None,
    trace: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Draw a pipeline schedule: one row a device, time to the right."""
    from autopar.cli.schedule import draw_plan, draw_schedule
    from autopar.schedule.table import schedule_named

    if plan is not None:
        own = ("name", "stages", "microbatches", "chunks", "times", "latency")
        named = [p for p in own if context.get_parameter_source(p) is ParameterSource.COMMANDLINE]
        if named:
            options = ", ".join("NAME" if p == "name" else f"--{p}" for p in named)
            raise InputError(f"--plan has a schedule of its own: leave out {options}")
        draw_plan(plan, trace, output, as_json)
        return
    if trace is not None:
        raise InputError("--trace goes under the schedule of a plan: add --plan PLAN.json")
    if name is not None:
        schedule_named(name)  # no such schedule is told before its sizes are asked for
    if name is None or stages is None or microbatches is None:
        raise click.UsageError("Needs NAME, '--stages' and '--microbatches', or '--plan'.", context)
    draw_schedule(name, (stages, microbatches, chunks), times, latency, output, as_json)


@main.command("profile")
@_step_argument
@click.option(
    "--cluster",
    default="local",
    show_default=True,
    help="Whose chip the times are predicted for: a name such as 8xh100, or a .toml file.",
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    help="How many parts of a module path tell layers apart. Default: the least for six layers.",
)
@click.option("-o", "--output", type=_FILE, help="Save it there.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as one JSON object.")
def profile(
    target: str, cluster: str, depth: int | None, output: Path | None, as_json: bool
) -> None:
    """Predict a step's times and bytes layer by layer, on one device with the whole batch.

    Layers are runs of one module path in the order of the forward pass; each trip of a scan over
    stacked weights is one. Backward work counts with the layer that it differentiates; the update
    is left out. The file's example_args() gives the arguments, as for `autopar plan`.
    """
    from autopar.cli.profile import profile_step

    profile_step(target, cluster, depth, output, as_json)


@main.command("partition")
@click.argument("profile_path", metavar="PROFILE.json", type=click.Path())
@click.option("--workers", type=int, metavar="M", help="Use exactly so many equal workers.")
@click.option("--bandwidth", help="Of each worker's link: 10Gbit/s, 25Gbit/s, 1GB/s, 12.5GiB/s.")
@click.option(
    "--levels",
    metavar="4x100Gbit/s,8x10Gbit/s",
    help="Instead of both: a cluster of servers, innermost first. Here 8 servers of 4 workers.",
)
@click.option(
    "--sync",
    type=click.Choice(SYNCS),
    default="ps",
    show_default=True,
    help="What synchronising weights costs: parameter servers, a ring, or the 2019 paper's form.",
)
@_json_option
def partition(
    profile_path: str,
    workers: int | None,
    bandwidth: str | None,
    levels: str | None,
    sync: Literal["ps", "ring", "sosp19"],
    as_json: bool,
) -> None:
    """Cut a profiled model into pipeline stages with replicas, for asynchronous 1F1B.

    The profile is one of `autopar profile`, or of PipeDream. Layers are counted from 1, after
    Input layers and unused __getitem__ outputs are dropped. The bottleneck is the time between
    two minibatches of a full pipeline.
    """
    from autopar.cli.partition import partition_profile

    partition_profile(profile_path, workers, bandwidth, levels, sync, as_json)


@main.command("demo")
@click.option("--steps", type=click.IntRange(min=4), help="How many steps to train for.")
@click.option("--mesh", help="Sizes or named sizes: 2,4 or data=2,model=4. Default: searched.")
@_method_option
@_stage_options
@click.option("--quick", is_flag=True, help="A much smaller model and few steps.")
@click.option("-o", "--output", type=_FILE, help="Save the plan there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def demo(**options: Any) -> None:
    """Plan a byte-level GPT for 8 virtual CPU devices, compare its first steps, and train it.

    It learns from the source text of Python's standard library. Exits with 1 where the steps
    differ from the plain ones, or the held-out loss is not below the unigram entropy.
    """
    try:  # flax and optax are an extra that the other commands do without
        from autopar.cli.demo import Asked, run_demo
    except ModuleNotFoundError as error:
        raise InputError(
            f"the demo needs {error.name}, which is not installed: pip install 'autopar[demo]'"
        ) from error
    run_demo(Asked(**options))


@main.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, names and files.

    \b
    bash   eval "$(autopar completion bash)"            in ~/.bashrc
    zsh    eval "$(autopar completion zsh)"             in ~/.zshrc
    fish   autopar completion fish | source             in config.fish
    """
    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(context.find_root().command, {}, "autopar", "_AUTOPAR_COMPLETE").source())
