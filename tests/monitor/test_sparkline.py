"""Small pictures made of characters, and curves of bounded length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_async.monitor.sparkline import Curve, bar, sparkline

VALUES = st.lists(st.floats(-1.0, 2.0), max_size=40)
BLOCKS = " ▁▂▃▄▅▆▇█"


@given(VALUES, st.integers(-1, 60))
def test_a_sparkline_has_a_block_per_value_and_never_more_than_there_is_room(values, width):
    drawn = sparkline(values, width)
    assert len(drawn) == max(0, min(len(values), width))
    assert set(drawn) <= set(BLOCKS[1:])


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40))
def test_a_sparkline_is_higher_where_the_value_is(values):
    heights = [BLOCKS.index(block) for block in sparkline(values, 40)]
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [heights[number] for number in order] == sorted(heights)


def test_the_ends_of_a_sparkline_are_its_lowest_and_its_highest_block():
    assert sparkline([0.0, 0.5, 1.0], 3) == "▁▄█"
    assert sparkline([5.0, 7.0], 2, low=5.0, high=7.0) == "▁█"


def test_neighbours_share_a_block_where_there_is_no_room():
    assert sparkline([0.0, 1.0, 1.0, 1.0], 2) == "▄█"


def test_what_is_no_number_is_a_gap_and_values_that_are_all_the_same_are_drawn():
    """The loss of a run that has diverged must not take the view down with it."""
    assert sparkline([0.0, math.nan, 1.0, math.inf], 4) == "▁ █ "
    assert sparkline([3.0, 3.0], 4, low=3.0, high=3.0) == "▁▁"


@given(st.floats(-1.0, 2.0), st.integers(-1, 60))
def test_a_bar_is_as_wide_as_it_is_asked_to_be_and_filled_by_its_share(share, width):
    text = bar(share, width, "red").plain
    assert len(text) == max(0, width)
    filled = (text.count("━") + 0.5 * text.count("╸")) / max(1, width)
    assert abs(filled - min(max(share, 0.0), 1.0)) <= 0.5 / max(1, width) or width <= 0


@given(st.lists(st.floats(0.0, 1.0), max_size=100), st.integers(2, 9))
def test_a_curve_keeps_the_mean_of_what_was_added_in_few_values(values, limit):
    curve = Curve(limit)
    for value in values:
        curve.add(value)
    assert len(curve.values) <= limit
    # all values but those that wait for their neighbours
    told = len(values) - len(curve.pending)
    assert math.isclose(sum(curve.values) * curve.each, sum(values[:told]), abs_tol=1e-9)
    if len(values) <= limit:
        assert curve.values == tuple(values)


def test_a_curve_of_one_value_is_refused():
    with pytest.raises(ValueError, match=r"limit=1 must be at least 2"):
        Curve(1)
