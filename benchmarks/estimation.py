"""Training an ensemble of score networks at once beside training one network after another; a sweep cut short.

Run with ``python benchmarks/estimation.py`` (about a minute, two threads). The same networks, data and number of
steps at batch 64; ratios of seconds measured in one run.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import verdict

from ditbook.diffusion import denoising_loss
from ditbook.estimation import fit
from ditbook.subspace import GaussianMixture, SubspaceLaw, random_subspace
from ditbook.sweep import sweep
from ditbook.transformer import LatentTransformer, ScoreNetwork, Transformer

MEMBERS, SAMPLES, STEPS, BATCH, RATE = 10, 1024, 40, 64, 3e-2
RATIO = 1.5


def law() -> SubspaceLaw:
    latent = GaussianMixture(torch.ones(1), torch.zeros(1, 4), torch.eye(4)[None])
    return SubspaceLaw(random_subspace(16, 4, generator=torch.Generator().manual_seed(0)), latent)


def network(seed: int) -> ScoreNetwork:
    g = torch.Generator().manual_seed(seed)
    f = LatentTransformer(Transformer(2, 2, 1, hidden=16, generator=g), time_features=16, generator=g)
    return ScoreNetwork(random_subspace(16, 4, generator=g), f, 0.1, 3.0, train_basis=True)


def train_alone(net: ScoreNetwork, data: torch.Tensor, generator: torch.Generator) -> None:
    """The usual training loop of one network."""
    optimiser = torch.optim.Adam(net.parameters(), lr=RATE)
    for _ in range(STEPS):
        x0 = data[torch.randint(len(data), (BATCH,), generator=generator)]
        t = net.T0 + (net.T - net.T0) * torch.rand(BATCH, generator=generator)
        loss = denoising_loss(net, x0, t, net.process.perturb(x0, t, generator=generator), net.process)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare_training() -> None:
    g = torch.Generator().manual_seed(1)
    data = [law().sample(SAMPLES, generator=g) for _ in range(MEMBERS)]
    networks = [network(seed) for seed in range(MEMBERS)]
    settings = {"steps": STEPS, "batch": BATCH, "rate": RATE, "generator": g}
    ways = {
        "plain loop, one after another": lambda: [train_alone(n, x, g) for n, x in zip(networks, data, strict=True)],
        "ensembles of one, one after another": lambda: [
            fit([n], [x], **settings) for n, x in zip(networks, data, strict=True)
        ],
    }
    ways["ensemble"] = lambda: fit(networks, data, **settings)
    fit(networks[:1], data[:1], **settings | {"steps": 3})  # warm up
    # In turn, and the shortest of three: another program on the machine then disturbs all ways alike.
    rounds = [{name: seconds(way) for name, way in ways.items()} for _ in range(3)]
    shortest = {name: min(each[name] for each in rounds) for name in ways}
    together = shortest.pop("ensemble")
    for name, alone in shortest.items():
        verdict(f"{MEMBERS} networks, batch {BATCH}: {name}, over ensemble", alone / together, RATIO, at_least=True)


def one_error(n: int, seed: int) -> float:
    """Something that takes a moment and depends on its seed."""
    g = torch.Generator().manual_seed(seed)
    _, losses = fit([network(seed)], [law().sample(n, generator=g)], steps=10, generator=g)
    return losses[-1].item()


def study(folder: str) -> list:
    return sweep(one_error, {"n": [64, 256, 1024]}, seeds=range(4), jobs=1, folder=folder)


def interrupt_and_resume() -> None:
    """Kill a sweep in another process once it has some results, resume it here, and compare with a run of its own."""
    with tempfile.TemporaryDirectory() as cut, tempfile.TemporaryDirectory() as whole:
        child = subprocess.Popen([sys.executable, __file__, cut], stderr=subprocess.DEVNULL)
        while child.poll() is None and len(list(Path(cut).rglob("*.pkl"))) < 3:
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        kept = len(list(Path(cut).rglob("*.pkl")))
        same = study(cut) == study(whole)
    verdict(f"sweep killed with {kept} of 12 results on disk and resumed: identical numbers", same, True, at_least=True)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    if len(sys.argv) > 1:
        study(sys.argv[1])
    else:
        compare_training()
        interrupt_and_resume()
