"""Claims: numbers that could have come out wrong, recorded where they are computed.

``check`` compares one number with a range fixed beforehand, shows a small card, and embeds a
machine-readable record in the metadata of the cell's output, from where the ledger collects it.
It knows no registry: whether an id exists is the collector's business.
"""

import html
import math
from dataclasses import asdict, dataclass

# The key of the output metadata under which the ledger looks for records.
RECORD_KEY = "ditbook_claim"


class ClaimFailed(AssertionError):
    """A claim's number left its range, or is not a finite number."""


@dataclass(frozen=True)
class Claim:
    """One recorded number: ``low <= value <= high`` is what was claimed of it (None: no limit on that side).

    ``interval`` is the confidence interval of a fitted value, ``paper`` the value the paper prints for it.
    ``refutes`` marks evidence *against* the registered statement (an erratum that was not borne out).
    """

    id: str
    what: str
    value: float | None
    low: float | None
    high: float | None
    passed: bool
    interval: tuple[float, float] | None = None
    paper: float | None = None
    refutes: bool = False

    @property
    def condition(self) -> str:
        """The range in words, as it stands on the card and in error messages."""
        if self.low is None:
            return f"at most {format_number(self.high)}"
        if self.high is None:
            return f"at least {format_number(self.low)}"
        return f"between {format_number(self.low)} and {format_number(self.high)}"


def check(
    id: str,
    what: str,
    value: float,
    *,
    below: float | None = None,
    above: float | None = None,
    between: tuple[float, float] | None = None,
    interval: tuple[float, float] | None = None,
    paper: float | None = None,
    refutes: bool = False,
) -> None:
    """Record that ``value`` lies in a range, and stop the notebook when it does not.

    Exactly one of ``below`` (value <= below), ``above`` (value >= above) and ``between`` (closed
    interval) is given. ``value`` is a number or a one-element tensor or array.

    :param id: identifier in the registry, e.g. ``"lemma-2.1"``; one statement may carry several checks.
    :param what: what the number is, in a few words, with its unit where it has one.
    :param interval: confidence interval of a fitted value, shown beside it.
    :param paper: the paper's value for the same quantity, shown beside it.
    :param refutes: True when the number speaks against the registered statement.
    :raises ClaimFailed: the value is out of range or not finite (the record is kept all the same).
    :raises ValueError: not exactly one range, or an empty one.
    """
    low, high = _limits(below, above, between)
    number = float(value)
    finite = math.isfinite(number)
    passed = finite and (low is None or number >= low) and (high is None or number <= high)
    claim = Claim(
        id=id,
        what=what,
        value=number if finite else None,
        low=low,
        high=high,
        passed=passed,
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        paper=None if paper is None else float(paper),
        refutes=refutes,
    )
    _show(claim, number)
    if not passed:
        raise ClaimFailed(f"{id}: {what} is {format_number(number)}, expected {claim.condition}")


def format_number(number: float) -> str:
    """Four significant digits, in the shorter of the two usual notations."""
    return f"{number:.4g}"


def _limits(below, above, between) -> tuple[float | None, float | None]:
    given = [name for name, limit in (("below", below), ("above", above), ("between", between)) if limit is not None]
    if len(given) != 1:
        raise ValueError(f"check needs exactly one of below, above, between; got {', '.join(given) or 'none'}")
    low, high = between if between is not None else (above, below)
    low, high = (None if limit is None else float(limit) for limit in (low, high))
    if any(limit is not None and not math.isfinite(limit) for limit in (low, high)):
        raise ValueError(f"the limits of a check must be finite, got {given[0]}={between or above or below}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"between=({low}, {high}) is an empty range")
    return low, high


def _show(claim: Claim, number: float) -> None:
    sign, word = ("✓", "passed") if claim.passed else ("✗", "failed")
    extra = ""
    if claim.interval is not None:
        extra += f", 95% interval {format_number(claim.interval[0])} to {format_number(claim.interval[1])}"
    if claim.paper is not None:
        extra += f", paper {format_number(claim.paper)}"
    line = f"{claim.what}: {format_number(number)} ({claim.condition}{extra})"
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        print(f"{sign} {claim.id}  {line}")
        return
    card = (
        f'<div class="claim claim-{word}" data-claim="{html.escape(claim.id)}">'
        f'<span class="claim-sign" aria-hidden="true">{sign}</span> '
        f'<span class="claim-id">{html.escape(claim.id)}</span> <span class="claim-word">{word}</span> '
        f'<span class="claim-what">{html.escape(claim.what)}</span> '
        f'<span class="claim-value">{html.escape(format_number(number))}</span> '
        f'<span class="claim-condition">{html.escape(claim.condition + extra)}</span></div>'
    )
    bundle = {"text/html": card, "text/plain": f"{sign} {claim.id}  {line}"}
    display(bundle, raw=True, metadata={RECORD_KEY: asdict(claim)})
