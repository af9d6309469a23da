"""The process that runs cases: a line of JSON in for each, one out."""

from __future__ import annotations

import json
import sys

import jax

from tests.fuzz.case import run_program
from tests.fuzz.configs import config_from, draw_config
from tests.fuzz.program import draw_program, from_json


def main() -> None:
    """Run the cases that come in, until no more do."""
    jax.config.update("jax_num_cpu_devices", 8)
    for line in sys.stdin:
        seed, number, program_data, config_data = json.loads(line)
        program = draw_program(seed) if program_data is None else from_json(program_data)
        if config_data is None:
            config = draw_config(seed, number, program.mixes)
        else:
            config = config_from(config_data)
        outcome = run_program(program, config)
        told = {"outcome": outcome.as_json(), "config": config.as_json(), "kinds": program.kinds}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        jax.clear_caches()


if __name__ == "__main__":
    main()
