"""`autopar report`: a saved plan as one HTML page."""

from __future__ import annotations

from pathlib import Path

from autopar import pages, plans
from autopar.cli.console import JSON_VERSION, err, out
from autopar.errors import InputError
from autopar.ir.codec import Item, Json, JsonError, parse_json
from autopar.ir.text_file import PAGE, check_output, read_text
from autopar.ir.verification import check_verification


def write_report(
    path: Path,
    output: Path | None,
    others: tuple[Path, ...],
    trace: Path | None,
    verification: Path | None,
) -> None:
    """Write a saved plan as an HTML page."""
    target = output if output is not None else path.with_suffix(".html")
    check_output(target, PAGE)
    plan = plans.load(path)
    with err().status("drawing the plan"):
        pages.write_report(
            plan,
            target,
            against={other.name: plans.load(other) for other in others},
            trace=trace,
            verification=_read_verification(verification) if verification is not None else None,
        )
    out().print(f"wrote {target}", soft_wrap=True, markup=False)


def _read_verification(path: Path) -> dict[str, Json]:
    """A verification's JSON; raises InputError where it is none."""
    text = read_text(path, "a verification")
    try:
        printed = Item(parse_json(text))
        version = printed.fields()["json_version"]
        if version.whole() != JSON_VERSION:
            version.fail(f"{JSON_VERSION}, the form that this release prints")
        data = {key: item.value for key, item in printed.pairs() if key != "json_version"}
        check_verification(Item(data))
    except JsonError as error:
        raise InputError(
            f"{path} is no verification: {error}. Give what `autopar verify --json` prints."
        ) from None
    return data
