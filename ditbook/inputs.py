"""Input checked at run time: shapes by the one decorator that public functions carry, values by a few functions."""

import math

import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

# Wrong shapes or dtypes raise ``jaxtyping.TypeCheckError``, whose message names the argument,
# the expected shape and what came.
typed = jaxtyped(typechecker=beartype)


def require_inputs(scale: float | None, **inputs: Tensor) -> None:
    """Refuse what would give a silent wrong answer.

    :raises ValueError: an empty tensor, one of another dtype or device than the first, an entry that is NaN or
        infinite, or a scale that is.
    """
    like, first = next(iter(inputs.items()))
    for name, value in inputs.items():
        if value.numel() == 0:
            raise ValueError(f"{name} must not be empty, got shape {tuple(value.shape)}")
        require_dtype(name, value, first.dtype, like)
        if value.device != first.device:
            raise ValueError(f"{name} must be on {first.device} like {like}, got {value.device}")
        # The sum is quick and decides nearly always: only a sum that overflows needs the second look.
        if not value.detach().sum().isfinite() and not value.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")


def require_dtype(name: str, value: Tensor, expected: torch.dtype, like: str) -> None:
    """:raises ValueError: the dtype is not that of ``like``: torch would mix them without a word, or fail later."""
    if value.dtype != expected:
        raise ValueError(f"{name} must have dtype {expected} like {like}, got {value.dtype}")


def require_precision(name: str, value: Tensor) -> None:
    """:raises ValueError: the dtype is neither float32 nor float64."""
    if value.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {value.dtype}")


def require_tolerance(tolerance: float) -> float:
    """The tolerance, if it is one.

    :raises ValueError: it is not positive and finite.
    """
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be positive and finite, got {tolerance}")
    return tolerance
