"""Covering numbers of the paper's transformer class, in logarithms that never overflow (Appendix F.2)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NormProfile:
    """The constants of Definition 3.2 that bound a network's weights, in the paper's orientation.

    Source: Definition 3.2
    """

    blocks: int
    d: int
    heads: int
    head_size: int
    C_OV: float
    C_OV_2inf: float
    C_KQ: float
    C_KQ_2inf: float
    C_F: float
    C_F_2inf: float
    C_E: float
    C_X: float
