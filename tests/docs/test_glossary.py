"""The glossary names what there is: its recipes and schedules, and words that the house uses."""

import re

from autopar.passes.shard.recipes import RECIPES
from autopar.schedule.table import SCHEDULES
from tests.house.source import ROOT, source_files

TEXT = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TEXT, re.MULTILINE)
WORDS = [word for name, _ in ROWS if name not in ("word", "---") for word in name.split(", ")]


def test_a_word_is_told_of_once() -> None:
    assert len(WORDS) == len(set(WORDS))
    assert len(WORDS) <= 80


def test_a_reader_of_plans_needs_some_forty_words() -> None:
    plans, _, _ = TEXT.partition("**In the pages on how it works")
    assert 35 <= len(re.findall(r"^\| (?!word|---)", plans, re.MULTILINE)) <= 45


def test_its_recipes_and_schedules_are_those_that_there_are() -> None:
    told = {name: re.findall(r"`([\w+-]+)`", text) for name, text in ROWS}
    assert sorted(told["recipe"]) == sorted(set(RECIPES) - {"auto"})
    assert set(told["schedule"]) <= set(SCHEDULES)


def test_the_code_uses_the_words() -> None:
    texts = " ".join(file.text.lower() for file in source_files())
    unused = [w for w in WORDS if not re.search(rf"\b{re.escape(w.lower())}", texts)]
    assert not unused, f"words of the glossary that no file of the house uses: {unused}"
