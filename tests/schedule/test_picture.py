"""Boxes along the axis of time: their scale, folds, cuts and ruler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.schedule.picture import Box, Picture


def picture_of(*rows: list[tuple[str, float, float]]) -> Picture:
    return Picture(tuple(tuple(Box(name, name[0], *edges) for name, *edges in row) for row in rows))


def text(picture: Picture, row: int, first: int, last: int) -> str:
    return "".join(piece.text for piece in picture.pieces(row, first, last))


UNEVEN = picture_of([("F0", 0.0, 1.0), ("B0", 1.5, 3.0)], [("F0", 1.0, 1.5), ("B0", 1.5, 2.5)])


def test_every_box_has_room_for_its_label() -> None:
    assert UNEVEN.columns_per_unit == 6
    assert UNEVEN.lines() == [
        "device 0 | F0--- ·· B0------",
        "device 1 | ····· F0 B0--- ··",
    ]


def test_boxes_that_begin_anywhere_have_room_for_one_column_more() -> None:
    picture = picture_of([("F0", 0.0, 1.0), ("F1", 1.1, 2.1), ("F2", 2.35, 3.35)])
    assert picture.columns_per_unit == 4
    assert picture.lines() == ["device 0 | F0  F1   F2"]


def test_a_very_short_box_loses_its_label_before_others_grow() -> None:
    picture = picture_of([("F0", 0.0, 1.0), ("W0", 1.0, 1.01), ("F1", 1.01, 2.01)])
    assert picture.columns_per_unit < 15
    assert "W" not in picture.lines()[0]


def test_folds_keep_boxes_whole_and_are_of_one_width() -> None:
    picture = picture_of([(f"F{i}", float(i), i + 1.0) for i in range(9)])
    assert picture.folds(27) == [(0, 27)]
    assert picture.folds(26) == [(0, 15), (15, 27)]
    assert picture.folds(10) == [(0, 9), (9, 18), (18, 27)]
    assert picture.folds(2) == [
        fold for at in range(0, 27, 3) for fold in ((at, at + 2), (at + 2, at + 3))
    ]


@pytest.mark.parametrize("most", range(3, 14))
def test_no_fold_cuts_a_label(most: int) -> None:
    picture = picture_of([("F0", 0.0, 1.0), ("F1", 1.1, 2.1), ("F2", 2.35, 3.35)])
    folds = picture.folds(most)
    assert [first for first, _ in folds[1:]] == [last for _, last in folds[:-1]]
    assert (folds[0][0], folds[-1][1]) == (0, picture.width)
    drawn = [text(picture, 0, *fold) for fold in folds]
    assert all(any(label in row for row in drawn) for label in ("F0", "F1", "F2"))


def test_the_ruler_is_round_and_marks_fit() -> None:
    picture = picture_of([(f"F{i}", i * 0.1, (i + 1) * 0.1) for i in range(9)])
    assert picture.ruler(0, 27) == "0              0.5"
    assert picture.ruler(15, 27) == "0.5"
    assert picture.ruler(12, 17) == ""


@pytest.mark.parametrize("row", [0, 1])
@given(st.data())
def test_a_cut_is_a_part_of_the_row(row: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, UNEVEN.width - 1))
    last = data.draw(st.integers(first + 1, UNEVEN.width))
    whole, part = text(UNEVEN, row, 0, UNEVEN.width), text(UNEVEN, row, first, last)
    assert len(part) == last - first
    assert part.replace("·", " ") == whole[first:last].replace("·", " ")


def test_nothing_that_takes_no_time_is_drawn() -> None:
    empty = picture_of([("F0", 0.0, 0.0)])
    assert empty.lines() == ["device 0 | "]
    assert empty.folds(40) == []
