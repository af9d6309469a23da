"""Ctrl-C gets through to whoever plans while HiGHS solves, and HiGHS stops."""

import signal
import subprocess
import sys

import highspy
import pytest

from autopar.passes.shard.solver.integer_program import run_highs

# Market splitting (Cornuejols and Dawande, 1998): hopeless for branch and bound at this size.
HARD = """
import highspy, random, signal
from autopar.passes.shard.solver.integer_program import run_highs

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent does with it
chance = random.Random(0)
solver = highspy.Highs()
solver.setOptionValue("output_flag", False)
solver.setOptionValue("threads", 1)
picks = [solver.addBinary() for _ in range(60)]
for _ in range(6):
    weights = [chance.randrange(100) for _ in picks]
    solver.addConstr(sum(w * x for w, x in zip(weights, picks)) == sum(weights) // 2)
try:
    print("solving", flush=True)
    run_highs(solver)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT for a child")
def test_ctrl_c_ends_a_search_without_end() -> None:
    command = [sys.executable, "-c", HARD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "solving\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == "interrupted\n"
    assert child.returncode == 0


def test_what_is_not_interrupted_is_solved() -> None:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    left, right = solver.addBinary(), solver.addBinary()
    solver.addConstr(left + right == 1)
    solver.setMinimize()
    solver.changeColCost(0, 2.0)
    solver.changeColCost(1, 1.0)
    run_highs(solver)
    assert solver.getSolution().col_value == [0.0, 1.0]
