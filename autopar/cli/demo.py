"""`autopar demo`: plans a small GPT for eight virtual devices, checks it and trains it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar import api, demo
from autopar.cli.console import err, out, print_json
from autopar.cli.group import IMPOSSIBLE
from autopar.cli.plan import Count
from autopar.ir.codec import Json
from autopar.ir.plan import Plan
from autopar.ir.text_file import PLAN, check_output
from autopar.progress import progress
from autopar.report.plan import collectives, headline, memory, parameters, pipeline
from autopar.report.rows import plan_data
from autopar.report.training import Learnt, Line, comparison, learnt

_DEVICES = 8


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    steps: int | None
    mesh: str | None
    method: str
    quick: bool
    output: Path | None
    as_json: bool
    stages: Count
    microbatches: Count | None
    schedule: str


def run_demo(asked: Asked) -> None:
    """Plan, compare and train; exits with 1 where the steps differ or nothing was learnt."""
    start = time.perf_counter()
    if asked.output is not None:
        check_output(asked.output, PLAN)
    demo.open_devices(_DEVICES)
    config = demo.QUICK if asked.quick else demo.CONFIG
    config = replace(config, steps=asked.steps or config.steps)
    step = api.parallelize(
        demo.train_step,
        cluster=f"{_DEVICES}xcpu",
        mesh=asked.mesh,
        method=asked.method,
        stages=asked.stages,
        microbatches=asked.microbatches,
        schedule=asked.schedule,
    )
    console = err() if asked.as_json else out()
    planned = step.planned(*demo.example_args(config))
    plan = planned.plan
    if asked.output is not None:
        plan.save(asked.output)
    for part in _parts(planned):
        console.print(part)
        console.print()
    with progress("demo", "reading the corpus") as told:
        corpus = demo.load_corpus()
        state, compared = demo.compare(step, config, corpus, told.say)
    pairs = tuple(zip(compared.losses, compared.plain_losses, strict=True))
    ours, rounding, limit = compared.parallel, compared.reordered, compared.limit
    lines = (
        Line("loss", ours.loss, rounding.loss, limit.loss),
        Line("parameters", ours.parameters, rounding.parameters, limit.parameters),
        Line("Adam's mean gradient", ours.mean_gradient, rounding.mean_gradient,
             limit.mean_gradient),
    )  # fmt: skip
    console.print(comparison(pairs, lines, compared.holds))
    console.print()
    found = _trained(step, config, corpus, state)
    console.print(learnt(found))
    real = plan.rate(found.seconds / max(1, len(found.losses)))
    console.print(f"rate: {real} on this machine; predicted {plan.rate()}", style="bright_black")
    seconds = time.perf_counter() - start
    console.print(f"all in all {seconds:.0f} s", style="bright_black")
    if asked.as_json:
        _print_data(plan, compared, found, seconds)
    if not (compared.holds and found.holds):
        sys.exit(IMPOSSIBLE)


def _parts(planned: api.Planned) -> Iterator[RenderableType]:
    plan = planned.plan
    yield headline(plan)
    if not plan.is_one_program:
        yield pipeline(plan, planned.programs.timing.simulation)
    yield collectives(plan)
    yield parameters(plan, 6)
    if plan.prediction.peak is not None:
        yield memory(plan)


def _trained(
    step: api.ParallelStep[..., Any], config: demo.GptConfig, corpus: demo.Corpus, state: object
) -> Learnt:
    """Train behind a progress bar, then judge."""
    start = time.perf_counter()
    losses: list[float] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    console = err()
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        done = demo.COMPARED_STEPS
        task = progress.add_task("training", total=config.steps, completed=done, loss="")
        for trained in demo.train(step, config, corpus, state):
            losses.append(trained.loss)
            state = trained.state
            progress.update(task, completed=trained.step, loss=f"{trained.loss:.3f}")
    seconds = time.perf_counter() - start
    with err().status("judging it on held-out text"):
        held_out = demo.held_out_loss(state, corpus, config)
    return Learnt(tuple(losses), held_out, demo.entropy(corpus.held_out), seconds)


def _print_data(plan: Plan, compared: demo.Comparison, found: Learnt, seconds: float) -> None:
    equality: dict[str, Json] = {
        "losses": list(compared.losses),
        "plain_losses": list(compared.plain_losses),
        "relative_difference": asdict(compared.parallel),
        "rounding_alone": asdict(compared.reordered),
        "limit": asdict(compared.limit),
        "holds": compared.holds,
    }
    training: dict[str, Json] = {
        "losses": list(found.losses),
        "held_out_nats": found.held_out,
        "held_out_bits": found.held_out / math.log(2),
        "unigram_nats": found.unigram,
        "unigram_bits": found.unigram / math.log(2),
        "seconds": found.seconds,
        "holds": found.holds,
    }
    ok = compared.holds and found.holds
    print_json(
        {"plan": plan_data(plan), "equality": equality, "training": training, "seconds": seconds,
         "ok": ok}
    )  # fmt: skip
