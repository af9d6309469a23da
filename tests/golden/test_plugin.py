"""The plugin `autopar_golden`, in test files of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.house.source import ROOT

pytest_plugins = ["pytester"]

PLANNED = """
import pytest
import autopar

def planned(method="dp"):
    return autopar.load(method + ".json")
"""
TEST = PLANNED + "\ndef test_step(autopar_golden):\n    autopar_golden(planned())\n"
KEPT = Path("golden", "test_it", "test_step.plan.json")


def train_step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


@pytest.fixture(scope="module")
def plans() -> dict[str, autopar.Plan]:
    shape: Any = jax.ShapeDtypeStruct
    sizes = shape((64, 64), "float32"), shape((32, 64), "float32")
    chosen = {"cluster": "8xcpu", "mesh": "8"}
    return {m: autopar.plan(train_step, *sizes, method=m, **chosen) for m in ("dp", "fsdp")}


@pytest.fixture(autouse=True)
def saved(plans: dict[str, autopar.Plan], pytester: pytest.Pytester) -> None:
    """The plans that the tests in test files read."""
    for method, plan in plans.items():
        autopar.save(plan, pytester.path / f"{method}.json")


def ran(pytester: pytest.Pytester, text: str, *words: str) -> pytest.RunResult:
    """The test file of that text, run."""
    pytester.makepyfile(test_it=text)
    quick = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    return pytester.runpytest_inprocess(*quick, *words)


def test_a_missing_plan_fails_and_says_how_to_make_it(pytester: pytest.Pytester) -> None:
    done = ran(pytester, TEST)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [f"*there is no golden plan {KEPT}.", "*pytest 'test_it.py::test_step' --autopar-update"]
    )
    assert not (pytester.path / KEPT).exists()


def test_update_keeps_the_plan_and_tells_so(pytester: pytest.Pytester) -> None:
    done = ran(pytester, TEST, "--autopar-update")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines([f"autopar_golden: wrote {KEPT}"])
    first = (pytester.path / KEPT).read_bytes()
    again = ran(pytester, TEST)
    again.assert_outcomes(passed=1)
    again.stdout.no_fnmatch_line("autopar_golden: wrote*")
    ran(pytester, TEST, "--autopar-update").assert_outcomes(passed=1)
    assert (pytester.path / KEPT).read_bytes() == first
    assert [p.name for p in (pytester.path / KEPT).parent.iterdir()] == [KEPT.name]


def test_another_decision_fails_with_the_differences(pytester: pytest.Pytester) -> None:
    ran(pytester, TEST, "--autopar-update").assert_outcomes(passed=1)
    kept = (pytester.path / KEPT).read_bytes()
    done = ran(pytester, TEST.replace("planned())", "planned('fsdp'))"))
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        ["*the plan is not the golden one*", "*diff train_step: kept -> now*", "*all-gather*"]
    )
    done.stdout.no_fnmatch_line("*Traceback*")
    assert (pytester.path / KEPT).read_bytes() == kept


SLOWER = (
    PLANNED
    + """
from dataclasses import replace

def test_step(autopar_golden):
    plan = planned()
    p = plan.prediction
    now = replace(p, peak_bytes=int(p.peak_bytes * (1.005 if {wide} else 1)))
    origin = replace(plan.origin, jax_minor="9.9" if {wide} else "0.1")
    autopar_golden(replace(plan, prediction=now, origin=origin), tolerance={tolerance})
"""
)


@pytest.mark.parametrize(("tolerance", "outcome"), [(0.01, "passed"), (0.001, "failed")])
def test_predictions_may_be_off_by_the_tolerance(
    pytester: pytest.Pytester, tolerance: float, outcome: str
) -> None:
    ran(pytester, SLOWER.format(wide=False, tolerance=0), "--autopar-update")
    done = ran(pytester, SLOWER.format(wide=True, tolerance=tolerance))
    done.assert_outcomes(**{outcome: 1})


def test_every_test_case_and_name_has_a_file_of_its_own(pytester: pytest.Pytester) -> None:
    text = (
        PLANNED
        + """
class TestSteps:
    @pytest.mark.parametrize("method", ["dp", "fsdp"])
    def test_method(self, autopar_golden, method):
        autopar_golden(planned(method))
        autopar_golden(planned("dp"), name=f"{method}/other")
"""
    )
    ran(pytester, text, "--autopar-update").assert_outcomes(passed=2)
    found = {p.name for p in (pytester.path / KEPT).parent.iterdir()}
    assert found == {
        "TestSteps.test_method-dp.plan.json",
        "TestSteps.test_method-fsdp.plan.json",
        "dp-other.plan.json",
        "fsdp-other.plan.json",
    }
    ran(pytester, text).assert_outcomes(passed=2)


def test_two_plans_of_one_name_are_refused(pytester: pytest.Pytester) -> None:
    text = TEST + "    autopar_golden(planned('fsdp'))\n"
    done = ran(pytester, text, "--autopar-update")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*two plans of this test are called 'test_step'*"])


def test_a_damaged_file_fails_and_says_how_to_mend_it(pytester: pytest.Pytester) -> None:
    ran(pytester, TEST, "--autopar-update").assert_outcomes(passed=1)
    path = pytester.path / KEPT
    path.write_text(path.read_text().replace('"data"', '"dada"', 1))
    done = ran(pytester, TEST)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*is damaged*", "*--autopar-update"])


@pytest.mark.slow
def test_workers_write_and_tell(pytester: pytest.Pytester) -> None:
    text = TEST + "def test_other(autopar_golden):\n    autopar_golden(planned('fsdp'))\n"
    done = ran(pytester, text, "--autopar-update", "-n", "2")
    done.assert_outcomes(passed=2)
    done.stdout.fnmatch_lines([f"autopar_golden: wrote {KEPT}"])
    assert len(list((pytester.path / KEPT).parent.iterdir())) == 2


def test_the_page_works_as_it_stands(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "how-to" / "golden-plans.md").read_text(encoding="utf-8")
    block = page.split("```python\n")[1].split("```")[0]
    done = ran(pytester, block, "--autopar-update")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["autopar_golden: wrote */test_plan_on_one_host.plan.json"])
    ran(pytester, block.replace("mesh=8", 'mesh=8, method="fsdp"')).assert_outcomes(failed=1)


def test_the_plugin_loads_nothing_heavy() -> None:
    """Its file alone: what the package's own front imports is the front's business."""
    code = (
        "import sys, importlib.util; before = set(sys.modules);"
        "import pytest; import autopar.golden as g;"
        "spec = importlib.util.spec_from_file_location('alone', g.__file__);"
        "[sys.modules.pop(m) for m in list(sys.modules) if m.split('.')[0] in"
        " ('autopar', 'jax', 'rich')];"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec));"
        "assert not {m.split('.')[0] for m in sys.modules} & {'autopar', 'jax', 'rich'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
