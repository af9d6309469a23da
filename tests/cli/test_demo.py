"""`autopar demo`: it plans, compares, trains and judges, and its exit code is its verdict."""

import pytest

from tests.cli.running import run


@pytest.mark.ci
def test_the_quick_demo_learns_and_agrees() -> None:
    done = run("demo", "--quick", "--json")
    assert done.code == 0, done.err
    data = done.data
    assert data["ok"] is True
    assert data["plan"]["devices"] == 8
    assert data["plan"]["collectives"]
    equality, training = data["equality"], data["training"]
    assert len(equality["losses"]) == len(equality["plain_losses"]) == 3
    for what, limit in equality["limit"].items():
        assert equality["relative_difference"][what] <= limit
    assert training["held_out_nats"] < training["unigram_nats"]
    assert "the steps equal the plain ones to rounding" in done.err


@pytest.mark.slow
def test_the_quick_demo_learns_and_agrees_in_four_stages() -> None:
    done = run("demo", "--quick", "--stages", "4", "--json")
    assert done.code == 0, done.err
    plan = done.data["plan"]
    assert plan["stages"] in (4, 8)  # one or two of each device
    sizes = [len(s["devices"]) for s in plan["pipeline"]["submeshes"]]
    assert (len(sizes), sum(sizes)) == (4, 8)
    assert "Stages under" in done.err
    assert "the steps equal the plain ones to rounding" in done.err
    assert done.data["training"]["held_out_nats"] < done.data["training"]["unigram_nats"]


def test_too_few_steps_to_learn_end_with_1() -> None:
    done = run("demo", "--quick", "--steps", "4", "--mesh", "8", "--method", "dp")
    assert done.code == 1
    assert "Collectives of a device in a step" in done.out
    assert "held-out loss is NOT below the unigram entropy" in done.out


def test_a_recipe_is_one_of_the_known() -> None:
    assert run("demo", "--method", "zero9").code == 2
