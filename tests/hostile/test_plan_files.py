"""Plan files that were tampered with: refused where they say what cannot be, or they run right."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import PlanFileError, PlanMismatchError
from autopar.exporting.python import python_module
from autopar.exporting.rules import flax_text, maxtext_text, path_rules
from autopar.ir.batching import Batching
from autopar.ir.plan_file import plan_from_json
from autopar.ir.record import Record
from tests.cli.running import run
from tests.hostile.asking import outcome, ran
from tests.hostile.mutating import mutated, redecided, with_checksum
from tests.hostile.steps import Base, bases

Change = Callable[[dict[str, Any]], object]
NAMES = (
    'x"\nprint("RAN")\n#', "x'\\", '"""\nprint("RAN")\n"""', "*/ RAN /*", "a\u2028b", "\u00e9",
    "\ud800", "\\N{BULLET}", "{RAN}", "# RAN", "\\", "\r\nRAN = 1",
)  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> dict[str, Base]:
    return bases()


def tampered(base: Base, change: Change) -> str:
    body = json.loads(json.dumps(base.data))
    change(body)
    del body["checksum"]
    return with_checksum(body)


# -- mutations ----------------------------------------------------------------------------------


def _mutations(plans: dict[str, Base], seeds: range, folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    names = list(plans)
    for seed in seeds:
        base = plans[names[seed % len(names)]]
        (folder / "good.json").write_text(json.dumps(base.data))
        try:
            found[outcome(base, mutated(base.data, seed), folder)] += 1
        except Exception as error:
            raise AssertionError(f"mutation {seed} of {base.name}") from error
    return found


def test_a_sample_of_mutations_is_refused_or_runs_right(
    plans: dict[str, Base], tmp_path: Path
) -> None:
    found = _mutations(plans, range(40), tmp_path)
    assert found["refused"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_2000_mutations_are_refused_or_run_right(
    plans: dict[str, Base], tmp_path: Path, part: int
) -> None:
    found = _mutations(plans, range(100 * part, 100 * part + 100), tmp_path)
    assert found["refused"] > 50


@pytest.mark.slow
def test_untouched_plans_answer_everything_and_run(plans: dict[str, Base], tmp_path: Path) -> None:
    for base in plans.values():
        (tmp_path / "good.json").write_text(json.dumps(base.data))
        assert outcome(base, tampered(base, lambda body: None), tmp_path) == "runs"


# -- single changes, and the place that is told -------------------------------------------------


def _at(*keys: str | int, to: Any) -> Change:
    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to

    return change


def _lies(*place: str | int, to: Any) -> Change:
    """The same in the sharding of the first submesh."""
    return _at("submeshes", 0, "sharding", *place, to=to)


@pytest.mark.parametrize(
    ("base", "change", "told"),
    [
        ("one", _lies("values", "%0", to=-1),
         r"values\['%0'\]: expected the number of one of"),
        ("one", _lies("values", "%0", to=True),
         r"values\['%0'\]: expected a whole number"),
        ("one", _lies("values", "%0", to=999),
         r"values\['%0'\]: expected the number of one of"),
        ("one", _lies("values", "%999", to=0), "names %999, which graph mlp has not"),
        ("one", _lies("shared_partials", 0, 1, 0, to=-1), "has no operands"),
        ("one", _lies("shared_partials", 0, 0, 0, to=-1), r"has no op at \[-1\]"),
        ("one", _lies("shared_partials", 0, 0, 0, to=-(10**28)),
         r"shared_partials\[0\]\[0\]\[0\]"),
        ("one", _lies("assignments", 0, 0, to=[10**6]), r"has no op at \[1000000\]"),
        ("one", _lies("assignments", 0, 1, to=[0]), "cannot be cut by factors"),
        ("one", _lies("mesh", "sizes", 0, to=3), "is not held as"),
        ("one", _lies("mesh", "names", 0, to="model"),
         r"mesh: mesh axis names .* not distinct"),
        ("one", _lies("mesh", to={"names": ["a"], "sizes": [2**62]}),
         "no plan is for a mesh"),
        ("one", _at("shardings", 0, "dims", 0, to=["data", "data"]),
         r"f32\[32\] is not held as \[data\+data\]"),
        ("one", _at("shardings", 0, "dims", 0, to=["x"]), r"f32\[32\] is not held as \[x\]"),
        ("one", _at("origin", "memory_bytes", to=0), "limit"),
        ("one", _at("schedule", to="1f1b"),
         "1 stages and 1 microbatches cannot run under schedule '1f1b'"),
        ("one", _at("extra", to=1), "there should be no 'extra'"),
        ("one", _at("prediction", "seconds", to=-1.0), "negative"),
        ("one", _at("prediction", "traffic", 0, "axes", to=["x"]), "there is no"),
        ("one", _at("arguments", 0, 0, to="other"), "the arguments are not those of"),
        ("one", _at("origin", "step", to="\x1b[2J"), "step: expected a text to be printed"),
        ("one", _lies("outcome", "status", to="best"),
         "outcome.status: expected one of optimal"),
        ("one", _at("record", "graph", 0, to="graph ("), "expected"),
        ("stages", _at("stages", 0, "stop", to=-3), "stage 0 runs"),
        ("stages", _at("stages", 1, "submesh", to=7), "submeshes that there are not"),
        ("stages", _at("stages", 0, "cuts", to=[99]), "cuts"),
        ("stages", _at("submeshes", 0, "devices", to=[4, 5, 6, 7]), "share a device"),
        ("stages", _at("submeshes", 0, "devices", to=[0, 1]), "not a block of"),
        ("stages", _at("prediction", "send_seconds", to=[]), "transfers"),
        ("stages", _at("microbatches", to=3), "cannot be cut into 3"),
        ("stages", _at("record", "cutting", "moments", 0, to=["loop", [5]]), "no op runs loop 5"),
        ("stages", _at("record", "cutting", "moments", 0, to=[]), "expected"),
        ("stages", _at("record", "cutting", "rows", "%5", 0, to=-1), "has no rows"),
        ("stages", _at("record", "cutting", "accumulators", 0, 2, to="x"), "cannot be combined"),
        ("stages", _at("record", "cutting", "index", to="%0x"), "is no input"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(
    plans: dict[str, Base], base: str, change: Change, told: str
) -> None:
    with pytest.raises(PlanFileError, match=told):
        plan_from_json(tampered(plans[base], change))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 9, "x": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply|damaged"),
        ('{"format": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"format": 9, "x": 1e400}', "damaged"),
        ('{"format": 9, "x": NaN}', "NaN is no number"),
        ('{"format": 9, "format": 4}', "the key 'format' twice"),
        ('{"format": "' + "x" * 9000 + '"}', r"has plan format 'x+\.\.\., but"),
    ],
)
def test_json_that_no_plan_is_made_of(text: str, told: str) -> None:
    with pytest.raises(PlanFileError, match=told) as caught:
        plan_from_json(text)
    assert len(str(caught.value)) < 300


# -- plans that could be, and would compute something else -----------------------------------------


def _redecisions(plans: dict[str, Base], seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    names = list(plans)
    for seed in seeds:
        base = plans[names[seed % len(names)]]
        try:
            plan = plan_from_json(redecided(base.data, seed))
        except PlanFileError:
            found["refused"] += 1
            continue
        try:
            found[ran(base, plan)] += 1
        except Exception as error:
            raise AssertionError(f"other decisions {seed} of {base.name}") from error
    return found


@pytest.mark.ci
def test_a_sample_of_other_decisions_is_refused_or_runs_right(plans: dict[str, Base]) -> None:
    found = _redecisions(plans, range(20))
    assert found["runs"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_1000_other_decisions_are_refused_or_run_right(plans: dict[str, Base], part: int) -> None:
    found = _redecisions(plans, range(100 * part, 100 * part + 100))
    assert found["runs"] > 10


def _sharding_of(base: Base, dims: list[list[str]], partial: list[str]) -> tuple[Base, int]:
    """The plan with one more sharding, and its number."""
    body = json.loads(json.dumps(base.data))
    body["shardings"].append({"dims": dims, "partial": partial})
    return replace(base, data=body), len(body["shardings"]) - 1


def _runs_or_is_refused(base: Base, text: str) -> str:
    try:
        autopar.parallelize(base.step, plan=plan_from_json(text))(*base.fresh())
    except (PlanFileError, PlanMismatchError):
        return "refused"
    return "runs"


def test_a_value_that_is_no_sum_may_not_be_called_one(plans: dict[str, Base]) -> None:
    """tanh of partial sums is not the partial sums of tanh."""
    graph = plans["one"].data["record"]["graph"]
    line = next(line for line in graph if "= tanh(" in line)
    name = line.split(":")[0].strip()
    base, number = _sharding_of(plans["one"], [[], []], ["data", "model"])
    at = graph.index(line)
    body = json.loads(tampered(base, _lies("values", name, to=number)))
    ops = [line for line in graph if "=" in line and "(" in line]
    made = body["submeshes"][0]["sharding"]
    made["assignments"] = [r for r in made["assignments"] if r[0] != [ops.index(line)]]
    made["shared_partials"].append([[ops.index(line)], [0]])
    del body["checksum"], at
    assert _runs_or_is_refused(base, with_checksum(body)) == "refused"


def test_what_a_loop_carries_lies_alike_in_and_out(plans: dict[str, Base]) -> None:
    base = plans["looped"]
    graph = "\n".join(base.data["record"]["graph"])
    line = next(line for line in graph.splitlines() if "= scan(" in line)
    name = line.split(":")[0].strip()
    moved, number = _sharding_of(base, [["model"], []], [])
    before = base.data["shardings"][base.data["submeshes"][0]["sharding"]["values"][name]]
    assert before["dims"] != [["model"], []]
    plan = plan_from_json(tampered(moved, _lies("values", name, to=number)))
    step = autopar.parallelize(base.step, plan=plan)
    with pytest.raises(PlanFileError, match=r"scan .* is entered or left as"):
        step(*base.fresh())


# -- code ---------------------------------------------------------------------------------------


def _shape(source: str) -> list[str]:
    return [type(node).__name__ for node in ast.walk(ast.parse(source))]


def _named(plan: autopar.Plan, name: str) -> autopar.Plan:
    """The plan with a name everywhere that a name can be."""
    assert plan.record is not None
    graph = plan.record.batching.graph
    heads = [i.path.split("/")[0] for i in graph.inputs]
    paths = [f"{head}{name}/{n}{name}" for n, head in enumerate(heads)]
    ends = tuple(f"{n}{name}" for n, _ in enumerate(graph.outputs))
    inputs = (replace(i, path=path) for i, path in zip(graph.inputs, paths, strict=True))
    renamed = replace(graph, inputs=tuple(inputs), output_paths=ends)
    return replace(
        plan,
        origin=replace(plan.origin, step=name, cluster_name=name, method=name, jax_minor=name),
        record=Record.of(Batching.whole(renamed), {}),
        arguments=tuple(
            replace(a, path=path) for a, path in zip(plan.arguments, paths, strict=True)
        ),
        outputs=tuple(replace(a, path=end) for a, end in zip(plan.outputs, ends, strict=True)),
    )


@pytest.mark.parametrize("name", ["a\u2028b", "\u00e9", "[/b]", ":smile:", '"', "\\", "a\nb"])
def test_a_plan_with_odd_names_is_read_as_it_was_saved(
    plans: dict[str, Base], name: str, tmp_path: Path
) -> None:
    named = _named(plan_from_json(tampered(plans["one"], lambda body: None)), name)
    named.save(tmp_path / "plan.json")
    assert autopar.load(tmp_path / "plan.json") == named
    done = run("show", tmp_path / "plan.json", "--params", "--ops", "--comm")
    assert done.code == 0, done.err


@pytest.mark.parametrize("name", NAMES)
def test_exported_code_holds_names_as_data(plans: dict[str, Base], name: str) -> None:
    good = plan_from_json(tampered(plans["one"], lambda body: None))
    named = _named(good, name)
    plain = _named(good, "".join("/" if letter == "/" else "x" for letter in name))
    source = python_module(named)
    assert source.isascii()
    assert _shape(source) == _shape(python_module(plain))
    held = {
        node.target.id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    inputs = held["INPUTS"]
    assert isinstance(inputs, ast.Dict)
    keys = [ast.literal_eval(key) for key in inputs.keys if key is not None]
    assert keys == [a.path for a in named.arguments]
    rules = flax_text(named, [(name, ("data",))], path_rules(named.arguments))
    assert rules.isascii()
    assert len(ast.parse(rules).body) == 5
    config = maxtext_text(named, [(name, ("data",))])
    assert config.isascii()
    assert len(config.splitlines()) == len(maxtext_text(good, [("x", ("data",))]).splitlines())
