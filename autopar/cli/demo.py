"""`autopar demo`: plans a small GPT for eight virtual devices, checks it and trains it."""

from __future__ import annotations

import sys
import time
from typing import Unpack

import click

from autopar.cli.console import IMPOSSIBLE, told
from autopar.cli.plan import method_option
from autopar.cli.stages import Cut, stage_options
from autopar.errors import InputError


@click.command("demo")
@click.option("--steps", type=click.IntRange(min=4), help="How many steps to train for.")
@click.option("--mesh", help="Sizes or named sizes: 2,4 or data=2,model=4. Default: searched.")
@method_option
@stage_options
@click.option("--quick", is_flag=True, help="A much smaller model and few steps.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@told
def demo_command(
    steps: int | None,
    mesh: str | None,
    method: str,
    quick: bool,
    as_json: bool,
    **cut: Unpack[Cut],
) -> None:
    """Plan a byte-level GPT for 8 virtual CPU devices, compare its first steps, and train it.

    It learns from the source text of Python's standard library. Exits with 1 where the steps
    differ from the plain ones, or the held-out loss is not below the unigram entropy.
    """
    start = time.perf_counter()
    try:
        # Late, because flax and optax are an extra that the other commands do without.
        from autopar.cli.training import Asked, run_demo
    except ModuleNotFoundError as error:
        raise InputError(
            f"the demo needs {error.name}, which is not installed: pip install 'autopar[demo]'"
        ) from error
    if not run_demo(Asked(steps, mesh, method, quick, as_json, **cut), start):
        sys.exit(IMPOSSIBLE)
