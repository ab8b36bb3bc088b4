"""ditbook.claims: a number in its range is recorded, every other one stops the notebook."""

import math

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from ditbook import claims
from ditbook.claims import Claim, ClaimFailed, check


@pytest.fixture
def displayed(monkeypatch):
    """Pretend to be in a notebook and catch what `check` displays."""
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: InteractiveShell.instance())
    monkeypatch.setattr("IPython.display.display", lambda bundle, **options: shown.append((bundle, options)))
    return shown


@pytest.mark.parametrize(
    ("value", "range_"),
    [(1e-12, {"below": 1e-10}), (0.0, {"below": 0.0}), (3, {"above": 2}), (-1 / 3, {"between": (-0.5, -0.2)})],
)
def test_a_number_in_its_range_passes(value, range_):
    check("lemma-2.1", "a number", value, **range_)


@pytest.mark.parametrize(
    ("value", "range_"),
    [
        (2e-10, {"below": 1e-10}),
        (1.9, {"above": 2}),
        (-0.6, {"between": (-0.5, -0.2)}),
        (math.nan, {"below": 1.0}),
        (math.inf, {"above": 0.0}),
        (-math.inf, {"below": 0.0}),
    ],
)
def test_a_number_outside_or_not_finite_fails_and_says_so(value, range_):
    with pytest.raises(ClaimFailed, match="lemma-2.1: gap is .* expected"):
        check("lemma-2.1", "gap", value, **range_)


@pytest.mark.parametrize(
    "range_", [{}, {"below": 1, "above": 0}, {"between": (2, 1)}, {"below": math.inf}, {"between": (math.nan, 1)}]
)
def test_a_range_that_claims_nothing_is_refused(range_):
    with pytest.raises(ValueError, match="exactly one|finite|empty"):
        check("lemma-2.1", "gap", 0.0, **range_)


def test_tensors_and_zero_limits_are_numbers_too():
    check("x", "a tensor", torch.tensor(0.5), above=0)
    with pytest.raises(ClaimFailed):
        check("x", "a tensor", torch.tensor(0.5), below=0)


def test_outside_jupyter_it_prints(capsys):
    check("lemma-2.1", "gap", 1e-12, below=1e-10)
    assert "✓ lemma-2.1  gap: 1e-12 (at most 1e-10)" in capsys.readouterr().out


def test_the_record_travels_in_the_metadata_of_the_output(displayed):
    check("theorem-3.2", "slope", -0.4, between=(-1, -0.3), interval=(-0.5, -0.35), paper=-1 / 3)
    bundle, options = displayed[0]
    record = Claim(**options["metadata"][claims.RECORD_KEY])
    assert record == Claim("theorem-3.2", "slope", -0.4, -1.0, -0.3, True, (-0.5, -0.35), -1 / 3, False)
    assert "95% interval -0.5 to -0.35, paper -0.3333" in bundle["text/html"]


@pytest.mark.parametrize("value", [5.0, math.nan])
def test_a_failing_claim_keeps_its_record(displayed, value):
    with pytest.raises(ClaimFailed):
        check("lemma-2.1", "gap", value, below=1.0)
    record = displayed[0][1]["metadata"][claims.RECORD_KEY]
    assert record["passed"] is False
    assert record["value"] == (5.0 if value == 5.0 else None)


def test_the_card_escapes_markup(displayed):
    check("x", "a < b & c", 0.0, below=1.0)
    assert "a &lt; b &amp; c" in displayed[0][0]["text/html"]
