"""Shared fixtures: one torch thread, float64 where a test asks for it, and the planted-fault runner."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from chapters import run_claim

from ditbook.claims import ClaimFailed

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def rejects(monkeypatch):
    """``rejects(chapter, claim, {"ditbook.module.name": wrong})``: the chapter's check refuses the wrong variant."""

    def run(chapter: str, claim: str, faults: dict[str, object], **parameters) -> None:
        for target, wrong in faults.items():
            monkeypatch.setattr(target, wrong)
        with pytest.raises(ClaimFailed, match=claim):
            run_claim(chapter, claim, **parameters)

    return run
