"""The comparison chapter's own code: fair sizes and budgets, the ReLU network, and the measures of linearity."""

import jupytext
import pytest
import torch
from chapters import NOTEBOOKS

CHAPTER = jupytext.read(NOTEBOOKS / "comparison.md")


def run_cells(*names: str) -> dict:
    """Namespace after the imports and the cells that define the names, in the chapter's order."""
    namespace = {"__name__": "__chapter__"}
    cells = [cell.source for cell in CHAPTER.cells if cell.cell_type == "code"]
    for number, source in enumerate(cells):
        if number < 2 or any(f"{word} {name}" in source for name in names for word in ("def", "class")):
            exec(compile(source.replace("style()\n", ""), "comparison.md", "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def code() -> dict:
    return run_cells("ReluNetwork", "tokens", "contestants", "multiplications")


@pytest.mark.parametrize("d0", [4, 8])
def test_the_four_networks_have_one_size(code, d0):
    sizes = [code["size"](make) for make in code["contestants"](d0).values()]
    assert len(sizes) == 4
    assert max(sizes) <= 1.05 * code["size"](code["contestants"](d0)["transformer"])
    assert min(sizes) >= 0.95 * code["size"](code["contestants"](d0)["transformer"])


@pytest.mark.parametrize("d0", [4, 8])
def test_counted_multiplications_of_the_relu_network_are_its_weights(code, d0):
    make = code["relu"](d0, (7, 5))
    weights = sum(W.numel() for W in make(torch.Generator()).weights)
    assert code["multiplications"](make, d0) == weights


def test_counted_multiplications_of_the_transformer_are_those_of_its_formulas(code):
    d, L, heads, hidden, width = 2, 3, 2, 5, 8
    tokenwise = L * (4 * heads * d + 2 * hidden * d)
    attention, time = 2 * heads * L**2, width**2 + width * 4 * d
    assert code["multiplications"](code["tokens"](d, L, hidden), d * L) == tokenwise + attention + time


def test_the_relu_network_is_the_formula(code):
    net = code["ReluNetwork"](3, (4,), time_features=2, generator=torch.Generator().manual_seed(0))
    h, t = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.full((5,), 0.7)
    angle = t.log() * net.frequencies[0]
    z = torch.cat([h, angle.sin()[:, None], angle.cos()[:, None]], 1)
    by_hand = torch.stack([net.weights[1] @ (net.weights[0] @ row).clamp(min=0) for row in z])
    assert torch.allclose(net(h, t), by_hand, atol=1e-6)


def test_training_reaches_every_weight_of_the_relu_network(code):
    net = code["ReluNetwork"](3, (4, 4), generator=torch.Generator().manual_seed(0))
    weights = {name: W.detach().clone().requires_grad_() for name, W in net.named_parameters()}
    h, t = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.full((20,), 0.7)
    torch.func.functional_call(net, weights, (h, t)).square().sum().backward()
    assert all(W.grad is not None and W.grad.abs().sum() > 0 for W in weights.values())


def test_a_skip_connection_adds_the_input(code):
    def net(skip):
        return code["ReluNetwork"](3, (4,), skip=skip, generator=torch.Generator().manual_seed(0))

    h, t = torch.ones(2, 3), torch.ones(2)
    assert torch.allclose(net(True)(h, t) - h, 0.1 * net(False)(h, t), atol=1e-6)


class TestLinearity:
    def test_data_on_a_subspace_leave_nothing_outside(self, generator):
        outside = run_cells("outside")["outside"]
        basis = torch.linalg.qr(torch.randn(10, 3, generator=generator))[0]
        share = outside(torch.randn(200, 3, generator=generator) @ basis.T)
        assert share[0] == 1
        assert share[2] > 0.05
        assert share[3] < 1e-5

    @pytest.mark.parametrize("dimension", [2, 5])
    def test_the_neighbour_estimate_finds_a_known_dimension(self, generator, dimension):
        local_dimension = run_cells("outside")["local_dimension"]
        points = torch.rand(3000, dimension, generator=generator) @ torch.eye(12)[:dimension]
        assert local_dimension(points) == pytest.approx(dimension, rel=0.15)

    def test_a_curve_has_one_dimension_however_it_winds(self, generator):
        local_dimension = run_cells("outside")["local_dimension"]
        angle = 6.2832 * torch.rand(3000, 1, generator=generator, dtype=torch.float64)
        curve = torch.cat([f(k * angle) / k for k in (1, 2, 3) for f in (torch.sin, torch.cos)], 1)
        assert local_dimension(curve) == pytest.approx(1, rel=0.15)
