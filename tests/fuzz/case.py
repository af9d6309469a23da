"""One case: a program run plainly and in parallel for two steps, and how the two compare.

The tolerance is the program's own noise: plain runs on inputs that differ in their last bits tell
how far its results move, so that ill-conditioned results are not mistaken for wrong ones.
"""

from __future__ import annotations

import linecache
import re
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

import autopar
from autopar.errors import AutoparError
from tests.fuzz.configs import Config
from tests.fuzz.program import Program
from tests.passes.driving import lowered, random_plan, run_listing, setting, traced

STEPS = 2
ROUNDING = 2e-5  # of a result's largest entry, whatever the noise is found to be
NARROW = 2.0**-7
LAST_BITS, MORE_BITS = 2.0**-22, (2.0**-20, 2.0**-17)

Leaves = dict[str, np.ndarray[Any, Any]]
Stepper = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a case: "equal", "refused", "WRONG", "CRASH", "hang", or "void".

    A case is void where plain JAX refuses the program itself.
    """

    kind: str
    error: str = ""
    detail: str = ""
    seconds: float = 0.0
    primitives: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """What it shares with the same failure of another program."""
        words = re.sub(r"[\d.e+-]+", "#", self.detail.splitlines()[0] if self.detail else "")
        return f"{self.kind} {self.error} {words[:60] if self.kind == 'CRASH' else ''}".strip()

    def as_json(self) -> dict[str, Any]:
        """It as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Loaded:
    """A program's functions."""

    create_state: Callable[[], Any]
    make_batch: Callable[[int], Any]
    step: Stepper


def load(text: str, name: str) -> Loaded:
    """The functions of a program's text; errors show its lines."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), names)
    return Loaded(names["create_state"], names["make_batch"], names["step"])


def run_program(program: Program, config: Config) -> Outcome:
    """What becomes of a program that a seed drew."""
    return run_case(program.text, config, f"<program {program.seed}>")


def run_case(text: str, config: Config, name: str = "<program>") -> Outcome:
    """Two plain steps beside two parallel ones."""
    began = time.process_time()
    primitives: tuple[str, ...] = ()

    def told(kind: str, error: str = "", detail: str = "") -> Outcome:
        return Outcome(kind, error, detail, round(time.process_time() - began, 2), primitives)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = load(text, name)
            state = loaded.create_state()
            batches = [loaded.make_batch(i) for i in range(STEPS)]
            made = jax.make_jaxpr(loaded.step)(state, batches[0])
            primitives = tuple(sorted(_primitives(made.jaxpr)))
            plain_step = jax.jit(loaded.step)
            plain = stepped(plain_step, state, batches)
        except Exception as error:
            return told("void", type(error).__name__, _shown(error))
        try:
            found = _parallel(loaded, config, state, batches)
        except AutoparError as error:
            return told("refused", type(error).__name__, str(error))
        except Exception as error:
            return told("CRASH", type(error).__name__, _shown(error))
        narrow = "float16" in text  # bfloat16 too
        noise = noise_of(plain_step, plain, state, batches, [LAST_BITS] * 3)
        faults = differing(found, plain, noise, narrow)
        if faults:
            more = noise_of(plain_step, plain, state, batches, MORE_BITS * 6)
            still = differing(found, plain, more, narrow)
            if still and _agrees_op_by_op(loaded, state, batches, found, more, narrow):
                return told("equal", "unlike jit", "\n".join(still))
            if still:
                return told("WRONG", "", "\n".join(still))
            return told("equal", "noisy", "\n".join(faults))
    return told("equal")


def _agrees_op_by_op(
    loaded: Loaded,
    state: Any,
    batches: Sequence[Any],
    found: Sequence[Leaves],
    noise: Sequence[dict[str, float]],
    narrow: bool,
) -> bool:
    """True if a run equals the program where XLA sees one op at a time: it is jit that is off.

    XLA may round a value otherwise in each fusion that computes it: `h == max(h)` holds nowhere.
    """
    with jax.disable_jit():
        exact = stepped(loaded.step, state, batches)
    return not differing(found, exact, noise, narrow)


def _parallel(loaded: Loaded, config: Config, state: Any, batches: Sequence[Any]) -> list[Leaves]:
    if config.random_plan is not None:
        return _by_random_plan(loaded, config, state, batches[0])
    options = config.options(state)
    step = autopar.parallelize(loaded.step, **options)
    if config.memory_share is not None:
        roomy = autopar.plan(loaded.step, state, batches[0], **{**options, "method": "dp"})
        peak = roomy.prediction.peak_bytes
        step = autopar.parallelize(
            loaded.step, **options, memory_gb=config.memory_share * peak / 2**30
        )
    return stepped(step, state, batches)


def _by_random_plan(loaded: Loaded, config: Config, state: Any, batch: Any) -> list[Leaves]:
    """One step by a legal plan that nobody would want."""
    assert config.mesh is not None
    assert config.random_plan is not None
    step = traced(loaded.step, state, batch)
    given = setting(config.mesh)
    plan = random_plan(step.graph, given, config.random_plan)
    return [_leaves(run_listing(step, lowered(step.graph, plan, given), given))]


def stepped(step: Stepper, state: Any, batches: Sequence[Any]) -> list[Leaves]:
    """State and results of every step, copied to the host before the next one consumes them."""
    found: list[Leaves] = []
    for batch in batches:
        state, told = step(state, batch)
        found.append(_leaves((state, told)))
    return found


def _leaves(tree: Any) -> Leaves:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(_data(leaf)) for path, leaf in flat}


def _data(leaf: Any) -> Any:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def noise_of(
    step: Stepper,
    plain: Sequence[Leaves],
    state: Any,
    batches: Sequence[Any],
    sizes: Sequence[float],
) -> list[dict[str, float]]:
    """How far each result moves when its inputs do by so much of themselves."""
    worst = [dict.fromkeys(leaves, 0.0) for leaves in plain]
    for i, size in enumerate(sizes):
        rng = np.random.default_rng(i)
        moved = [_moved(batch, size, rng) for batch in batches]
        for leaves, other, most in zip(
            plain, stepped(step, _moved(state, size, rng), moved), worst, strict=True
        ):
            for path, value in leaves.items():
                most[path] = max(most[path], _gap(other[path], value))
    return worst


def _moved(tree: Any, size: float, rng: np.random.Generator) -> Any:
    def move(leaf: Any) -> Any:
        if leaf.dtype != np.float32:
            return leaf
        wide = np.asarray(leaf) * (1 + size * rng.standard_normal(leaf.shape))
        return wide.astype(np.float32)

    return jax.tree.map(move, tree)


def differing(
    found: Sequence[Leaves],
    plain: Sequence[Leaves],
    noise: Sequence[dict[str, float]],
    narrow: bool = False,
) -> list[str]:
    """Where a run differs from the plain one by more than its noise."""
    faults: list[str] = []
    for number, (mine, theirs, moves) in enumerate(zip(found, plain, noise, strict=False)):
        if sorted(mine) != sorted(theirs):
            return [f"step {number}: results are {sorted(mine)}, not {sorted(theirs)}"]
        for path, value in theirs.items():
            got = mine[path]
            if got.shape != value.shape or got.dtype != value.dtype:
                faults.append(
                    f"step {number}: {path} is {got.dtype}{got.shape}, not "
                    f"{value.dtype}{value.shape}"
                )
                continue
            gap, most = _gap(got, value), 6 * moves[path]
            if np.issubdtype(value.dtype, np.floating) and value.size:
                finite = np.abs(value[np.isfinite(value)])
                largest = float(finite.max()) if finite.size else 0.0
                most += (NARROW if narrow else ROUNDING) * max(largest, 1e-6)
            if not gap <= most:
                faults.append(f"step {number}: {path} is off by {gap:.3g}, allowed {most:.3g}")
    return faults


def _gap(got: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> float:
    if not value.size or np.array_equal(got, value, equal_nan=_is_float(value)):
        return 0.0
    if not _is_float(value):
        return float(np.max(np.abs(got.astype(np.float64) - value.astype(np.float64))))
    same = (got == value) | (np.isnan(got) & np.isnan(value))
    gap = np.where(same, 0.0, np.abs(got.astype(np.float64) - value.astype(np.float64)))
    worst = float(np.max(gap))
    return worst if np.isfinite(worst) else float("inf")


def _is_float(value: np.ndarray[Any, Any]) -> bool:
    return bool(np.issubdtype(value.dtype, np.inexact))


def _primitives(jaxpr: Any) -> set[str]:
    """Every primitive of a program, those in inner ones too."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_holds_equations):
            if _holds_equations(value):
                found |= _primitives(getattr(value, "jaxpr", value))
    return found


def _holds_equations(value: Any) -> bool:
    return getattr(getattr(value, "jaxpr", value), "eqns", None) is not None


def _shown(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames]
    ours = [w for w in where if "site-packages" not in w][-8:]
    return f"{str(error)[:1500]}\n" + "\n".join(ours)
