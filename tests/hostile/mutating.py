"""Changes plan files at random, seeded, each with a checksum that agrees with it."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import Any

from autopar.ir.stages import ONE_PROGRAM

_TEXTS = (
    "", "x", "%0", "%99999", "data", "model", "sum", "max", "state", "f32", "gpipe", "nan", "[/b]",
    'a"\nb', "</script><b>", "../../etc", "\u00e9\u2028", "\ud800", "\x1b[31m", "\0", "A" * 5000,
)  # fmt: skip
_NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 7, 8, 1000, -(10**28), 10**28, 2**31, 2**63, 2**64, -(2**63), 0.5, -0.5, 1e308,
    -1e-300, 1e-300, 4.0, 10**400,
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [0], [-1], {"x": 1}, ["data"], "1", [["data"]], [None],
)  # fmt: skip

Node = dict[str, Any] | list[Any]


def mutated(data: dict[str, Any], seed: int) -> str:
    """The text of a plan with one to three changes."""
    rng, body = random.Random(seed), copy.deepcopy(data)
    body.pop("checksum", None)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(body, rng)
    body.pop("checksum", None)
    return with_checksum(body)


def changed(data: Node, seed: int) -> str:
    """The text of other JSON with a change."""
    rng, body = random.Random(seed), copy.deepcopy(data)
    _change(body, rng)
    return json.dumps(body)


def with_checksum(body: dict[str, Any]) -> str:
    """The text of a plan's fields with their checksum."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode())
    return json.dumps({"checksum": digest.hexdigest(), **body})


def _change(body: Node, rng: random.Random) -> None:
    holder, key = _place(body, rng)
    _OPERATIONS[rng.randrange(len(_OPERATIONS))](body, holder, key, rng)


def _place(body: Node, rng: random.Random) -> tuple[Any, Any]:
    """A container and a key of it; large parts are not met more often than small ones."""
    holder: Any = body
    while True:
        key: Any = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.12:
            return holder, key
        holder = inner


def _delete(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    del body, rng, holder[key]


def _duplicate(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    del body
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    else:
        holder[f"{key}2"] = copy.deepcopy(holder[key])


def _swap(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    del body
    other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


def _take_over(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    """What stands elsewhere, in this place: often of the very same kind."""
    there, other = _place(body, rng)
    holder[key] = copy.deepcopy(there[other])


def _move(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    there, other = _place(body, rng)
    held = copy.deepcopy(holder[key])
    there[other] = held
    if isinstance(holder, list) and len(holder) > key:
        del holder[key]
    elif isinstance(holder, dict):
        holder.pop(key, None)


def _rename(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        names = ("x", "%0", "%1", "%500", "format", "mesh", str(key).upper(), "record")
        holder[rng.choice(names)] = holder.pop(key)
    else:
        _swap(body, holder, key, rng)


def _retype(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    del body
    holder[key] = copy.deepcopy(rng.choice((*_OTHERS, *_TEXTS, *_NUMBERS)))


def _tweak(body: Node, holder: Any, key: Any, rng: random.Random) -> None:
    """A value of the same type that is near, or far off."""
    held = holder[key]
    if isinstance(held, bool):
        holder[key] = not held
    elif isinstance(held, int | float):
        near = (held + 1, held - 1, -held, held * 2, held // 2, *_NUMBERS)
        holder[key] = rng.choice(near)
    elif isinstance(held, str):
        holder[key] = changed_text(held, rng)
    else:
        _retype(body, holder, key, rng)


def changed_text(held: str, rng: random.Random) -> str:
    """A text with a number, a word or a letter of it changed: graphs and clusters are texts."""
    kind = rng.randrange(5)
    numbers = list(re.finditer(r"\d+", held))
    words = list(re.finditer(r"%?[\w.]+", held))
    if kind <= 1 and numbers:
        at = rng.choice(numbers)
        new = rng.choice(("0", "1", "2", "3", "16", "64", "65", "99", "1" * 30, "9" * 5000, "-1"))
        return held[: at.start()] + new + held[at.end() :]
    if kind == 2 and words:
        at, other = rng.choice(words), rng.choice(words)
        return held[: at.start()] + other[0] + held[at.end() :]
    if kind == 3 and held:
        cut = rng.randrange(len(held))
        return held[:cut] + rng.choice('()[]{}%:=,"#\\x0 \n') + held[cut + rng.randrange(2) :]
    return rng.choice(_TEXTS)


_OPERATIONS: tuple[Callable[[Any, Any, Any, random.Random], None], ...] = (
    _delete, _duplicate, _swap, _take_over, _take_over, _move, _rename, _retype, _retype, _tweak,
    _tweak, _tweak, _tweak,
)  # fmt: skip


def redecided(data: dict[str, Any], seed: int) -> str:
    """The text of a plan with one to four decisions that are well formed and may be wrong."""
    rng, body = random.Random(seed), copy.deepcopy(data)
    plans = [submesh["sharding"] for submesh in body["submeshes"]]
    for _ in range(rng.choice((1, 1, 2, 4))):
        plan = rng.choice(plans)
        _REDECISIONS[rng.randrange(len(_REDECISIONS))](body, plan, rng)
    body.pop("checksum", None)
    return with_checksum(body)


def _alike(body: Any, plan: Any, number: int, rng: random.Random) -> int:
    """Another sharding of as many dims, one of the table or a new one, with partial sums or not."""
    table = body["shardings"]
    rank = len(table[number]["dims"])
    same = [i for i, s in enumerate(table) if len(s["dims"]) == rank]
    if rng.random() < 0.5:
        return rng.choice(same)
    axes = plan["mesh"]["names"]
    dims: list[list[str]] = [[] for _ in range(rank)]
    partial: list[str] = []
    for axis in axes:
        place = rng.randrange(-2, rank)
        if place == -2:
            partial.append(axis)
        elif place >= 0:
            dims[place].append(axis)
    table.append({"dims": dims, "partial": partial})
    return len(table) - 1


def _value(body: Any, plan: Any, rng: random.Random) -> None:
    name = rng.choice(list(plan["values"]))
    plan["values"][name] = _alike(body, plan, plan["values"][name], rng)


def _made_on_demand(body: Any, plan: Any, rng: random.Random) -> None:
    del body, plan["values"][rng.choice(list(plan["values"]))]


def _assignment(body: Any, plan: Any, rng: random.Random) -> None:
    del body
    if plan["assignments"]:
        _, factors = rng.choice(plan["assignments"])
        factors[rng.randrange(len(factors))] = rng.randrange(-1, 4)


def _without_assignment(body: Any, plan: Any, rng: random.Random) -> None:
    del body
    if plan["assignments"]:
        plan["assignments"].pop(rng.randrange(len(plan["assignments"])))


def _use(body: Any, plan: Any, rng: random.Random) -> None:
    name = rng.choice(list(plan["values"]))
    region = rng.choice(("forward", "backward", "update"))
    if all(row[:2] != [name, region] for row in plan["uses"]):
        plan["uses"].append([name, region, _alike(body, plan, plan["values"][name], rng)])


def _shared(body: Any, plan: Any, rng: random.Random) -> None:
    rows = plan["shared_partials"]
    if rows and rng.random() < 0.5:
        rows.pop(rng.randrange(len(rows)))
    paths = [path for path, _ in plan["assignments"]] + [[rng.randrange(60)]]
    path = rng.choice(paths)
    if all(row[0] != path for row in rows):
        rows.append([path, rng.choice(([0], [1], [0, 1]))])
    del body


def _kept(body: Any, plan: Any, rng: random.Random) -> None:
    del body, rng
    plan["reuse_gathered"] = not plan["reuse_gathered"]


def _stages(body: Any, plan: Any, rng: random.Random) -> None:
    del plan
    if body["schedule"] == ONE_PROGRAM:
        return
    stages = body["stages"]
    stage = rng.choice(stages[:-1] or stages)
    stage["stop"] += rng.choice((-2, -1, 1, 2))
    stage["remat"] = rng.choice(["none", "selective", "full"])
    body["schedule"] = rng.choice(("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"))


_REDECISIONS: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    _value, _value, _value, _made_on_demand, _assignment, _assignment, _without_assignment, _use,
    _shared, _kept, _stages,
)  # fmt: skip
