"""ditbook/inputs.py: each refusal names the argument, what was expected and what came."""

import math

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from ditbook.inputs import require_inputs, require_precision, require_tolerance, typed

HUGE = torch.full((4,), torch.finfo(torch.float32).max)


@typed
def product(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return a @ b


def test_shapes_that_do_not_fit_are_refused():
    assert product(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    with pytest.raises(TypeCheckError, match=r"(?s)parameter 'b'.*\[4,4\]"):
        product(torch.ones(2, 3), torch.ones(4, 4))


def test_good_input_passes_even_where_its_sum_overflows():
    require_inputs(None, q=torch.ones(2), k=HUGE)
    require_inputs(0.5, q=torch.ones(2, requires_grad=True))


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (torch.ones(0, 3), r"k must not be empty, got shape \(0, 3\)"),
        (torch.ones(2).double(), "k must have dtype torch.float32 like q, got torch.float64"),
        (torch.ones(2, device="meta"), "k must be on cpu like q, got meta"),
        (torch.tensor([1.0, math.nan]), "k must be finite, got NaN or infinity"),
        (torch.tensor([math.inf, -math.inf]), "k must be finite, got NaN or infinity"),
    ],
)
def test_what_would_give_a_silent_wrong_answer_is_refused(k, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        require_inputs(1.0, q=torch.ones(2), k=k)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_refused(scale):
    with pytest.raises(ValueError, match="^scale must be finite"):
        require_inputs(scale, q=torch.ones(2))


def test_low_precision_is_refused():
    require_precision("q", torch.ones(1))
    with pytest.raises(ValueError, match=r"^q must be float32 or float64, got torch\.bfloat16$"):
        require_precision("q", torch.ones(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan, math.inf])
def test_a_tolerance_must_be_positive_and_finite(tolerance):
    assert require_tolerance(1e-3) == 1e-3
    with pytest.raises(ValueError, match="^tolerance must be positive and finite"):
        require_tolerance(tolerance)
