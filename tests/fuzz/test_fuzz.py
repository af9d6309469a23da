"""Random programs in parallel equal plain jit; the same seed is the same program everywhere."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from tests.fuzz.case import Leaves, Outcome, differing, load, run_case, run_program
from tests.fuzz.configs import Config, config_from, draw_config
from tests.fuzz.draw import Draw
from tests.fuzz.found import FOUND
from tests.fuzz.program import Program, as_json, draw_program, from_json
from tests.fuzz.shrink import shrunk
from tests.fuzz.writing import OPS

SAMPLE = range(8)
MORE = range(8, 400)
IN_CI, LONG = (0, 2, 3), (4, 6)  # the largest programs of the sample


def check(seed: int, number: int) -> None:
    """A program in one way is equal to plain jit, or refused with words of our own."""
    program = draw_program(seed)
    config = draw_config(seed, number, program.mixes)
    outcome = run_program(program, config)
    assert outcome.kind in ("equal", "refused"), (
        f"{outcome.kind} {outcome.error}: {outcome.detail}\n"
        f"python -m tests.fuzz --shrink --seeds {seed} --config {number}\n{config}\n{program.text}"
    )


def _marks(seed: int) -> list[pytest.MarkDecorator]:
    if seed in LONG:
        return [pytest.mark.slow]
    return [pytest.mark.ci] if seed in IN_CI else []


@pytest.mark.parametrize("seed", [pytest.param(s, marks=_marks(s)) for s in SAMPLE])
def test_a_sample(seed: int) -> None:
    check(seed, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE)
def test_many(seed: int) -> None:
    check(seed, 0)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name: str) -> None:
    text, config = FOUND[name]
    outcome = run_case(text, config)
    assert outcome.kind == "equal", f"{outcome.kind} {outcome.error}: {outcome.detail}"


# -- the fuzzer itself ---------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_seed_is_one_program_everywhere() -> None:
    words = [Draw(7, 1).below(1000), Draw(7, 2).below(1000), Draw(8, 1).below(1000)]
    assert words == WORDS
    texts = "".join(draw_program(seed).text for seed in range(8))
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == TEXTS


WORDS = [757, 508, 703]
TEXTS = "65082ec7d5890842"


def test_there_are_enough_kinds() -> None:
    assert len(OPS) >= 400
    met = {kind for seed in range(60) for kind in draw_program(seed).kinds}
    assert len(met & set(OPS)) >= 170


@pytest.mark.parametrize("seed", range(3))
def test_a_program_is_plain_data(seed: int) -> None:
    program = draw_program(seed)
    config = draw_config(seed, 0, program.mixes)
    assert from_json(json.loads(json.dumps(as_json(program)))) == program
    assert config_from(json.loads(json.dumps(config.as_json()))) == config


def test_a_step_that_is_wrong_is_told() -> None:
    def leaves(a: list[float], n: list[int]) -> list[Leaves]:
        return [{"a": np.array(a, np.float32), "n": np.array(n)}]

    plain, quiet = leaves([1, 1, 1], [0, 1, 2]), [{"a": 0.0, "n": 0.0}]
    off = leaves([1, 1, 1.001], [0, 1, 2])
    assert differing(plain, plain, quiet) == []
    assert len(differing(off, plain, quiet)) == 1
    assert differing(off, plain, [{"a": 1e-3, "n": 0.0}]) == []
    assert len(differing(leaves([1, 1, 1], [1, 1, 2]), plain, quiet)) == 1
    assert len(differing(leaves([1, float("nan"), 1], [0, 1, 2]), plain, quiet)) == 1


def test_a_program_that_jax_refuses_is_void() -> None:
    text = draw_program(0).text.replace("    return loss, (rows, told)", "    return loss")
    assert run_case(text, Config(mesh=(8,), method="dp")).kind == "void"


def test_the_smallest_failing_program_is_found() -> None:
    program = draw_program(4)
    wanted = program.blocks[-1].ops[-1]

    def tries(p: Program, config: Config) -> Outcome:
        fails = any(wanted in block.ops for block in p.blocks)
        return Outcome("WRONG" if fails else "equal")

    found = shrunk(program, Config(mesh=(2, 4)), Outcome("WRONG"), tries)
    (block,) = found.program.blocks
    assert block.ops == (wanted,)
    assert block.transforms == ()
    assert (found.program.optimizer, found.config.mesh) == ("sgd", (8,))
    assert load(found.program.text, "<smallest>").make_batch(0)
