"""Training many networks equals training each; errors against closed forms, scipy and quadrature."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ditbook import estimation
from ditbook.diffusion import denoising_loss
from ditbook.estimation import (
    Ensemble,
    alignment,
    error_curve,
    fit,
    member_losses,
    score_error,
    subspace_error,
    total_variation,
)
from ditbook.subspace import GaussianMixture, SubspaceLaw, random_subspace
from ditbook.transformer import LatentTransformer, ScoreNetwork, Transformer

D, D0, T0, T = 6, 2, 0.1, 2.0


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int, hidden: int = 4, T0: float = T0, T: float = T, train_basis: bool = True) -> ScoreNetwork:
    g = seeded(seed)
    f = LatentTransformer(Transformer(1, D0, 1, hidden=hidden, generator=g), time_features=4, generator=g)
    return ScoreNetwork(random_subspace(D, D0, generator=g), f, T0, T, train_basis=train_basis)


@pytest.fixture
def law(generator) -> SubspaceLaw:
    means = torch.tensor([[1.0, 0.5], [-1.0, -0.5]])
    latent = GaussianMixture(torch.tensor([0.3, 0.7]), means, 0.25 * torch.eye(2).repeat(2, 1, 1))
    return SubspaceLaw(random_subspace(D, D0, generator=generator), latent)


def mean_of_inverse_squares(T0: float, T: float) -> float:
    """The average of 1/sigma(t)^2 over [T0, T], by scipy's quadrature."""
    return scipy.integrate.quad(lambda t: (1 - math.exp(-t)) ** -2, T0, T)[0] / (T - T0)


class TestEnsemble:
    @pytest.mark.parametrize("train_basis", [True, False])
    def test_members_equal_their_networks(self, train_basis, generator):
        networks = [network(seed, train_basis=train_basis) for seed in range(3)]
        x, t = torch.randn(3, 5, D, generator=generator), T0 + torch.rand(3, 5, generator=generator)
        together = Ensemble.of(networks)(x, t)
        alone = torch.stack([net(x[i], t[i]) for i, net in enumerate(networks)])
        torch.testing.assert_close(together, alone)

    def test_rows_without_a_member_axis_are_shown_to_every_member(self, generator):
        ensemble = Ensemble.of([network(seed) for seed in range(3)])
        x = torch.randn(4, D, generator=generator)
        torch.testing.assert_close(ensemble(x, 0.5), ensemble(x.expand(3, 4, D), 0.5))

    def test_some_members_are_an_ensemble(self, generator):
        ensemble = Ensemble.of([network(seed) for seed in range(4)])
        x = torch.randn(5, D, generator=generator)
        torch.testing.assert_close(ensemble[1:3](x, 0.5), ensemble(x, 0.5)[1:3])
        assert (len(ensemble), len(ensemble[1:3])) == (4, 2)

    def test_networks_of_two_architectures_are_refused(self):
        with pytest.raises(ValueError, match="one architecture"):
            Ensemble.of([network(0), network(1, hidden=5)])

    def test_member_losses_are_the_denoising_loss(self, law, generator):
        ensemble = Ensemble.of([network(seed) for seed in range(3)])
        process = ensemble.network.process
        x0 = law.sample(21, generator=generator).reshape(3, 7, D)
        t = T0 + torch.rand(3, 7, generator=generator)
        xt = process.perturb(x0, t, generator=generator)
        each = member_losses(ensemble, x0, t, xt)
        torch.testing.assert_close(each.mean(), denoising_loss(ensemble, x0, t, xt, process))


class TestFit:
    @pytest.mark.parametrize("fresh", [True, False])
    def test_training_together_equals_training_each_alone(self, fresh, law):
        networks = [network(0, T=1.0), network(1), network(2)]
        data = [law.sample(n, generator=seeded(9)) for n in (5, 20, 50)]
        draw = estimation._minibatches(networks, data, fresh, seeded(3))
        batches = [draw(8) for _ in range(6)]
        ensemble, losses = fit(networks, data, steps=6, batch=8, rate=1e-2, fresh=fresh, generator=seeded(3))
        for i, net in enumerate(networks):
            optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 6)
            for step, batch in enumerate(batches):
                x0, t, xt = (part[i] for part in batch)
                loss = denoising_loss(net, x0, t, xt, net.process)
                assert loss.item() == pytest.approx(losses[step, i].item(), rel=2e-4)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
            for name, parameter in net.named_parameters():
                torch.testing.assert_close(ensemble.parameters[name][i], parameter, rtol=1e-3, atol=2e-4)

    def test_the_networks_given_are_left_unchanged(self, law, generator):
        net = network(0)
        before = [parameter.clone() for parameter in net.parameters()]
        fit([net], [law.sample(10, generator=generator)], steps=3, generator=generator)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    def test_the_printed_loss_uses_one_draw_for_each_sample_point(self, law, generator):
        data = [law.sample(3, generator=generator), law.sample(4, generator=generator)]
        once = estimation._minibatches([network(0), network(1)], data, False, generator)
        anew = estimation._minibatches([network(0), network(1)], data, True, generator)
        seen_once = torch.cat([once(50)[1] for _ in range(4)], 1)
        seen_anew = torch.cat([anew(50)[1] for _ in range(4)], 1)
        assert [len(row.unique()) for row in seen_once] == [3, 4]
        assert min(len(row.unique()) for row in seen_anew) > 190

    def test_every_member_sees_its_own_sample_and_times(self, generator):
        data = [torch.full((n, D), float(n)) for n in (2, 7)]
        draw = estimation._minibatches([network(0, T=0.3), network(1, T=5.0)], data, True, generator)
        x0, t, _ = draw(200)
        assert (x0[0] == 2).all()
        assert (x0[1] == 7).all()
        assert 0.1 <= t[0].min() < t[0].max() <= 0.3 < 4 < t[1].max() <= 5

    @pytest.mark.parametrize(
        ("networks", "sizes", "message"), [([], [], "one sample"), ([0, 1], [3], "1 for 2"), ([0, 1], [3, 0], "n >= 1")]
    )
    def test_samples_that_do_not_fit_are_named(self, networks, sizes, message, generator):
        data = [torch.zeros(n, D) for n in sizes]
        with pytest.raises(ValueError, match=message):
            fit([network(seed) for seed in networks], data, steps=1, generator=generator)


class TestScoreError:
    def test_the_exact_score_has_none(self, law, generator):
        assert score_error(law.score, law, T0, T, samples=50, generator=generator) == 0

    @pytest.mark.parametrize("upper", [1.0, 3.0, 30.0])
    def test_a_known_gap_has_the_closed_form(self, law, generator, upper):
        """The score is off by v / sigma(t), so the squared error is norm(v)^2 times the mean of 1 / sigma^2."""
        v = torch.tensor([0.3, 0, 0, -0.4, 0, 0])
        error = score_error(
            lambda x, t: law.score(x, t) + v / -torch.expm1(-t),
            law,
            T0,
            upper,
            samples=4,
            nodes=64,
            generator=generator,
        )
        assert error.item() == pytest.approx(0.25 * mean_of_inverse_squares(T0, upper), rel=3e-3)

    def test_the_error_is_the_excess_of_the_denoising_loss(self, law, generator):
        """Equation 2.1: the loss minus its value at the exact score is the squared error."""
        ensemble = Ensemble.of([network(0)])
        process, n = ensemble.network.process, 200_000
        x0 = law.sample(n, generator=generator)[None]
        t = T0 + (T - T0) * torch.rand(1, n, generator=generator)
        xt = process.perturb(x0, t, generator=generator)
        target = process.transition_score(x0, t, xt)
        exact = law.score(xt[0], t[0])[None]
        excess = (ensemble(xt, t) - target).square().sum(-1) - (exact - target).square().sum(-1)
        error = score_error(ensemble, law, T0, T, samples=4000, generator=generator)
        assert excess.mean().item() == pytest.approx(error.item(), rel=0.05)

    def test_the_curve_has_a_row_for_each_member(self, law, generator):
        ensemble = Ensemble.of([network(seed) for seed in range(3)])
        assert error_curve(ensemble, law, torch.tensor([0.1, 0.5]), samples=10, generator=generator).shape == (3, 2)

    @pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)])
    def test_an_empty_time_range_is_refused(self, law, generator, low, high):
        with pytest.raises(ValueError, match="T0"):
            score_error(law.score, law, low, high, generator=generator)

    def test_data_without_an_exact_score_are_refused(self, generator):
        digits = torch.tensor(load_digits().data, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"exact score.*Tensor"):
            score_error(lambda x, t: x, digits, T0, T, generator=generator)


class TestSubspaceError:
    @settings(deadline=None, max_examples=30)
    @given(st.integers(0, 10**6), st.integers(1, 4), st.integers(4, 9))
    def test_it_is_twice_the_sum_of_squared_sines_of_the_angles(self, seed, d0, D):
        g = seeded(seed)
        W, B = (torch.randn(D, d0, generator=g, dtype=torch.float64) for _ in range(2))
        angles = scipy.linalg.subspace_angles(W.numpy(), B.numpy())
        assert subspace_error(W, B).item() == pytest.approx(2 * (np.sin(angles) ** 2).sum(), abs=1e-10)

    def test_the_basis_of_a_subspace_does_not_matter(self, generator):
        B = random_subspace(D, D0, generator=generator)
        skew = torch.tensor([[3.0, 0.1], [0.0, 0.2]])
        assert subspace_error(B @ skew, B) < 1e-10

    def test_orthogonal_subspaces_are_at_the_largest_distance(self):
        eye = torch.eye(D)
        assert subspace_error(eye[:, :2], eye[:, 2:4]) == pytest.approx(4)

    def test_members_have_their_own_error(self, generator):
        W = torch.stack([random_subspace(D, D0, generator=generator) for _ in range(3)])
        assert subspace_error(W, W[1]).shape == (3,)
        assert subspace_error(W, W[1])[1] < 1e-10

    def test_dependent_columns_are_refused(self, generator):
        B = random_subspace(D, D0, generator=generator)
        with pytest.raises(ValueError, match="W_B must have linearly independent"):
            subspace_error(B[:, [0, 0]], B)


class TestAlignment:
    def test_it_undoes_a_rotation_of_the_basis(self, generator):
        B = random_subspace(D, 3, generator=generator)
        U = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
        torch.testing.assert_close(alignment(B @ U.mT, B), U)

    def test_it_is_orthogonal_and_no_rotation_does_better(self, generator):
        W, B = (random_subspace(D, 3, generator=generator) for _ in range(2))
        U = alignment(W, B)
        torch.testing.assert_close(U @ U.mT, torch.eye(3), atol=1e-5, rtol=0)
        others = torch.linalg.qr(torch.randn(200, 3, 3, generator=generator)).Q
        assert (W @ U - B).norm() <= (W @ others - B).norm(dim=(1, 2)).min()


class TestTotalVariation:
    def test_two_shifted_gaussians_have_the_closed_form(self, generator):
        standard = torch.distributions.Normal(0.0, 1.0)
        samples = 0.8 + torch.randn(400_000, 1, generator=generator)
        found = total_variation(samples, lambda x: standard.log_prob(x).sum(-1), radius=5.0, bins=60)
        assert found == pytest.approx(2 * scipy.stats.norm.cdf(0.4) - 1, abs=0.005)

    def test_an_exact_sample_has_the_floor_of_its_size(self, law, generator):
        samples = law.latent.sample(20_000, generator=generator)
        found = total_variation(samples, lambda h: law.latent.log_density(h, 0), radius=4.0, bins=20)
        cells = np.histogram2d(*samples.double().numpy().T, bins=20, range=[[-4, 4]] * 2)[0] / 20_000
        assert found == pytest.approx(np.sqrt(cells / (2 * np.pi * 20_000)).sum(), rel=0.15)

    def test_samples_elsewhere_have_distance_one(self, law):
        far = torch.full((100, 2), 50.0)
        assert total_variation(far, lambda h: law.latent.log_density(h, 0), radius=4.0) == pytest.approx(1, abs=1e-3)

    def test_columns_and_axes_correspond(self, law, generator):
        samples = law.latent.sample(50_000, generator=generator)
        right, swapped = (
            total_variation(s, lambda h: law.latent.log_density(h, 0), radius=4.0, bins=16)
            for s in (samples, samples.flip(1))
        )
        assert right < 0.03 < 0.2 < swapped

    @pytest.mark.parametrize(
        ("samples", "message"), [(torch.zeros(4, 3), "columns"), (torch.full((4, 2), math.nan), "finite")]
    )
    def test_samples_that_cannot_be_binned_are_refused(self, samples, message):
        with pytest.raises(ValueError, match=message):
            total_variation(samples, lambda h: h.sum(-1), radius=1.0)


class TestPlantedFaults:
    """Each wrong variant is refused by the chapter's own check."""

    def test_the_norm_instead_of_its_square(self, rejects):
        def unsquared(s, target):
            return (s - target).norm(dim=-1)

        rejects("3-3-score-estimation", "theorem-3.2", {"ditbook.estimation.squared_distance": unsquared})

    def test_sigma_as_a_standard_deviation_in_the_loss(self, rejects):
        def wrong_target(process, x0, t, xt):
            t = t[..., None]
            return (process.beta(t) * x0 - xt) / process.sigma(t).sqrt()

        target = "ditbook.diffusion.ForwardProcess.transition_score"
        rejects("3-3-score-estimation", "theorem-3.2", {target: wrong_target})

    def test_the_backward_drift_without_its_half(self, rejects):
        rejects("3-3-distribution-estimation", "lemma-F.8", {"ditbook.diffusion.backward_drift": lambda y, s: y + s})

    def test_a_basis_not_orthonormalised_before_measuring(self, rejects):
        rejects("3-3-distribution-estimation", "corollary-3.2.1", {"ditbook.estimation.orthonormalise": lambda W: W})

    def test_a_rate_with_the_wrong_power_of_n(self, rejects):
        def root_n(n, eps, L):
            return max(-math.log10(n) / 2 + (1 / eps) ** (2 * L) * math.log10(2), 2 * math.log10(eps))

        rejects("3-3-score-estimation", "definition-3.4", {"ditbook.covering.log10_xi": root_n})
