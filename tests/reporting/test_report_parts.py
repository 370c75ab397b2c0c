"""Formats of numbers, ticks, colours and the small SVG writer."""

import math
import re

import pytest

from habitus.reporting.colours import DARK, LIGHT, budget_colours, contrast, correlation_colours, series_colours
from habitus.reporting.figure import Band, Line, Panel, PlotAxis, Points, Rule
from habitus.reporting.format import (
    count,
    format_interval,
    format_number,
    join_words,
    law_name,
    percent,
    power_of_ten,
    power_range,
    pretty,
    rate,
    sentence,
    significant,
    superscript,
)  # fmt: skip
from habitus.reporting.scales import Scale, values_of
from habitus.reporting.svg import draw, push_apart
from habitus.store import Interval, Law, Residuals


@pytest.mark.parametrize(
    ("ends", "text"),
    [((10.531, 10.572), "[10.53, 10.57]"), ((8.7001, 8.7082), "[8.700, 8.708]"), ((0.028, 0.089), "[0.0280, 0.0890]"),
     ((5.404, 5.588), "[5.40, 5.59]"), ((2.0, 2.0), "[2.00, 2.00]"), ((1.0, math.inf), "[1.00, open]")],
)  # fmt: skip
def test_the_ends_of_an_interval_differ_as_they_are_written(ends: tuple[float, float], text: str) -> None:
    interval = Interval(low=ends[0], high=ends[1])
    law = Law(law="size_optimum", form="", status="ok", values={"x": ends[0]}, intervals={"0.95": {"x": interval}},
              residuals=Residuals(n=5, dof=3))  # fmt: skip
    assert format_interval(law, "x") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e18, "10¹⁸"), (3e14, "3·10¹⁴"), (2.5e11, "2.5·10¹¹"), (2e-3, "2·10⁻³"), (9.9999e17, "10¹⁸"), (1.0, "10⁰")],
)
def test_powers_of_ten(value: float, text: str) -> None:
    assert power_of_ten(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (38.9e6, "38.9M"),
        (532e3, "532k"),
        (2.63e9, "2.63B"),
        (999.9e3, "1M"),
        (64, "64"),
        (0.0, "0"),
        (math.inf, "open"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert count(value) == text


def test_shares_and_digits() -> None:
    assert [percent(v) for v in (0.024, 0.5, 0.001, 1.0, None)] == ["2.4%", "50%", "0.10%", "100%", "–"]
    assert [format_number(v, "percent") for v in (0.5, 1.0, 884_108.04, math.inf)] == ["50%", "100%", ">100%", "open"]
    assert [rate(v) for v in (0.002, 0.0354, 0.05)] == ["2·10⁻³", "0.0354", "0.05"]
    assert [format_number(v, "hours") for v in (0.0372, 0.5, 3.41)] == ["2.2 min", "30 min", "3.41 h"]
    assert [format_number(v, "gib") for v in (0.043, 50.2)] == ["44 MiB", "50.2 GiB"]
    assert [significant(v) for v in (2.6413, -0.0376, 0.0, 12345.678, math.nan)] == [
        "2.641",
        "−0.03760",
        "0",
        "12346",
        "–",
    ]
    assert significant(4.2e-7, 3) == "4.2·10⁻⁷"
    assert [format_number(v, "count") for v in (2048, 20_480, math.inf, None)] == ["2,048", "20.5k", "open", "–"]
    assert superscript(-0.21) == "⁻⁰·²¹⁰"
    assert pretty("fitted up to 1e+18, at 2.1e+06") == "fitted up to 10¹⁸, at 2.1·10⁶"
    assert pretty("winner 32x2-294296e1, parent 12x2-5e301234") == "winner 32x2-294296e1, parent 12x2-5e301234"


def test_laws_have_names_that_people_use() -> None:
    named = [law_name(name) for name in ("size_law_parabola", "share_optimum", "something_new")]
    assert named == ["N*(C) by parabolas", "s*", "something new"]


def test_lists_and_sentences() -> None:
    assert join_words(["a"]) == "a" and join_words(["a", "b", "c"]) == "a, b and c"
    assert sentence("the share", "", "s* rises", "batch/loss is it.") == "The share. s* rises. batch/loss is it."


def test_ticks_of_a_logarithmic_axis_are_decades_or_their_parts() -> None:
    flops = Scale(PlotAxis("C", log=True, kind="flops"), [1e15, 1e19], 0, 100)
    assert [word for _, word in flops.ticks()] == ["10¹⁵", "10¹⁶", "10¹⁷", "10¹⁸", "10¹⁹"]
    near = Scale(PlotAxis("C", log=True, kind="flops"), [2e9, 4e10], 0, 100)
    assert [word for _, word in near.ticks()] == ["3·10⁹", "10¹⁰", "3·10¹⁰"]
    share = Scale(PlotAxis("s", log=True, kind="percent"), [0.005, 0.5], 0, 100)
    assert [word for _, word in share.ticks()] == ["0.5%", "1%", "2%", "5%", "10%", "20%", "50%"]
    assert Scale(PlotAxis("B", log=True, ticks=(64, 128)), [64, 2048], 0, 1).ticks() == [(64, "64"), (128, "128")]


def test_ticks_of_a_linear_axis_have_the_digits_they_need() -> None:
    assert [w for _, w in Scale(PlotAxis("y", low=-5.0, high=5.0), [], 0, 1).ticks()] == ["−4", "−2", "0", "2", "4"]
    assert [w for _, w in Scale(PlotAxis("y", low=0.0, high=12.5), [], 0, 1).ticks()] == [
        "0.0", "2.5", "5.0", "7.5", "10.0", "12.5",
    ]  # fmt: skip


def test_zero_stands_where_the_axis_puts_it() -> None:
    scale = Scale(PlotAxis("K", log=True, kind="count", zero_at=5000.0), [0, 16384, 2e6], 0, 100)
    assert scale.at(0) == scale.at(5000.0)
    assert scale.ticks()[0] == (0.0, "0")
    assert all(scale.at(value) > scale.at(0) for value, _ in scale.ticks()[1:])


def test_one_value_still_has_an_axis() -> None:
    for axis in (PlotAxis("x"), PlotAxis("x", log=True)):
        scale = Scale(axis, [3.0], 0, 100)
        assert 0 < scale.at(3.0) < 100 and len(scale.ticks()) >= 2
    assert Scale(PlotAxis("x"), [], 0, 100).ticks()


def test_bars_stretch_a_logarithmic_axis_up_to_a_factor_and_a_linear_one_by_its_span() -> None:
    bars = (Points([1.0, 2.0], [30.0, 40.0], "main", (), [25.0, -math.inf], [50.0, math.inf]),)
    assert sorted(values_of(bars, "y", log=True)) == pytest.approx([40 / 3, 25, 30, 40, 50, 120])
    # The points span 10, so that a bar reaches no further than 10 beyond its own.
    assert sorted(values_of(bars, "y")) == [25, 30, 30, 40, 40, 50]
    assert values_of(bars, "x", log=True) == [1, 2]
    bands = tuple(Band([1.0], [-5.0], [9.0], "main", whole) for whole in (False, True))
    assert values_of(bands[:1], "y") == [] and values_of(bands, "y") == [-5, 9]


def test_labels_are_moved_apart_and_stay_inside() -> None:
    assert push_apart([10, 12, 50], 13, 0, 100) == [10, 23, 50]
    assert push_apart([90, 95, 99], 13, 0, 100) == [74, 87, 100]
    assert push_apart([], 13, 0, 100) == []


def test_labels_stay_above_the_words_of_the_ticks() -> None:
    lines = tuple(Line([1.0, 2.0], [1.0, 0.1 * i], "b0", f"line {i}") for i in range(4))
    text = draw(Panel("", PlotAxis("x"), PlotAxis("y", low=0.0), lines))
    labels = [float(y) for y in re.findall(r'class="lb b0" x="[\d.]+" y="([\d.]+)"', text)]
    axis = float(re.findall(r'class="ax" d="M[\d.]+ ([\d.]+)H', text)[0])
    assert len(labels) == 4 and max(labels) < axis


def test_words_of_a_panel_are_escaped_and_open_ends_reach_the_edge() -> None:
    points = Points([1, 2], [1, 2], "main", ["<b>", "two"], [-math.inf, 1.5], [math.inf, 2.5], label="<i>")
    marks = (
        points,
        Line([1, 2, math.nan], [1, 2, 3], "b0"),
        Band([1, 2], [0, 1], [2, 3], "b0"),
        Rule(1.5, "x", "main", "&"),
    )
    text = draw(Panel("<title>", PlotAxis("x&y"), PlotAxis("y"), marks))
    assert "<b>" not in text and "<i>" not in text and "&lt;title&gt;" in text and "x&amp;y" in text
    assert "nan" not in text and "inf" not in text
    assert text.count("data-t=") == 2


def test_the_contrast_ratio_is_wcags() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 10])
def test_every_colour_of_text_can_be_read(dark: bool, num: int) -> None:
    page = DARK if dark else LIGHT
    inks = [
        *budget_colours(num, dark),
        *series_colours(dark),
        *(page[n] for n in ("ink", "soft", "link", "warn", "main", "paper", "muted")),
    ]
    for ground in ("bg", "card"):
        assert min(contrast(ink, page[ground]) for ink in inks) >= 4.5
    assert contrast(page["ink"], page["chip"]) >= 4.5 and contrast(page["soft"], page["chip"]) >= 4.5
    assert len(set(budget_colours(num, dark))) == num


def test_text_on_a_correlation_can_be_read() -> None:
    for i in range(-100, 101):
        for faded in (False, True):
            cell, ink = correlation_colours(i / 100, faded)
            assert contrast(cell, ink) >= 4.5


def test_a_range_of_one_budget_is_the_budget() -> None:
    assert power_range([2.2e11]) == "2.2·10¹¹"
    assert power_range([1e11, 3e11, 1e13]) == "10¹¹ to 10¹³"
