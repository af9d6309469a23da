"""The map of the house is what its code says: floors, purposes, and no import upwards."""

import runpy

from tests.house.source import ROOT

PAGES = ROOT / "docs" / "explanation"
HOUSE = runpy.run_path(str(PAGES / "make.py"))


def test_contributing_has_the_floors_and_purposes_of_the_rooms() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert HOUSE["contributing"]() == text, "run `python -m docs.explanation.make`"


def test_the_picture_is_drawn_from_the_code() -> None:
    kept = (PAGES / "house.svg").read_text(encoding="utf-8")
    assert kept == HOUSE["house"]() + "\n", "run `python -m docs.explanation.make`"


def test_every_room_says_what_it_is_for() -> None:
    silent = [room.name for room in HOUSE["rooms"]() if len(room.purpose) < 20]
    assert not silent, f"rooms without a purpose in their docstring: {silent}"


def test_no_import_goes_up_by_any_door() -> None:
    """Neither inside a function, nor for type checkers, nor of a module named by a string."""
    floor = {room.name: room.floor for room in HOUSE["rooms"]()}
    up = [f"{a} -> {b}" for a, b in sorted(HOUSE["arrows"]()) if floor[a] >= floor[b]]
    assert not up, f"imports up the floors, or along one: {up}"
