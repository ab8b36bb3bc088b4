"""What watching costs, and what almost-linear attention gains in a whole DiT whose queries and keys are normalised.

Run with ``python benchmarks/audit.py``. One run, one model for each length, two threads: diffusers' DiT with two
blocks, two heads of size 8, RMS-normalised queries and keys with gain 0.5, random weights, float32, one image, patches
of one pixel. Every attention call is compared with exact attention on the inputs that it got. Prints seconds, their
ratios and the errors; the shorter of two runs each, because other programs may be running.
"""

import math
import time

import torch
from _common import THREADS, verdict
from diffusers import DiTTransformer2DModel
from torch import nn

from ditbook.audit import AlmostLinear, AttentionAudit, Call

REPEATS, TOLERANCE = 2, 1e-3
SIDES, HEADS, HEAD_SIZE, GAIN = (64, 96, 128), 2, 8, 0.5


class CheckedAlmostLinear(AlmostLinear):
    """Also notes the true largest error of every call, in the unit of the tolerance."""

    def __init__(self, tolerance: float):
        super().__init__(tolerance)
        self.errors = []

    def answer(self, call: Call):
        output = super().answer(call)
        self.errors.append(float((output - call.run()).abs().max()) / max(1.0, float(call.value.abs().max())))
        return output


def controlled_dit(side: int, gain: float) -> DiTTransformer2DModel:
    """A DiT on side x side images with gain * RMS norm of every query and key."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_SIZE,
        in_channels=4,
        num_layers=2,
        sample_size=side,
        patch_size=1,
        norm_num_groups=4,
        num_embeds_ada_norm=1000,
    )
    for block in model.transformer_blocks:
        block.attn1.norm_q, block.attn1.norm_k = (nn.RMSNorm(HEAD_SIZE) for _ in "qk")
        for norm in (block.attn1.norm_q, block.attn1.norm_k):
            nn.init.constant_(norm.weight, gain)
    return model.eval()


def shortest(forward, context=None) -> float:
    """Seconds of a forward pass, within a fresh context if there is one."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        if context is None:
            forward()
        else:
            with context(TOLERANCE):
                forward()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(side: int, gain: float) -> tuple[float, bool]:
    """Print a line; the largest error of a call, and whether the model's output is the exact one bit for bit."""
    model = controlled_dit(side, gain)
    x, t, label = torch.randn(1, 4, side, side), torch.tensor([500]), torch.tensor([1])

    def forward():
        return model(x, timestep=t, class_labels=label).sample

    exact = forward()
    with CheckedAlmostLinear(TOLERANCE) as checked:
        output = forward()
    with AttentionAudit(TOLERANCE) as audit:
        forward()
    plain, watched, fast = shortest(forward), shortest(forward, AttentionAudit), shortest(forward, AlmostLinear)
    change = (output - exact).abs().max() / exact.abs().max()
    same = "bit for bit" if torch.equal(output, exact) else f"{float(change):.1e}"
    logit = max(r.max_logit for r in audit.records)
    shares = sum(r.fast_share for r in checked.records) / len(checked.records)
    print(
        f"{side**2:6d} {gain:5.1f} {logit:6.2f} {math.log(side**2):6.2f} {plain:8.3f} {watched / plain:11.2f} "
        f"{shares:10.0%} {plain / fast:8.2f} {max(checked.errors):11.1e} {same:>12s}  {checked.records[0].reason}"
    )
    return max(checked.errors), torch.equal(output, exact)


def main() -> None:
    torch.set_num_threads(THREADS)
    print(f"{THREADS} threads, torch {torch.__version__}, tolerance {TOLERANCE:g}")
    print("     L  gain  logit  log L  exact/s  audit ratio  fast heads  speedup  call error output error  why exact")
    with torch.no_grad():
        errors = [measure(side, GAIN)[0] for side in SIDES]
        _, exact = measure(SIDES[0], 6 * GAIN)
    verdict("largest error of a call", max(errors), TOLERANCE, at_least=False)
    verdict("outside the regime the output is exact, bit for bit", exact, True, at_least=True)


if __name__ == "__main__":
    main()
