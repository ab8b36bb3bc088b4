"""ditbook.figures: bytes repeat, and no figure goes without caption, alternative text and data."""

import base64
import re

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest

from ditbook import figures


@pytest.fixture
def shown(monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **options: displayed.append((bundle, options)))
    return displayed


def curve():
    figures.style()
    figure, axes = plt.subplots()
    axes.plot([1, 2, 3], [1, 4, 9], label="squares")
    axes.fill_between([1, 2, 3], [0, 3, 8], [2, 5, 10], alpha=0.2)
    axes.set_xlabel("n")
    return figure


def test_equal_figures_give_equal_bytes_without_a_date():
    first, second = figures.svg(curve()), figures.svg(curve())
    assert first == second
    assert "<dc:date>" not in first


def test_another_salt_changes_the_bytes():
    first = figures.svg(curve())
    figure = curve()
    with matplotlib.rc_context({"svg.hashsalt": "other"}):
        assert figures.svg(figure) != first


def test_caption_alt_text_and_data_travel_with_the_picture(shown):
    data = {"n": [1, 2, 3], "n²": np.array([1.0, 4.0, 9.0])}
    figures.show(curve(), "squares", caption="Squares.", alt="A curve through 1, 4 and 9.", data=data)
    bundle, options = shown[0]
    markup = bundle["text/html"]
    assert 'id="fig-squares"' in markup
    assert 'alt="A curve through 1, 4 and 9."' in markup
    assert "<figcaption>Squares.</figcaption>" in markup
    table = base64.b64decode(re.search(r"data:text/csv;base64,([^\"]+)", markup)[1]).decode()
    assert table == "n,n²\n1,1\n2,4\n3,9\n"
    assert options["metadata"]["ditbook_figure"]["name"] == "squares"


def test_a_shown_figure_is_closed(shown):
    before = len(plt.get_fignums())
    figures.show(curve(), "closed", caption="c", alt="A curve through 1, 4 and 9.")
    assert len(plt.get_fignums()) == before


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"name": "Two Words"}, "lower-case words"),
        ({"caption": " "}, "caption is empty"),
        ({"alt": "short"}, "at least 20 characters"),
        ({"data": {"a": [1], "b": [1, 2]}}, "one length"),
    ],
)
def test_an_incomplete_figure_is_refused(shown, faults, message):
    complete = {"name": "squares", "caption": "c", "alt": "A curve through 1, 4 and 9.", "data": {"a": [1]}}
    arguments = complete | faults
    with pytest.raises(ValueError, match=message):
        figures.show(curve(), arguments.pop("name"), **arguments)
    assert shown == []


def test_a_long_table_is_cut_on_the_page_but_whole_in_the_file(shown):
    figures.show(curve(), "long", caption="c", alt="A curve through 1, 4 and 9.", data={"n": range(100)})
    markup = shown[0][0]["text/html"]
    assert "60 more rows in the file" in markup
    assert len(base64.b64decode(re.search(r"csv;base64,([^\"]+)", markup)[1]).splitlines()) == 101
