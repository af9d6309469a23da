"""A process of those over which `autopar verify --processes` runs a plan."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar import api, plans
from autopar.cli.loading import load_target


def main() -> None:
    """Join the others, and run the step of a plan for whoever asks."""
    plan_path, target, number, count, port = sys.argv[2:]
    plan = plans.load(Path(plan_path))
    api.open_cpu_devices(plan.device_count // int(count))
    api.distributed(f"127.0.0.1:{port}", int(count), int(number))
    loaded = load_target(target)
    step = api.under_plan(loaded.step, plan)
    api.serve(step, step.spec, loaded.args, loaded.kwargs)
