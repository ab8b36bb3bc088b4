"""See every softmax attention inside a model, and run it in almost linear time where that is safe (Section 5)::

    with AttentionAudit() as audit:
        model(x)
    print(audit)

For the length of a context, ``torch.nn.functional.scaled_dot_product_attention`` is a function of ours, torch's fused
kernels for whole layers are off, and compiled models run without their compiled graphs, which would bypass it. A
softmax computed elsewhere is listed as seen without its attention. TorchScript and exported graphs, and kernels that
are no torch functions, cannot be seen; inside ``torch.func.vmap`` torch refuses, since a number is read from a tensor.
"""

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from torch.overrides import TorchFunctionMode

from ditbook.attention import (
    AIM,
    CHUNK,
    FINEST,
    FIRST_RANK,
    MIN_GAIN,
    OVERHEAD,
    Certificate,
    Head,
    almost_linear_attention,
    exp_polynomial,
    factorise,
    key_moments,
    leading_error,
    smallest_rank,
    worst_certificate,
)
from ditbook.inputs import require_tolerance

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
# Degrees are tried up to this one; more features than that many give are of no use at any length.
LARGEST_DEGREE = 32
# Beyond this bound of the logits no method is tried: exp overflows on the way to its polynomial.
LARGEST_LOGIT = 200.0


@dataclass(frozen=True)
class Call:
    """One call of ``scaled_dot_product_attention``: its arguments, and how to answer it as if nobody watched."""

    run: Callable[[], Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def logit_scale(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def obstacle(self) -> str:
        """Why this is not plain attention of every query to every key; empty if it is."""
        found = {"mask": self.attn_mask is not None, "causal": self.is_causal, "dropout": self.dropout_p > 0}
        return ", ".join(name for name, there in found.items() if there)

    @cached_property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (heads, length, size), all batch dimensions counted as heads, in float32 or float64."""
        q, k, v = (t.detach() if t.dtype == torch.float64 else t.detach().float() for t in self.inputs)
        if self.enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
        return tuple(t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (q, k, v))

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


class AttentionHook(TorchFunctionMode, ABC):
    """A context in which every call of ``scaled_dot_product_attention`` is answered by :meth:`answer`.

    The module attribute is replaced, for calls from inside torch's own layers; a torch function mode, which is off
    there, catches callers that imported the function by name. Everything is put back on the way out, also after an
    exception. A context may be entered again later, and then goes on adding to its records.

    :raises RuntimeError: another context of this kind is active: which of the two answers would be a guess.
    """

    active: ClassVar["AttentionHook | None"] = None

    def __init__(self):
        super().__init__()
        self.records: list[Any] = []
        self.unseen: Counter[str] = Counter()
        self._busy = False

    @abstractmethod
    def answer(self, call: Call) -> Tensor:
        """The output of one call."""

    def __enter__(self):
        if AttentionHook.active is not None:
            raise RuntimeError(
                f"{type(self).__name__} cannot be entered inside {type(AttentionHook.active).__name__}: "
                "leave the active context first"
            )
        with ExitStack() as undo:
            AttentionHook.active = self
            undo.callback(setattr, AttentionHook, "active", None)
            undo.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
            F.scaled_dot_product_attention = partial(self._intercept, F.scaled_dot_product_attention)
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            super().__enter__()
            undo.push(super().__exit__)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception):
        return self._undo.__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        if func is torch_attention:
            return self._intercept(func, *args, **kwargs)
        if func is F.multi_head_attention_forward and _wants_weights(args, kwargs):
            self.unseen[f"MultiheadAttention with need_weights=True on {tuple(args[0].shape)}: torch computes the "
                        "softmax itself; with need_weights=False it is audited"] += 1  # fmt: skip
        result = func(*args, **kwargs)
        if func in SOFTMAX and result.ndim > 1:
            self.unseen[f"softmax of {tuple(result.shape)}: its queries and keys, if it has any, are not known"] += 1
        return result

    def _intercept(self, exact, *args, **kwargs):
        if self._busy:
            return exact(*args, **kwargs)
        self._busy = True
        try:
            return self.answer(Call(partial(exact, *args, **kwargs), *args, **kwargs))
        finally:
            self._busy = False

    def table(self):
        """The records as a ``pandas.DataFrame``, one row for each call in order."""
        import pandas

        kind = self.record_type
        columns = [field.name for field in fields(kind)]
        return pandas.DataFrame([[getattr(r, c) for c in columns] for r in self.records], columns=columns)

    def __str__(self) -> str:
        if not self.records:
            lines = ["No call of scaled_dot_product_attention: the model has no softmax attention that can be seen."]
        else:
            names = [field.name for field in fields(self.record_type)]
            rows = [names, *([_cell(getattr(r, name)) for name in names] for r in self.records)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines + [f"Seen without its attention, {n} x: {what}." for what, n in self.unseen.items()])


def _wants_weights(args: tuple, kwargs: dict) -> bool:
    return inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments.get("need_weights", True)


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value in (None, "") else str(value)


# --- the audit --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionRecord:
    """What one attention call had in it. Where several heads and samples differ, the largest value counts.

    The rank, the degree and the speed-up are those of the head with the largest logit, at the audit's tolerance. They
    are None and 1 where a mask or dropout is in the way, or an entry is not finite; and a rank or a degree is None
    where up to 320 pivots, or degree 32, do not meet the tolerance.
    """

    shape: tuple[int, ...]  # of the queries, (..., Lq, d)
    keys: int  # Lk
    max_q: float  # largest absolute entries
    max_k: float
    max_v: float
    max_logit: float  # largest absolute entry of scale q k', before any mask
    logit_bound: float  # |scale| max |q_i| max |k_j|: what entries of this size allow
    log_length: float  # log Lk; theory wants the logits o(log L) and d = O(log L)
    rank: int | None  # pivots of the low-rank method that meet the tolerance
    degree: int | None  # even degree of the polynomial that meets it
    predicted_speedup: float  # kernel evaluations, exact over almost linear; 1: exact attention would be kept
    obstacle: str  # "mask", "causal" or "dropout"


class AttentionAudit(AttentionHook):
    """Record every softmax attention in a model's forward pass: sizes, norms, logits, and what a fast method could do.

    ``records`` holds one :class:`AttentionRecord` for each call, ``unseen`` counts what was seen without its
    attention, ``print(audit)`` shows both. Outputs are those of the model, bit for bit. Extra time is that of another
    attention (all logits are formed, in chunks of queries, so no Lq x Lk array arises) and of one small low-rank
    problem for each call.

    :param tolerance: of the output error over max(1, max abs v), for the rank and degree estimates.
    :raises ValueError: tolerance not positive and finite.

    Source: Section 5
    """

    record_type = AttentionRecord

    def __init__(self, tolerance: float = 1e-3):
        super().__init__()
        self.tolerance = require_tolerance(tolerance)

    def answer(self, call: Call) -> Tensor:
        output = call.run()
        if any(t.numel() == 0 for t in call.inputs):
            self.unseen[f"attention on empty tensors, queries {tuple(call.query.shape)}"] += 1
            return output
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False), torch._C.DisableTorchFunction():
            self.records.append(examine(call, self.tolerance))
        return output

    def plot(self, axis=None):
        """Largest logits and logit bounds call by call, beside log L; returns the matplotlib axis."""
        import matplotlib.pyplot as plt

        axis = plt.figure().gca() if axis is None else axis
        calls = range(1, len(self.records) + 1)
        axis.plot(calls, [r.logit_bound for r in self.records], "v", label="bound from the norms")
        axis.plot(calls, [r.max_logit for r in self.records], "o", label="largest logit")
        axis.plot(calls, [r.log_length for r in self.records], "--", color="#707070", marker="", label="log L")
        axis.set(xlabel="attention call", ylabel="absolute scaled logit", yscale="log")
        axis.legend()
        return axis


def examine(call: Call, tolerance: float) -> AttentionRecord:
    """Measure one call."""
    q, k, v = call.heads
    sizes = [float(t.abs().amax()) for t in (q, k, v)]
    logits = largest_logits(q, k, call.logit_scale)
    norms = q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1) * abs(call.logit_scale)
    rank, degree, speedup = None, None, 1.0
    if not call.obstacle and all(map(math.isfinite, sizes)):
        worst = int(logits.argmax())
        head = Head(q[worst], k[worst], v[worst], call.logit_scale, tolerance, torch.Generator().manual_seed(0))
        rank, degree = estimate_rank(head), estimate_degree(head.centred.logit_bound, tolerance)
        speedup = predict_speedup(head, rank, degree)
    return AttentionRecord(
        *(tuple(call.query.shape), k.shape[-2]),
        *sizes,
        max_logit=float(logits.amax()),
        logit_bound=float(norms.amax()),
        log_length=math.log(k.shape[-2]),
        rank=rank,
        degree=degree,
        predicted_speedup=speedup,
        obstacle=call.obstacle,
    )


def largest_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Largest absolute ``scale q_i'k_j`` of each head, (heads,), from (heads, Lq, d) and (heads, Lk, d), in blocks."""
    heads, rows = max(1, CHUNK // (q.shape[1] * k.shape[1])), max(1, CHUNK // k.shape[1])
    largest = []
    for some_q, some_k in zip(q.split(heads), k.split(heads), strict=True):
        blocks = [(block @ some_k.mT).flatten(1).abs_().amax(1) for block in some_q.split(rows, dim=1)]
        largest.append(torch.stack(blocks).amax(0))
    return torch.cat(largest) * abs(scale)


def estimate_rank(head: Head) -> int | None:
    """Pivots that meet the head's tolerance at test queries, or None if all that are tried do not."""
    largest = min(FIRST_RANK, len(head.q), len(head.k))
    factors = factorise(head.centred, largest, head.generator)
    moments, aim = key_moments(factors, head.v), AIM * head.tolerance * head.unit
    if not leading_error(factors, moments, head.tests, factors.rank) <= aim:
        return None
    return smallest_rank(factors, moments, head.tests, aim)


def estimate_degree(logit_bound: float, tolerance: float) -> int | None:
    """The first even degree whose error bound, for centred logits up to ``logit_bound``, is within half the tolerance.

    Source: Lemma G.3
    """
    if logit_bound > LARGEST_DEGREE:  # no degree below the bound is near exp; and exp(bound) may overflow
        return None
    degrees = range(0, LARGEST_DEGREE + 1, 2)
    return next((g for g in degrees if exp_polynomial(logit_bound, g).error_bound <= tolerance / 2), None)


def predict_speedup(head: Head, rank: int | None, degree: int | None) -> float:
    """Kernel evaluations of exact attention over those of the better method; 1 below what is worth it."""
    gains = [] if rank is None else [head.gain(rank)]
    gains += [] if degree is None else [head.gain(math.comb(head.q.shape[-1] + degree, degree), tests=0)]
    return max((gain for gain in gains if gain >= MIN_GAIN), default=1.0)


# --- almost linear ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlmostLinearRecord:
    """What was done with one call; errors in the unit of the tolerance, and the worst over the heads."""

    shape: tuple[int, ...]  # of the queries, (..., Lq, d)
    keys: int  # Lk
    method: str  # "exact", "polynomial", "low-rank" or, where heads differ, "mixed"
    rank: int | None
    sampled_error: float
    predicted_gain: float  # kernel evaluations of exact attention over this
    fast_share: float  # of the heads
    reason: str  # why the call was left to the model's own attention; empty where it was not


class AlmostLinear(AttentionHook):
    """See :func:`almost_linear`."""

    record_type = AlmostLinearRecord

    def __init__(self, tolerance: float):
        super().__init__()
        self.tolerance = require_tolerance(tolerance)

    def answer(self, call: Call) -> Tensor:
        reason, gain = reason_for_exact(call, self.tolerance), 0.0
        if not reason:
            easiest = int(norm_bounds(*call.heads[:2]).argmin())
            first, certificate = self._attend(call, easiest)
            gain = certificate.predicted_gain
            if certificate.method == "exact":
                reason = f"no rank worth its cost meets the tolerance (gain {gain:.1f})"
        if reason:
            self.records.append(
                AlmostLinearRecord(tuple(call.query.shape), call.key.shape[-2], "exact", None, 0.0, gain, 0.0, reason)
            )
            return call.run()
        heads = range(len(call.heads[0]))
        answers = [(first, certificate) if head == easiest else self._attend(call, head) for head in heads]
        outputs, certificates = zip(*answers, strict=True)
        self._report(call, worst_certificate(certificates))
        return torch.stack(outputs).reshape(*call.query.shape[:-1], call.value.shape[-1])

    def _attend(self, call: Call, head: int) -> tuple[Tensor, Certificate]:
        q, k, v = (t[head] for t in call.heads)
        with torch._C.DisableTorchFunction():  # thousands of small steps that the mode need not look at
            return almost_linear_attention(q, k, v, call.logit_scale, self.tolerance, return_certificate=True)

    def _report(self, call: Call, c: Certificate) -> None:
        shape = tuple(call.query.shape), call.key.shape[-2]
        done = c.method, c.rank, c.sampled_error, c.predicted_gain, c.fast_share
        self.records.append(AlmostLinearRecord(*shape, *done, reason=""))

    def __str__(self) -> str:
        fast = sum(record.method != "exact" for record in self.records)
        return f"{fast} of {len(self.records)} calls in almost linear time.\n{super().__str__()}"


def almost_linear(tolerance: float = 1e-3) -> AlmostLinear:
    """A context in which attention runs in almost linear time where its certificate allows, and exactly elsewhere.

    Batch size, grad mode, dtype and device are preserved. Left to the model's own attention, with the reason in
    ``records``: masks, causal attention and dropout, half precision and autocast, inputs that require a gradient,
    sequences too short to gain, and calls none of whose heads the method can speed up at this tolerance.

    :param tolerance: of each attention output, largest absolute error over max(1, max abs v). Later layers may amplify
        it: compare the model's outputs once with and without the context.
    :raises ValueError: tolerance not positive and finite.

    Source: Proposition 4.2
    """
    return AlmostLinear(tolerance)


def reason_for_exact(call: Call, tolerance: float) -> str:
    """Why a call cannot or need not be sped up, as far as that shows before trying; empty if nothing speaks against."""
    q, k, _ = call.inputs
    if call.obstacle:
        return call.obstacle
    if call.enable_gqa or len({t.shape[:-2] for t in call.inputs}) > 1:
        return "heads or batches that are shared"
    if torch.is_autocast_enabled(q.device.type) or {t.dtype for t in call.inputs} - {torch.float32, torch.float64}:
        return "less than single precision"
    if tolerance < FINEST * torch.finfo(q.dtype).eps:
        return f"tolerance too fine for {q.dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.inputs):
        return "a gradient is required"
    if q.shape[-2] * k.shape[-2] < MIN_GAIN * OVERHEAD:
        return "too short to gain"
    if not all(t.isfinite().all() for t in call.inputs):
        return "entries that are not finite"
    return "logits far too large" if norm_bounds(q, k).max() * abs(call.logit_scale) > LARGEST_LOGIT else ""


def norm_bounds(q: Tensor, k: Tensor) -> Tensor:
    """Product of the longest query and the longest key of each head, (heads,), both moved to mean zero."""
    lengths = [(t - t.mean(-2, keepdim=True)).norm(dim=-1).amax(-1) for t in (q, k)]
    return lengths[0] * lengths[1]
