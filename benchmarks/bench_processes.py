"""What processes cost: a step over two and four beside one process's, and the host's time in each.

Every job has the same devices in total and runs the same plans, in turn with the others; prints
JSON. The host's time is what a process's own thread works for each of its instructions, whoever
waits for whom: the least of a round's steps. `jax_us_an_instruction` is what of it passes in JAX,
in steps of their own, in turn: in the calls of compiled programs with the arguments that they have
in the step, in transports, to lay out the batch, to wait for a program, and to give arrays' memory
back. `own_us_an_instruction` is the rest, and `walk_us_an_instruction` the walk alone, with
programs and a transport that do nothing.

On one machine all processes share the cores. `still_over_one_process` is the floor there: the same
programs over the same processes where nothing travels, as every transport gives arrays that were
there before the step. What `over_one_process` is more than that is what is sent, and waited for;
`bare_transfer_ms` is what one activation takes when nothing else goes on. `jit_over_one_process` is
the ratio of plain `jax.jit` with the same rows on the same devices, `bare_over_one_process` that
of two stages by hand (`bare.py`) of the same layers, microbatches and transfers in JAX alone;
`bare_host_us_a_call` is what these take the host for each of its calls of JAX, `bare_host_ms` for a
step, as `host_ms` is of the plan's: less than that no list of programs takes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.frontend import compat
from autopar.ir.program import Program, Run, Send, Start
from autopar.ir.projection import Host
from autopar.runtime import actions, place
from autopar.runtime.actions import Binding
from autopar.runtime.bind import ArrayType, host_of
from autopar.runtime.executor import Executor, Options
from autopar.runtime.job import this_job
from autopar.runtime.shardings import bind_plan
from autopar.runtime.transport import abstract
from autopar.runtime.transport.abstract import AbstractTransport, Copier, Endpoint, Route
from autopar.runtime.transport.local import LocalTransport
from autopar.runtime.transport.pull import PullTransport
from autopar.runtime.watchdog import PATIENCE_SECONDS
from benchmarks.bare import Bare
from tests.processes.jobs import StandingJob, standing_job

DEVICES, LAYERS, MICROBATCHES, ROWS = 4, 8, 6, 32  # rows of a microbatch
ROUNDS, STEPS = 7, 10  # in turn, and of each round
MESHES = (4, 2)  # devices of plain jit's meshes
SHAPES = ((1, 4), (2, 2), (4, 1))  # processes, and the devices of each
PLANS: tuple[dict[str, Any], ...] = (
    {"method": "fsdp"},
    {"stages": 2, "microbatches": MICROBATCHES, "schedule": "1f1b"},
    {"stages": 4, "microbatches": MICROBATCHES, "schedule": "1f1b"},
)


def train(weights: Any, batch: Any) -> Any:
    """Descent of a plain perceptron."""

    def loss(weights: Any) -> Any:
        h = batch["x"]
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return [w - 0.01 * g for w, g in zip(weights, slopes, strict=True)], value


def create(width: int) -> list[Any]:
    """The weights."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(k, (width, width)) / width**0.5 for k in keys]


def batch_of(width: int) -> dict[str, Any]:
    """A batch."""
    x, y = np.random.default_rng(0).normal(size=(2, ROWS * MICROBATCHES, width))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


# -- in a process of a job ---------------------------------------------------------------------


class Stopwatch:
    """CPU seconds that this process's calling thread spends in some functions, while it `is_on`.

    What it takes to look at the clock is not among them.
    """

    def __init__(self) -> None:
        self.is_on, self.seconds = False, 0.0
        self._is_within = False
        self._look = statistics.median(_look() for _ in range(1000))

    def timed(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function under this watch; of one in another only the outer is measured."""

        def run(*args: Any, **options: Any) -> Any:
            if self._is_within or not self.is_on:
                return fun(*args, **options)
            self._is_within, began = True, time.thread_time()
            try:
                return fun(*args, **options)
            finally:
                self.seconds += time.thread_time() - began - self._look
                self._is_within = False

        return run

    def giving(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """A maker of functions that are under this watch."""
        return lambda *given: self.timed(make(*given))


def _look() -> float:
    began = time.thread_time()
    return time.thread_time() - began


@lru_cache
def in_jax() -> Stopwatch:
    """The watch over what a step calls of JAX in this process."""
    watch = Stopwatch()
    makers: list[tuple[Any, str]] = [(compat, "direct"), (actions, "_free")]
    makers += [(kind, "copier") for kind in (LocalTransport, PullTransport)]
    for owner, name in makers:
        setattr(owner, name, watch.giving(getattr(owner, name)))
    calls: list[tuple[Any, str]] = [(place, "spread"), (abstract, "wait")]
    for owner, name in calls:
        setattr(owner, name, watch.timed(getattr(owner, name)))
    return watch


class Running:
    """A compiled step, its state as it goes on, and the same step where nothing travels."""

    def __init__(self, path: str, width: int) -> None:
        self._in_jax = in_jax()
        self._step = autopar.parallelize(train, plan=path)
        self._batch = batch_of(width)
        self._state, still = (self._step.init(lambda: create(width)) for _ in range(2))
        planned = self._step.planned(self._state, self._batch)
        self.program: Program = planned.program
        self.meshes = bind_plan(planned.plan)
        self._transport, self._still_state = Still(), still
        options = Options(patience=PATIENCE_SECONDS, transport=self._transport)
        self._still = Executor(planned.trace, planned.program, self.meshes, options)
        self.run(3)
        self.run_still(3)

    def run(self, count: int, is_watched: bool = False) -> dict[str, float]:
        """Seconds of a step, its loss read as users read it, and the least that the host works.

        Of steps that are watched the least that passes in JAX instead.
        """
        start = time.perf_counter()
        worked, within = list[float](), list[float]()
        self._in_jax.is_on = is_watched
        for _ in range(count):
            self._in_jax.seconds, began = 0.0, time.thread_time()
            self._state, loss = self._step(self._state, self._batch)
            worked.append(time.thread_time() - began)
            within.append(self._in_jax.seconds)
            float(loss)
        jax.block_until_ready(self._state)
        self._in_jax.is_on = False
        if is_watched:
            return {"jax": min(within)}
        return {"step": (time.perf_counter() - start) / count, "host": min(worked)}

    def run_still(self, count: int) -> dict[str, float]:
        """Seconds of a step in which all that would be sent is there before."""
        taken = 0.0
        for _ in range(count):
            self._transport.lay()
            began = time.perf_counter()
            leaves = jax.tree.leaves((self._still_state, self._batch))
            self._still_state, loss = self._still(leaves)
            float(loss)
            jax.block_until_ready(self._still_state)
            taken += time.perf_counter() - began
        return {"still": taken / count}


@lru_cache
def running(path: str, width: str) -> Running:
    """The step of a plan, compiled when it is first asked for."""
    return Running(path, int(width))


def steps(path: str, width: str, count: str) -> dict[str, float]:
    """Some steps of a plan, as many under the watch, and as many in which nothing travels."""
    found, number = running(path, width), int(count)
    host = host_of(found.meshes)
    return {
        **found.run(number),
        **found.run(number, is_watched=True),
        **found.run_still(number),
        "instructions": len(host.numbers(found.program)),
    }


@lru_cache
def plain(width: str, size: str) -> list[list[Any]]:
    """A step under plain jit on each mesh of so many devices: its weights, whole, and its rows.

    Of a mesh without devices of this process there is none.
    """
    found: list[list[Any]] = []
    weights, batch = create(int(width)), batch_of(int(width))
    for devices in np.array(jax.devices(), dtype=object).reshape(-1, int(size)):
        if all(d.process_index != jax.process_index() for d in devices):
            continue
        mesh = Mesh(devices, ("data",))
        whole, rows = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), ("data",)))
        step = jax.jit(train, donate_argnums=0, out_shardings=(whole, whole))
        found.append([step, _laid(weights, whole), _laid(batch, rows)])
    return found


def _laid(tree: Any, sharding: NamedSharding) -> Any:
    def laid(leaf: Any) -> Any:
        host = np.array(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda box: host[box])

    return jax.tree.map(laid, tree)


def plain_steps(width: str, size: str, count: str) -> float:
    """Seconds of a step under plain jit, on all meshes side by side."""
    own = plain(width, size)
    start = time.perf_counter()
    for _ in range(int(count)):
        losses: list[Any] = []
        for running in own:
            step, weights, batch = running
            running[1], loss = step(weights, batch)
            losses.append(loss)
        jax.block_until_ready(losses)
    return (time.perf_counter() - start) / int(count)


@lru_cache
def bare(width: str) -> Bare:
    """The stages by hand."""
    weights, batch = create(int(width)), batch_of(int(width))
    return Bare(this_job(), weights, batch["x"], batch["y"], MICROBATCHES)


def bare_steps(width: str, count: str) -> dict[str, float]:
    """Seconds of a step of the stages by hand, and of the host in it."""
    return asdict(bare(width).taken(int(count)))


def walk(path: str, width: str) -> float:
    """Seconds that the walk itself takes an instruction: programs and transport do nothing."""
    found = running(path, width)
    program = found.program
    runs = [s for s in program.instructions if isinstance(s, Run)]
    calls = {
        run.part: partial(_give, [None] * (len(run.outputs) + len(run.accumulators) + 1))
        for run in runs
    }
    sources: Any = [SimpleNamespace(has_token=True)] * len(program.parts)
    types: Any = SimpleNamespace(
        routes={n: s.transfers for n, s in enumerate(program.instructions) if isinstance(s, Send)}
    )
    alone = Host(0, 1, (frozenset({0}),) * len(found.meshes))
    binding = Binding(program, alone, calls, sources, found.meshes, Idle(), 0)
    # Starts would compute something.
    numbers = [n for n, s in enumerate(program.instructions) if not isinstance(s, Start)]
    actions, taken = binding.actions(numbers, types), list[float]()
    for _ in range(100):
        registers: list[list[Any]] = [[None] * count for count in program.register_counts]
        began = time.thread_time()
        for act in actions:
            act(registers)
        taken.append((time.thread_time() - began) / len(actions))
    return statistics.median(taken)


def _give(results: Sequence[Any], *given: Any) -> Sequence[Any]:
    return results


@final
class Idle(AbstractTransport):
    """Transport that carries nothing."""

    name = "idle"

    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A function that gives as many results."""
        return partial(_give, [None] * len(routes))


@final
class Still(AbstractTransport):
    """Transport that gives arrays which have been laid before the step."""

    name = "still"

    def __init__(self) -> None:
        self._laid: list[tuple[list[Any], Callable[[], Sequence[Any]]]] = []

    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A function that gives what was laid; nothing where the target is another process's."""
        if not target.is_on(jax.process_index()):
            return partial(_give, [None] * len(routes))
        held: list[Any] = []
        kinds = [route.after for route in routes]
        self._laid.append((held, lambda: [_zeros(kind, target.mesh) for kind in kinds]))
        return lambda arrays: held.pop()

    def lay(self) -> None:
        """Lay what is not there: a step may consume what it is given."""
        for held, make in self._laid:
            if not held:
                held.append(jax.block_until_ready(make()))


def _zeros(kind: ArrayType, mesh: Mesh) -> jax.Array:
    host = np.zeros(kind.shape, kind.dtype)
    return jax.make_array_from_callback(kind.shape, kind.sharding(mesh), lambda box: host[box])


@lru_cache
def transport() -> PullTransport:
    """A transport that stays until the process ends: what is offered must find its taker."""
    return PullTransport(this_job())


def transfers(width: str, count: str) -> float:
    """Seconds that an activation takes from the first process to the second, on the second."""
    meshes = [Mesh(np.array([_first_of(p)], dtype=object), ("one",)) for p in range(2)]
    kind = ArrayType((ROWS, int(width)), np.dtype(np.float32), PartitionSpec())
    ends = Endpoint(meshes[0]), Endpoint(meshes[1])
    copy = transport().copier([Route(kind, kind)], *ends, int(width))
    is_first = jax.process_index() == 0
    ones = np.ones(kind.shape, np.float32)
    array = jax.device_put(ones, kind.sharding(meshes[0])) if is_first else None
    taken: list[float] = []
    for _ in range(int(count)):
        began = time.perf_counter()
        jax.block_until_ready(copy([array]))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _first_of(process: int) -> Any:
    return next(d for d in jax.devices() if d.process_index == process)


# -- beside the jobs ---------------------------------------------------------------------------


@dataclass
class Timings:
    """Of each round of a job: seconds of a step, and of the slowest host an instruction.

    `jax` are those of the same host within JAX, `still` those of a step in which nothing travels.
    """

    steps: list[float]
    hosts: list[float]
    jax: list[float]
    still: list[float]
    whole: list[float]  # seconds of the slowest host a step

    def add(self, told: Sequence[dict[str, float]]) -> None:
        """Add what the processes of a job tell of a round."""
        self.steps.append(max(t["step"] for t in told))
        self.still.append(max(t["still"] for t in told))
        slowest = max(told, key=lambda t: t["host"] / t["instructions"])
        self.whole.append(max(t["host"] for t in told))
        self.hosts.append(slowest["host"] / slowest["instructions"])
        self.jax.append(slowest["jax"] / slowest["instructions"])

    @property
    def own(self) -> list[float]:
        """Seconds of the host an instruction beyond those in JAX."""
        return [host - jax for host, jax in zip(self.hosts, self.jax, strict=True)]


def compared(jobs: dict[tuple[int, int], StandingJob], width: int, options: Any) -> dict[str, Any]:
    """A plan in all jobs, in turn."""
    timings = {shape: Timings([], [], [], [], []) for shape in jobs}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        state = jax.eval_shape(lambda: create(width))
        plan = autopar.plan(train, state, batch_of(width), cluster=f"{DEVICES}xcpu", **options)
        plan.save(file.name)
        for number in range(ROUNDS):
            for shape, job in jobs.items():
                words = ("benchmarks.bench_processes:steps", file.name, str(width), str(STEPS))
                told = job.results(*words)
                if number:  # the first compiles
                    timings[shape].add(told)
        alone, *others = jobs
        walked = jobs[alone].results("benchmarks.bench_processes:walk", file.name, str(width))

    def each(of: Callable[[Timings], Sequence[float]], scale: float) -> dict[str, float]:
        return {_name(shape): _rounded(of(timing), scale) for shape, timing in timings.items()}

    def over_one(of: Callable[[Timings], Sequence[float]]) -> dict[str, float]:
        one = of(timings[alone])
        return {_name(shape): _rounded(_ratios(of(timings[shape]), one), 1) for shape in others}

    return {
        "width": width,
        "plan": " ".join(map(str, options.values())),
        "step_ms": each(lambda t: t.steps, 1e3),
        "still_ms": each(lambda t: t.still, 1e3),
        "host_ms": each(lambda t: t.whole, 1e3),
        "host_us_an_instruction": each(lambda t: t.hosts, 1e6),
        "jax_us_an_instruction": each(lambda t: t.jax, 1e6),
        "own_us_an_instruction": each(lambda t: t.own, 1e6),
        "walk_us_an_instruction": _rounded(walked, 1e6),
        "over_one_process": over_one(lambda t: t.steps),
        "still_over_one_process": over_one(lambda t: t.still),
    }


def plainly(jobs: dict[tuple[int, int], StandingJob], width: int, size: int) -> dict[str, Any]:
    """Plain jit on meshes of so many devices in all jobs, in turn."""
    told = _in_turn(jobs, "plain_steps", str(width), str(size), str(STEPS))
    taken = {shape: [max(own) for own in rounds] for shape, rounds in told.items()}
    return {
        "width": width,
        "plain jit on meshes of": size,
        "step_ms": {_name(s): _rounded(t, 1e3) for s, t in taken.items()},
        "jit_over_one_process": _over_first(taken),
    }


def barely(jobs: dict[tuple[int, int], StandingJob], width: int) -> dict[str, Any]:
    """Stages by hand in the jobs of one process and of two, in turn."""
    few = {shape: job for shape, job in jobs.items() if shape[0] <= 2}
    told = _in_turn(few, "bare_steps", str(width), str(STEPS))
    steps = {shape: [max(t["step"] for t in own) for own in told[shape]] for shape in few}
    hosts = {shape: [max(t["host"] for t in own) for own in told[shape]] for shape in few}
    calls = {
        shape: [max(t["host"] / t["calls"] for t in own) for own in told[shape]] for shape in few
    }
    return {
        "width": width,
        "bare_step_ms": {_name(s): _rounded(t, 1e3) for s, t in steps.items()},
        "bare_host_ms": {_name(s): _rounded(t, 1e3) for s, t in hosts.items()},
        "bare_host_us_a_call": {_name(s): _rounded(t, 1e6) for s, t in calls.items()},
        "bare_over_one_process": _over_first(steps),
    }


def _in_turn(
    jobs: dict[tuple[int, int], StandingJob], scenario: str, *words: str
) -> dict[tuple[int, int], list[Any]]:
    """What the processes of each job tell, round by round."""
    told: dict[tuple[int, int], list[Any]] = {shape: [] for shape in jobs}
    for number in range(ROUNDS):
        for shape, job in jobs.items():
            own = job.results(f"benchmarks.bench_processes:{scenario}", *words)
            if number:  # the first compiles
                told[shape].append(own)
    return told


def _over_first(taken: dict[tuple[int, int], list[float]]) -> dict[str, float]:
    first, *others = taken
    return {_name(s): _rounded(_ratios(taken[s], taken[first]), 1) for s in others}


def _ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(some, others, strict=True)]


def _rounded(numbers: Sequence[float], scale: float) -> float:
    """The median to three digits."""
    return float(f"{statistics.median(numbers) * scale:.3g}")


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def main() -> None:
    """Tiny layers show the host's share, wide ones the work's."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with ExitStack() as stack:
        jobs = {shape: stack.enter_context(standing_job(*shape)) for shape in SHAPES}
        for width in map(int, sys.argv[1:] or ("16", "256", "1024")):
            words = ("benchmarks.bench_processes:transfers", str(width), "100")
            bare = jobs[SHAPES[1]].results(*words)[1]
            print(json.dumps({"width": width, "bare_transfer_ms": _rounded([bare], 1e3)}))
            for size in MESHES:
                print(json.dumps(plainly(jobs, width, size)), flush=True)
            # The stages by hand are those of the second plan.
            for options in PLANS:
                print(json.dumps(compared(jobs, width, options)), flush=True)
            print(json.dumps(barely(jobs, width)), flush=True)


if __name__ == "__main__":
    main()
