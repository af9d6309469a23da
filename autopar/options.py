"""The options of parallelize as users write them: each is checked and read here, at the door.

Every refusal has one manner: the option and what it was given, what is accepted, and an example.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

from autopar.cluster import Cluster, device_order
from autopar.cluster.names import FORMS
from autopar.cluster.planned import planned_cluster
from autopar.errors import (
    ArgumentError,
    ClusterError,
    MeshError,
    PinError,
    PlanFileError,
    PlanMismatchError,
    ScheduleError,
    bulleted,
    refused,
    shown,
)
from autopar.frontend.compat import compilation_cache_folder
from autopar.ir.compiler_options import CompilerOptions, OptionValue, merged_options, wrong_option
from autopar.ir.plan import Plan
from autopar.ir.plan_file import load_plan
from autopar.ir.sharding import DEFAULT_NAMES, MeshShape
from autopar.passes.base import Pins
from autopar.passes.pipeline import PassPipeline, read_passes
from autopar.passes.shard.recipes import RECIPES
from autopar.planner.plan_cache import PlanCache
from autopar.planner.request import Request
from autopar.progress import LOGGER
from autopar.rules import RuleBook
from autopar.runtime.bind import is_mesh, mesh_shape, positions_of
from autopar.schedule.table import SCHEDULES

P = ParamSpec("P")
R = TypeVar("R")

_MESH = "sizes, named sizes or a jax.sharding.Mesh, as in (2, 4), '2,4', {'data': 2, 'model': 4}"
_PIN = "{path pattern: PartitionSpec}, as in {'params/**/kernel': P(None, 'model')}"
_TRANSPORTS = ("auto", "pull", "put")
_MOST_AXES = len(DEFAULT_NAMES) - 1


# -- the step ------------------------------------------------------------------------------


def step_of(fun: object, option: str = "the step") -> Callable[..., Any]:
    """The step; raises ArgumentError for what cannot be called, or runs no JAX when it is."""
    if not callable(fun):
        example = "step.init" if option == "create_state" else "autopar.parallelize"
        accepted = f"a function, as in {example}({option.removeprefix('the ')})"
        raise ArgumentError(refused(option, fun, accepted))
    if inspect.iscoroutinefunction(fun) or inspect.isgeneratorfunction(fun):
        kind = "an async function" if inspect.iscoroutinefunction(fun) else "a generator"
        raise ArgumentError(
            refused(option, fun, f"a plain function that returns arrays; this is {kind}")
        )
    return fun


def argnums_of(given: object, option: str, fun: Callable[..., Any]) -> tuple[int, ...]:
    """Positions of arguments; raises ArgumentError for what is none of the step's."""
    accepted = f"positions of the step's arguments, as in {option}=0 or {option}=(0, 1)"
    listed = _items(given)
    found = [_whole(value) for value in (listed if listed is not None else (given,))]
    if any(n is None for n in found):
        raise ArgumentError(refused(option, given, accepted))
    positions = tuple(n for n in found if n is not None)
    names, is_open = _parameters(fun)
    if not is_open:
        beyond = [n for n in positions if not -len(names) <= n < len(names)]
        if beyond:
            raise ArgumentError(
                refused(option, given, f"{accepted}; the step has {_listed(names, 'argument')}")
            )
        counted = [n % len(names) for n in positions]
    else:
        counted = list(positions)
    if len(set(counted)) < len(counted):
        raise ArgumentError(refused(option, given, f"each position once: {accepted}"))
    return positions


def argnames_of(given: object, fun: Callable[..., Any]) -> tuple[str, ...]:
    """Names of arguments; raises ArgumentError for what is none of the step's."""
    option = "static_argnames"
    accepted = f"names of the step's arguments, as in {option}='mode'"
    found = (given,) if isinstance(given, str) else _items(given)
    names = tuple(n for n in found or () if isinstance(n, str))
    if found is None or len(names) < len(found):
        raise ArgumentError(refused(option, given, accepted))
    known = _all_parameters(fun)
    if known is not None and not set(names) <= set(known):
        has = _listed(known, "argument")
        raise ArgumentError(refused(option, given, f"{accepted}; the step has {has}"))
    return names


def check_state_is_not_static(
    state: Sequence[int] | None, static: Sequence[int], names: Sequence[str],
    fun: Callable[..., Any],
) -> None:  # fmt: skip
    """Raise ArgumentError where an argument is named both state and static."""
    parameters, _ = _parameters(fun)
    count = len(parameters)
    fixed = {n % count if count else n for n in static}
    fixed |= {parameters.index(name) for name in names if name in parameters}
    both = [n for n in state or () if (n % count if count else n) in fixed]
    if both:
        raise ArgumentError(
            f"argument {both[0]} is in state_argnums and is static too: state is arrays that a "
            "step returns anew, and a static argument is a constant. Name it in one of them"
        )


def _parameters(fun: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """Names of a function's positional parameters, and whether it may take more than these."""
    try:
        found = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return (), True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_open = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found.values())
    return tuple(n for n, p in found.items() if p.kind in kinds), is_open


def _all_parameters(fun: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of all of a function's parameters; None where it takes any."""
    try:
        found = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values()):
        return None
    return tuple(found)


def _listed(names: Sequence[str], what: str) -> str:
    return f"{what}s {', '.join(names)}" if names else f"no {what}s"


# -- where to run --------------------------------------------------------------------------


def cluster_of(given: object, plan: Plan | None = None) -> Cluster:
    """The cluster that is named, the plan's where none is, or the devices that are here."""
    if given is None and plan is not None:
        return planned_cluster(plan)
    if given is None:
        return Cluster.local()
    if not isinstance(given, Cluster | str | Path):
        raise ClusterError(refused("cluster", given, FORMS))
    try:
        return Cluster.parse(given)
    except ValueError as error:  # a NUL byte in a path
        raise ClusterError(refused("cluster", given, FORMS)) from error


def mesh_of(given: object) -> tuple[MeshShape | None, tuple[int, ...] | None]:
    """The mesh, and the numbers of its devices in its order where it has devices of its own."""
    if given is None or isinstance(given, MeshShape):
        return given, None
    if is_mesh(given):
        return mesh_shape(given), positions_of(given)
    if isinstance(given, str):
        return MeshShape.of(given), None
    named = _entries(given)
    if named is not None:
        names = [n for n in named if isinstance(n, str)]
        sizes = _sizes(given, named.values())
        if len(names) < len(sizes):
            raise MeshError(refused("mesh", given, f"{_MESH}; axis names are texts"))
        return MeshShape(tuple(names), sizes), None
    listed = _items(given, in_order=True)
    return MeshShape.of(_sizes(given, (given,) if listed is None else listed)), None


def passes_of(
    passes: object, method: str, stages: int | None, microbatches: int | None, schedule: str | None
) -> PassPipeline:
    """The passes of a text form, or of the other options; raises InputError where both say them.

    The text is such as "shard{recipe=fsdp},lower"; None leaves it to the options.
    """
    options = PassPipeline.of_options(method, stages, microbatches, schedule)
    if passes is None:
        if schedule is not None and stages == microbatches == 1:
            raise ArgumentError(
                f"schedule={schedule!r} is an order of stages and microbatches, and the step is to "
                "be one program: ask for stages, as in stages=2 or stages='auto', or leave it out"
            )
        return options
    if not isinstance(passes, str):
        accepted = "a text, as in passes='shard{recipe=fsdp},lower'"
        raise ArgumentError(refused("passes", passes, accepted))
    if (method, stages, microbatches, schedule) != ("auto", 1, 1, None):
        raise ArgumentError(
            "passes say the method, stages, microbatches and schedule: leave those options out, or "
            f"write passes='{options}'"
        )
    read = read_passes(passes)
    read.check()
    return read


def check_order(request: Request) -> None:
    """Raise MeshError where stages are asked for on a mesh with an order of devices of its own."""
    mesh, order = request.mesh, request.order
    if order is None or mesh is None or request.is_one_program:
        return
    if order != device_order(request.cluster, mesh):
        raise MeshError(
            f"mesh ({mesh}) has its devices in the order {shown(order)}, and stages and "
            "microbatches put devices in an order of autopar's own; give the mesh's sizes alone, "
            f"as in mesh={dict(zip(mesh.names, mesh.sizes, strict=True))}"
        )


def check_sizes(request: Request) -> None:
    """Raise MeshError where a mesh has not the cluster's size, or stages need more devices.

    A mesh is that of each stage.
    """
    mesh, stages, count = request.mesh, request.stages, request.cluster.device_count
    name = request.cluster.name
    is_whole = request.may_be_one_program or stages == 1
    if is_whole and mesh is not None and mesh.device_count != count:
        raise MeshError(
            f"mesh ({mesh}) has {mesh.device_count} devices, but cluster {name} has {count}. Use a "
            f"mesh whose sizes multiply to {count}, or a cluster of the mesh's size."
        )
    each = mesh.device_count if mesh is not None else 1
    if stages is not None and stages * each > count:
        on = f", each on a mesh ({mesh})," if mesh is not None else ""
        raise MeshError(
            f"{stages} stages{on} need {stages * each} devices or more, and cluster {name} has "
            f"{count}"
        )


def _sizes(given: object, values: Iterable[object]) -> tuple[int, ...]:
    sizes = [_whole(value) for value in values]
    whole = tuple(n for n in sizes if n is not None and n >= 1)
    if len(whole) < len(sizes):
        raise MeshError(refused("mesh", given, f"{_MESH}; sizes are whole numbers from 1 on"))
    return whole


def mesh_axes_of(given: object) -> int:
    """The most axes of a searched mesh."""
    found = _whole(given)
    if found is None or not 1 <= found <= _MOST_AXES:
        raise ArgumentError(refused("mesh_axes", given, f"1 to {_MOST_AXES}, as in mesh_axes=2"))
    return found


def memory_bytes_of(memory_gb: object) -> int | None:
    """Bytes of a device's GiB, None where the cluster's figure counts; raises ArgumentError."""
    if memory_gb is None:
        return None
    accepted = "the GiB of one device, a number above 0, as in memory_gb=16"
    found = _real(memory_gb)
    if not math.isfinite(found) or found * 2**30 < 1:
        raise ArgumentError(refused("memory_gb", memory_gb, accepted))
    return int(found * 2**30)


# -- how to plan ---------------------------------------------------------------------------


def plan_of(given: object, cluster: object = None) -> Plan | None:
    """The plan, read where it is a path; of a folder that for this cluster, else for what is here.

    Raises ArgumentError, PlanFileError of a bad file, and PlanMismatchError where a folder has no
    plan, or several, for so many hosts and devices.
    """
    if given is None or isinstance(given, Plan):
        return given
    if not isinstance(given, str | Path):
        accepted = "a Plan or the path of one, as in plan=autopar.load('plan.json')"
        raise ArgumentError(refused("plan", given, accepted))
    try:
        if Path(given).is_dir():
            return _plan_among(Path(given), cluster_of(cluster))
        return load_plan(given)
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"plan is {shown(given)}, which cannot be read: {error}; give the path of a file that "
            "plan.save('plan.json') wrote"
        ) from error


def _plan_among(folder: Path, cluster: Cluster) -> Plan:
    """The plan of a folder that is for so many hosts and devices."""
    plans = {path: load_plan(path) for path in sorted(folder.glob("*.json"))}
    sizes = {path: _size(planned_cluster(plan)) for path, plan in plans.items()}
    fitting = [path for path, size in sizes.items() if size == _size(cluster)]
    if len(fitting) == 1:
        LOGGER.info("the plan is %s, for %s", fitting[0], sizes[fitting[0]])
        return plans[fitting[0]]
    raise PlanMismatchError(
        bulleted(
            f"{folder} has {len(fitting) or 'no'} plans for {_size(cluster)}, which is what is "
            "here:"
            if plans
            else f"{folder} has no plans:",
            [f"{path.name} is for {size}" for path, size in sizes.items()],
            "Start the job on as many hosts as one of them is for, or make another with `autopar "
            "plan --fallbacks N -o FOLDER`; without plan= it is planned for what is here.",
        )
    )


def _size(cluster: Cluster) -> str:
    """The hosts and devices of a cluster, which a restart may find fewer of."""
    each = f"{cluster.device_count} {cluster.chip.name} on {cluster.hosts} host"
    return each if cluster.hosts == 1 else f"{each}s"


def cache_of(given: object) -> PlanCache | None:
    """The plan cache in a folder: the one named, or one beside JAX's compiled programs.

    False is none, and so is None where JAX keeps no compiled programs. Raises ArgumentError.
    """
    if given is None:
        known = compilation_cache_folder()
        return PlanCache(Path(known) / "autopar-plans") if known else None
    if given is False:
        return None
    if not isinstance(given, str | Path) or not str(given):
        accepted = "a folder or False, as in cache='plans'"
        raise ArgumentError(refused("cache", given, accepted))
    return PlanCache(Path(given))


def checked_options(fun: Callable[P, R]) -> Callable[P, R]:
    """The function, refusing a keyword that it has not, with the nearest that it has.

    Its own signature stays. Raises TypeError, as Python does.
    """
    known = tuple(inspect.signature(fun).parameters)

    @functools.wraps(fun)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(fun.__name__, kwargs, known)
        return fun(*args, **kwargs)

    return called


def check_names(fun: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise TypeError, as Python does, for an option that the function has not."""
    for name in given:
        if name not in known:
            # What starts alike is meant rather than what has as many letters in common.
            starts = [k for k in known if name.startswith(k) or k.startswith(name)]
            near = starts[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{fun}() got an unexpected keyword argument {name!r}: {hint}")


def method_of(given: object) -> str:
    """The method; raises ArgumentError where there is none of this name."""
    if not isinstance(given, str) or given not in RECIPES:
        near = difflib.get_close_matches(str(given), RECIPES, n=1) or ["fsdp"]
        accepted = f"a name, as in method={near[0]!r}; there are: {', '.join(RECIPES)}"
        raise ArgumentError(refused("method", given, accepted))
    return given


def count_of(given: object, option: str) -> int | None:
    """A number that the user fixed, None for "auto"; raises ArgumentError for anything else."""
    if isinstance(given, str) and given == "auto":
        return None
    found = _whole(given)
    if found is None or found < 1:
        accepted = f"'auto' or a whole number from 1 on, as in {option}=2"
        raise ArgumentError(refused(option, given, accepted))
    return found


def microbatches_of(given: object, stages: int | None) -> int | None:
    """The same of microbatches, where nothing said means one for one stage and "auto" for more."""
    if given is None:
        return 1 if stages == 1 else None
    return count_of(given, "microbatches")


def schedule_of(given: object) -> str | None:
    """The schedule that the user fixed, None for "auto"; raises ScheduleError for no such name."""
    if isinstance(given, str) and given == "auto":
        return None
    if not isinstance(given, str) or given not in SCHEDULES:
        accepted = f"'auto' or a name; there are: {', '.join(SCHEDULES)}"
        raise ScheduleError(refused("schedule", given, accepted))
    return given


def remat_of(given: object) -> bool:
    """True if recomputing may be weighed; raises ArgumentError for anything but "auto", False."""
    if given is False or (isinstance(given, str) and given == "auto"):
        return given == "auto"
    raise ArgumentError(refused("remat", given, "'auto' or False, as in remat=False"))


def patience_of(given: object) -> float | Literal["auto"] | None:
    """Seconds without progress, None for any number; raises ArgumentError for anything else."""
    if isinstance(given, str) and given == "auto":
        return "auto"
    found = math.inf if given is None else seconds_of(given, "patience")
    return None if math.isinf(found) else found


def transport_of(given: object) -> str:
    """The transport between processes; raises ArgumentError where there is none of this name."""
    if not isinstance(given, str) or given not in _TRANSPORTS:
        accepted = f"a name, as in transport='pull'; there are: {', '.join(_TRANSPORTS)}"
        raise ArgumentError(refused("transport", given, accepted))
    return given


def number_of(given: object, option: str, least: int = 1) -> int:
    """A whole number that must be given; raises ArgumentError."""
    found = _whole(given)
    if found is None or found < least:
        accepted = f"a whole number from {least} on, as in {option}={max(least, 3)}"
        raise ArgumentError(refused(option, given, accepted))
    return found


def seconds_of(given: object, option: str) -> float:
    """Seconds above 0; raises ArgumentError for anything else."""
    found = _real(given)
    if not found > 0:
        raise ArgumentError(refused(option, given, f"seconds above 0, as in {option}=600"))
    return found


def weight_of(given: object) -> float:
    """The times that a companion runs for each step, 0 for none; raises ArgumentError."""
    found = _real(given)
    if not 0 <= found < math.inf:
        accepted = "how often it runs for each step, as in weight=0.1"
        raise ArgumentError(refused("weight", given, accepted))
    return found


def flag_of(given: object, option: str) -> bool:
    """True or False; raises ArgumentError for anything else."""
    if not isinstance(given, bool):
        raise ArgumentError(refused(option, given, f"True or False, as in {option}=False"))
    return given


def rules_of(given: object) -> RuleBook:
    """The user's rules; raises ArgumentError for what is no book of them."""
    accepted = 'a RuleBook, as in rules=RuleBook({"my_matmul": "b k, k n -> b n; k:reduce"})'
    if not isinstance(given, RuleBook):
        raise ArgumentError(refused("rules", given, accepted))
    texts = _entries(given.extra)
    words = (*texts.keys(), *texts.values()) if texts is not None else (None,)
    if not all(isinstance(word, str) for word in words):
        raise ArgumentError(refused("rules", given.extra, accepted))
    return given


def batch_axes_of(given: object) -> tuple[tuple[str, int | None], ...]:
    """Axes of rows by pattern; raises ArgumentError."""
    if given is None:
        return ()
    accepted = "{path pattern: axis, None for no rows}, as in {'batch/mask': 1, 'frozen/*': None}"
    named = _entries(given)
    if named is None:
        raise ArgumentError(refused("batch_axes", given, accepted))
    found: list[tuple[str, int | None]] = []
    for pattern, axis in named.items():
        number = None if axis is None else _whole(axis)
        if not isinstance(pattern, str) or (number is None and axis is not None):
            raise ArgumentError(refused("batch_axes", named, accepted))
        found.append((pattern, number))
    return tuple(sorted(found))


def compiler_options_of(given: object) -> CompilerOptions:
    """Options of XLA by name; raises ArgumentError that names one that a plan cannot have."""
    if given is None:
        return ()
    accepted = "{name: bool, int or text}, as in {'xla_gpu_enable_pipelined_all_gather': False}"
    named = _entries(given)
    if named is None:
        raise ArgumentError(refused("compiler_options", given, accepted))
    for name, value in named.items():
        if why := wrong_option(name, value):
            raise ArgumentError(f"compiler_options: {why}. It takes {accepted}")
    return merged_options((), tuple(cast("Mapping[str, OptionValue]", named).items()))


def pins_of(given: object) -> Pins:
    """Pins from {path pattern: PartitionSpec or tuple of axis names}; raises PinError."""
    if given is None:
        return ()
    named = _entries(given)
    if named is None:
        raise PinError(refused("pins", given, _PIN))
    found: list[tuple[str, tuple[tuple[str, ...], ...]]] = []
    for pattern, spec in named.items():
        if not isinstance(pattern, str):
            raise PinError(refused("a pattern of pins", pattern, f"a path, in {_PIN}"))
        found.append((pattern, _dims(pattern, spec)))
    return tuple(found)


def _dims(pattern: str, given: object) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim of a pin; a NamedSharding stands for its spec."""
    spec: object = getattr(given, "spec", given)
    # A PartitionSpec iterates like a tuple but is none.
    entries = None if isinstance(spec, Mapping) else _items(spec, in_order=True)
    if entries is None:
        raise PinError(
            refused(f"pin {pattern!r}", given, "a spec; write a PartitionSpec, as P(None, 'model')")
        )
    return tuple(_axes(pattern, entry) for entry in entries)


def _axes(pattern: str, entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    axes = _items(entry, in_order=True)
    if axes is not None and all(isinstance(a, str) for a in axes):
        return tuple(map(str, axes))
    accepted = "None, an axis name or a tuple of them"
    raise PinError(refused(f"a dim of pin {pattern!r}", entry, accepted))


def _items(given: object, *, in_order: bool = False) -> tuple[object, ...] | None:
    """The items of what may be iterated and is no text; of a set, unless their order counts."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return None
    if in_order and isinstance(given, Set):
        return None
    try:
        return tuple(cast("Iterable[object]", given))
    except TypeError:  # an array of no dims
        return None


def _entries(given: object) -> Mapping[object, object] | None:
    """A mapping, whatever it holds."""
    return cast("Mapping[object, object]", given) if isinstance(given, Mapping) else None


def _real(value: object) -> float:
    """A number of any type; not a number for what is none, bools among them."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    return float(value)


def _whole(value: object) -> int | None:
    """A whole number of any type; None for what is none, bools among them."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("int", value))
    except TypeError:
        return None
