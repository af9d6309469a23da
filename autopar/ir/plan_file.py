"""Plans as files: versioned JSON with a checksum, read without trust, written whole or not at all.

The form of everything but `format`, `checksum` and the table `shardings` is the codec's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import (
    ArgumentError,
    GraphError,
    GraphSyntaxError,
    InputError,
    PlanFileError,
    refused,
)
from autopar.gc_pause import paused_collection
from autopar.ir.batching import Accumulator, Moment, Rows
from autopar.ir.codec import Codec, Item, Json, JsonError, format_json, parse_json, shown
from autopar.ir.peak import HeldItem
from autopar.ir.plan import Argument, Plan
from autopar.ir.sharding import Assignment, Sharding
from autopar.ir.sharding_plan import Margin
from autopar.ir.text import brief
from autopar.ir.text_file import write_text

FORMAT = 9
_ROWS = (Argument, HeldItem, Margin, Moment, Rows, Accumulator, Assignment)


def plan_to_json(plan: Plan) -> str:
    """The plan as text: the same plan gives the same bytes."""
    with paused_collection():
        codec = Codec(_ROWS, Sharding)
        fields = codec.write(Plan, plan)
        assert isinstance(fields, dict)
        body = {"format": FORMAT, **fields, "shardings": codec.write_table()}
        return format_json({"checksum": _checksum(body), **body}) + "\n"


def plan_from_json(text: str, where: str = "the plan") -> Plan:
    """The plan of a text; raises PlanFileError that says what is wrong with it, and where.

    Every index, name, axis and number in it is checked: see `Plan.check`.
    """
    try:
        data = parse_json(text)
    except JsonError as error:
        raise PlanFileError(f"{where} is no JSON: {error}. Plan again, or restore it.") from None
    if not isinstance(data, dict) or "format" not in data:
        raise PlanFileError(f"{where} is JSON but no autopar plan: it has no 'format'.")
    if data["format"] != FORMAT:
        raise PlanFileError(
            f"{where} has plan format {shown(data['format'])}, but this autopar reads {FORMAT}: "
            "plan again, or use the autopar that wrote it."
        )
    body = {k: v for k, v in data.items() if k != "checksum"}
    try:
        agrees = data.get("checksum") == _checksum(body)
    except RecursionError:
        raise PlanFileError(
            f"{where} is no plan: its lists and objects are nested too deeply."
        ) from None
    if not agrees:
        raise PlanFileError(
            f"{where} is damaged: its contents do not match its checksum. Plan again, or "
            "restore it."
        )
    try:
        with paused_collection():
            codec = Codec(_ROWS, Sharding)
            codec.read_table(Item(body.pop("shardings", None), "shardings"))
            plan = codec.read(Plan, Item({k: v for k, v in body.items() if k != "format"}))
            plan.check()
    except (JsonError, GraphError, GraphSyntaxError) as error:
        raise PlanFileError(
            f"{where} is damaged: {brief(error)}. Plan again, or restore it."
        ) from None
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan to a temporary file beside `path`, then put it in place."""
    write_text(plan_to_json(plan), path)


def load_plan(path: str | Path) -> Plan:
    """Read a plan; raises PlanFileError where there is none or it is damaged."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        # No text, or a path that has a NUL in it.
        why = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise PlanFileError(f"cannot read plan {str(path)!r}: {why}") from None
    return plan_from_json(text, f"plan {str(path)!r}")


def _checksum(body: dict[str, Json]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def contents_of(plan: Plan) -> Generator[None]:
    """Raises PlanFileError for what is wrong with a plan's own contents as it is opened again."""
    try:
        yield
    except InputError as error:
        raise PlanFileError(
            f"the plan for {brief(ascii(plan.origin.step), 60)} is damaged, or of another autopar: "
            f"{brief(error)}.\nPlan again."
        ) from error


def a_plan(given: object) -> Plan:
    """Checks that the value is a plan; raises ArgumentError."""
    if not isinstance(given, Plan):
        accepted = "a Plan, as autopar.load('plan.json') or step.plan gives"
        raise ArgumentError(refused("plan", given, accepted))
    return given
