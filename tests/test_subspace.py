import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from scipy.stats import multivariate_normal

from ditbook.subspace import GaussianMixture, SubspaceLaw, random_subspace

ONE = torch.tensor(1.0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mixture(k, d0, seed=0, shared=False):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(k, generator=generator) + 0.2
    factors = torch.randn(k, d0, d0, generator=generator)
    covariances = factors @ factors.mT / d0 + 0.1 * torch.eye(d0)
    covariances = covariances[:1].expand(k, d0, d0) if shared else covariances
    return GaussianMixture(weights / weights.sum(), 2 * torch.randn(k, d0, generator=generator), covariances)


def law(D, d0, k=3, seed=0):
    return SubspaceLaw(random_subspace(D, d0, generator=torch.Generator().manual_seed(seed)), mixture(k, d0, seed))


def scipy_log_density(weights, means, covariances, points):
    """log of a Gaussian mixture's density by scipy, which factors each covariance anew."""
    terms = [
        np.log(w) + multivariate_normal(m, c).logpdf(points)
        for w, m, c in zip(weights, means, covariances, strict=True)
    ]
    return np.logaddexp.reduce(terms)


def noised(latent, t):
    """Weights, means, covariances of p^h_t, as numpy arrays."""
    eye = np.eye(latent.dimension)
    covariances = math.exp(-t) * latent.covariances.numpy() + (1 - math.exp(-t)) * eye
    return latent.weights.numpy(), math.exp(-t / 2) * latent.means.numpy(), covariances


# --- subspaces


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 100))
def test_random_subspaces_are_orthonormal(d0, extra, seed):
    basis = random_subspace(d0 + extra, d0, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(basis.mT @ basis, torch.eye(d0), atol=1e-12)


def test_random_subspaces_are_uniform_on_the_circle():
    generator = torch.Generator().manual_seed(0)
    columns = torch.stack([random_subspace(2, 1, generator=generator)[:, 0] for _ in range(4000)])
    assert columns.mean(0).norm() < 0.06
    assert abs(columns[:, 0].square().mean() - 0.5) < 0.03


@pytest.mark.parametrize("d0", [0, 6, -1])
def test_impossible_dimensions_are_refused(d0, generator):
    with pytest.raises(ValueError, match="d0 must satisfy 1 <= d0 <= D"):
        random_subspace(5, d0, generator=generator)


# --- the latent law


@pytest.mark.parametrize("t", [0, 0.01, 1.0, 5])
@pytest.mark.parametrize("k", [1, 4])
def test_latent_log_density_agrees_with_scipy(k, t, generator):
    latent = mixture(k, 3)
    h = latent.sample(20, generator=generator)
    expected = scipy_log_density(*noised(latent, t), h.numpy())
    assert np.allclose(latent.log_density(h, t), expected, rtol=1e-11, atol=1e-11)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 6), st.floats(0, 10), st.integers(0, 50))
def test_latent_score_is_the_gradient_of_the_log_density(k, d0, t, seed):
    latent = mixture(k, d0, seed)
    h = (3 * torch.randn(8, d0, generator=torch.Generator().manual_seed(seed))).requires_grad_()
    (gradient,) = torch.autograd.grad(latent.log_density(h, t).sum(), h)
    assert torch.allclose(latent.score(h.detach(), t), gradient, rtol=1e-9, atol=1e-9)


def test_score_jacobian_is_the_jacobian_of_the_score(generator):
    latent, t = mixture(4, 3), 0.3
    h = latent.sample(10, generator=generator)
    expected = [torch.autograd.functional.jacobian(lambda x: latent.score(x, t), point) for point in h]
    assert torch.allclose(latent.score_jacobian(h, t), torch.stack(expected), atol=1e-10)


@pytest.mark.parametrize("t", [0.05, 0.5, 3])
def test_posterior_mean_agrees_with_quadrature(t, generator):
    latent = mixture(3, 2)
    side = torch.linspace(-14, 14, 401)
    grid = torch.cartesian_prod(side, side)
    prior = np.exp(scipy_log_density(*noised(latent, 0), grid.numpy()))
    for h in latent.sample(3, generator=generator):
        likelihood = torch.exp(-(h - math.exp(-t / 2) * grid).square().sum(-1) / (2 * -math.expm1(-t)))
        weight = torch.from_numpy(prior) * likelihood
        assert torch.allclose(latent.posterior_mean(h, t), weight @ grid / weight.sum(), atol=1e-9)


def test_q_is_beta_times_the_posterior_mean(generator):
    latent, t = mixture(5, 4), torch.rand(30, generator=generator) * 3
    h = latent.sample(30, generator=generator)
    assert torch.allclose(latent.q(h, t), torch.exp(-t / 2)[:, None] * latent.posterior_mean(h, t), atol=1e-12)


def test_at_time_zero_the_latent_is_known():
    latent = mixture(3, 2)
    h = torch.tensor([[0.3, -0.7]])
    assert torch.allclose(latent.posterior_mean(h, 0), h, atol=1e-13)
    assert torch.equal(latent.q(h, 0), h)


def test_samples_have_the_mixture_s_moments(generator):
    latent = mixture(3, 2)
    h = latent.sample(400_000, generator=generator)
    mean = latent.weights @ latent.means
    second = torch.einsum(
        "k,kde->de", latent.weights, latent.covariances + latent.means[:, :, None] * latent.means[:, None]
    )
    assert torch.allclose(h.mean(0), mean, atol=0.02)
    assert torch.allclose(h.T @ h / len(h), second, atol=0.06)


@pytest.mark.parametrize(
    "t", [1, 1.0, torch.tensor(1), torch.tensor(1.0), ONE, ONE.expand(5), ONE.expand(2, 1), ONE.expand(1)]
)
def test_every_kind_of_time_gives_the_same_score(t, generator):
    latent = mixture(3, 2)
    h = torch.randn(2, 5, 2, generator=generator)
    assert torch.allclose(latent.score(h, t), latent.score(h, 1.0), rtol=1e-13)


def test_batches_are_rows_and_single_points_work(generator):
    latent = mixture(3, 2)
    h = torch.randn(4, 5, 2, generator=generator)
    assert latent.log_density(h, 0.5).shape == (4, 5)
    assert torch.allclose(latent.score(h, 0.5)[1, 2], latent.score(h[1, 2], 0.5), rtol=1e-13)


def test_far_away_points_do_not_underflow():
    latent = mixture(3, 2)
    assert latent.score(torch.tensor([1e6, -1e6]), 0.1).isfinite().all()


def test_a_component_of_weight_zero_changes_nothing(generator):
    latent = mixture(2, 2)
    padded = GaussianMixture(
        torch.cat([latent.weights, torch.zeros(1)]),
        torch.cat([latent.means, torch.zeros(1, 2)]),
        torch.cat([latent.covariances, torch.eye(2)[None]]),
    )
    h = latent.sample(6, generator=generator)
    assert torch.allclose(latent.score(h, 0.2), padded.score(h, 0.2), rtol=1e-13)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 50))
def test_tail_constants_bound_the_density(k, d0, seed):
    latent = mixture(k, d0, seed)
    A0, A1, A2 = latent.tail_constants()
    directions = torch.nn.functional.normalize(
        torch.randn(200, d0, generator=torch.Generator().manual_seed(seed)), dim=-1
    )
    h = directions * A0 * torch.linspace(1, 10, 200)[:, None]
    bound = math.log(A1) - d0 / 2 * math.log(2 * math.pi) - A2 / 2 * h.square().sum(-1)
    assert min(A0, A1, A2) > 0
    assert (latent.log_density(h, 0) <= bound + 1e-9).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 50), st.floats(0, 8))
def test_lipschitz_bound_holds_for_every_time(k, d0, seed, t):
    latent = mixture(k, d0, seed, shared=True)
    ends = torch.cartesian_prod(torch.arange(k), torch.arange(k)).reshape(-1, 2)
    along = torch.linspace(-0.5, 1.5, 101)[:, None, None]
    h = math.exp(-t / 2) * (latent.means[ends[:, 0]] * along + latent.means[ends[:, 1]] * (1 - along))
    assert torch.linalg.matrix_norm(latent.score_jacobian(h, t), ord=2).max() <= latent.lipschitz_bound() + 1e-9


def test_lipschitz_bound_of_one_gaussian_is_its_precision_or_one():
    one = torch.ones(1)
    assert GaussianMixture(one, torch.zeros(1, 2), 0.25 * torch.eye(2)[None]).lipschitz_bound() == pytest.approx(4)
    assert GaussianMixture(one, torch.zeros(1, 2), 9 * torch.eye(2)[None]).lipschitz_bound() == 1


def test_no_lipschitz_bound_is_given_for_different_covariances():
    with pytest.raises(ValueError, match="covariances must be equal"):
        mixture(3, 2).lipschitz_bound()


# --- the law in R^D


@pytest.mark.parametrize("t", [0.01, 0.3, 5])
@pytest.mark.parametrize(("D", "d0"), [(2, 1), (5, 5), (32, 4), (256, 8)])
def test_log_density_is_that_of_the_full_dimensional_mixture(D, d0, t, generator):
    data = law(D, d0)
    basis = data.basis.numpy()
    weights, means, covariances = (data.latent.weights, data.latent.means, data.latent.covariances)
    x = math.exp(-t / 2) * data.sample(6, generator=generator)
    x = x + math.sqrt(-math.expm1(-t)) * torch.randn(x.shape, generator=generator)
    expected = scipy_log_density(
        weights.numpy(),
        math.exp(-t / 2) * means.numpy() @ basis.T,
        [math.exp(-t) * basis @ c @ basis.T - math.expm1(-t) * np.eye(D) for c in covariances.numpy()],
        x.numpy(),
    )
    assert np.allclose(data.log_density(x, t), expected, rtol=1e-10, atol=1e-9)


def test_score_is_the_gradient_of_the_log_density(generator):
    data, t = law(20, 3), torch.rand(9, generator=generator) + 0.01
    x = data.sample(9, generator=generator).requires_grad_()
    (gradient,) = torch.autograd.grad(data.log_density(x, t).sum(), x)
    assert torch.allclose(data.score(x.detach(), t), gradient, rtol=1e-9, atol=1e-9)


def test_the_two_parts_of_the_score_are_orthogonal_and_lie_where_they_should(generator):
    data = law(20, 3)
    x = torch.randn(9, 20, generator=generator)
    along, across = data.on_support_score(x, 0.2), data.orthogonal_score(x, 0.2)
    assert torch.allclose(along @ data.basis @ data.basis.mT, along, atol=1e-12)
    assert (across @ data.basis).abs().max() < 1e-12
    assert (along * across).sum(-1).abs().max() < 1e-11


def test_the_orthogonal_score_does_not_know_the_latent_law(generator):
    data = law(20, 3)
    other = SubspaceLaw(data.basis, mixture(2, 3, seed=7))
    x = torch.randn(9, 20, generator=generator)
    assert torch.equal(data.orthogonal_score(x, 0.2), other.orthogonal_score(x, 0.2))


def test_samples_lie_on_the_subspace(generator):
    data = law(20, 3)
    x = data.sample(50, generator=generator)
    assert torch.allclose(x @ data.basis @ data.basis.mT, x, atol=1e-12)


def test_float32_laws_answer_in_float32(generator):
    torch.set_default_dtype(torch.float32)
    data = law(20, 3)
    x = data.sample(9, generator=generator)
    assert data.score(x, 0.2).dtype == data.log_density(x, 0.2).dtype == torch.float32


# --- bad input


def valid(**changes):
    arguments = {
        "weights": torch.tensor([0.5, 0.5]),
        "means": torch.zeros(2, 3),
        "covariances": torch.eye(3).expand(2, 3, 3),
    }
    return arguments | changes


def test_unsuitable_mixtures_are_refused():
    eye, nothing = torch.eye(3), torch.ones(0)
    for message, changes in [
        ("weights must be nonnegative with sum 1", {"weights": torch.tensor([0.5, 0.6])}),
        ("weights must be nonnegative with sum 1", {"weights": torch.tensor([1.5, -0.5])}),
        ("weights must be finite", {"weights": torch.tensor([math.nan, 1.0])}),
        ("means must be finite", {"means": torch.full((2, 3), math.inf)}),
        ("means must have dtype torch.float64 like weights, got torch.float32", {"means": torch.zeros(2, 3).float()}),
        ("covariances must be positive definite", {"covariances": -eye.expand(2, 3, 3)}),
        ("covariances must be positive definite", {"covariances": torch.ones(2, 3, 3)}),
        ("covariances must be symmetric", {"covariances": torch.ones(2, 3, 3).triu() + eye}),
        (
            "means must hold at least one component",
            {"weights": nothing, "means": nothing.reshape(0, 3), "covariances": nothing.reshape(0, 3, 3)},
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            GaussianMixture(**valid(**changes))


@pytest.mark.parametrize(
    ("name", "shape"), [("weights", (3,)), ("means", (3, 3)), ("means", (3,)), ("covariances", (2, 2, 2))]
)
def test_shapes_that_do_not_fit_are_refused_by_name(name, shape):
    with pytest.raises(TypeCheckError, match=name):
        GaussianMixture(**valid(**{name: torch.ones(shape)}))


def test_a_basis_that_is_not_orthonormal_is_refused(generator):
    basis = random_subspace(6, 3, generator=generator)
    latent = GaussianMixture(**valid())
    for wrong in (2 * basis, basis + 1e-6, basis[:, [0, 0, 1]], basis * math.nan):
        with pytest.raises(ValueError, match="basis must have orthonormal columns"):
            SubspaceLaw(wrong, latent)


def test_a_latent_law_that_does_not_fit_is_refused(generator):
    latent = GaussianMixture(**valid())
    with pytest.raises(ValueError, match="latent must have dimension 2, got 3"):
        SubspaceLaw(random_subspace(6, 2, generator=generator), latent)
    with pytest.raises(ValueError, match=r"latent must have dtype torch\.float32 like basis, got torch\.float64"):
        SubspaceLaw(random_subspace(6, 3, generator=generator).float(), latent)


def test_bad_points_and_times_are_refused(generator):
    data, x = law(6, 2), torch.randn(4, 6, generator=generator)
    for t in (0, -1.0, torch.tensor([1.0, 1.0, 1.0, 0.0]), math.nan):
        for function in (data.score, data.log_density, data.on_support_score, data.orthogonal_score):
            with pytest.raises(ValueError, match="t must satisfy t > 0"):
                function(x, t)
    with pytest.raises(ValueError, match="t must satisfy t >= 0"):
        data.latent.score(x[:, :2], -1)
    with pytest.raises(ValueError, match=r"x must have dtype torch\.float64 like basis, got torch\.float32"):
        data.score(x.float(), 1)
    with pytest.raises(ValueError, match=r"h must have dtype torch\.float64 like means, got torch\.float32"):
        data.latent.score(x[:, :2].float(), 1)
    with pytest.raises(ValueError, match=r"x must have D = 6 columns, got shape \(4, 5\)"):
        data.score(x[:, :5], 1)
    with pytest.raises(ValueError, match=r"h must have d0 = 2 columns, got shape \(4, 1\)"):
        data.latent.log_density(x[:, :1], 1)
    with pytest.raises(ValueError, match=r"t must broadcast to the batch shape \(4,\), got shape \(3,\)"):
        data.score(x, torch.ones(3))


# --- planted faults: the chapter's own checks refuse them

CHAPTER = "2-2-score-decomposition"


def sigma_as_standard_deviation(self, t):
    return (-torch.expm1(-self.clock(t))).sqrt()


def columns_of_length_nearly_one(D, d0, *, generator):
    return torch.randn(D, d0, generator=generator) / math.sqrt(D)


@pytest.mark.parametrize("claim", ["lemma-2.1", "equation-2.4", "equation-2.5"])
def test_sigma_used_as_a_standard_deviation_is_caught(claim, rejects):
    rejects(CHAPTER, claim, {"ditbook.diffusion.ForwardProcess.sigma": sigma_as_standard_deviation})


@pytest.mark.parametrize("kept", [SubspaceLaw.on_support_score, SubspaceLaw.orthogonal_score])
def test_a_dropped_term_of_the_decomposition_is_caught(kept, rejects):
    rejects(CHAPTER, "lemma-2.1", {"ditbook.subspace.SubspaceLaw.score": kept})


def test_an_orthogonal_score_without_the_projection_is_caught(rejects):
    wrong = lambda law, x, t: -x / -math.expm1(-t)  # noqa: E731
    rejects(CHAPTER, "lemma-2.1", {"ditbook.subspace.SubspaceLaw.orthogonal_score": wrong})


@pytest.mark.parametrize("claim", ["equation-2.4", "equation-2.5", "erratum-17"])
def test_q_without_beta_is_caught(claim, rejects):
    rejects(CHAPTER, claim, {"ditbook.subspace.GaussianMixture.q": GaussianMixture.posterior_mean})


@pytest.mark.parametrize("claim", ["equation-2.4", "erratum-17"])
def test_q_with_sigma_on_both_terms_is_caught(claim, rejects):
    printed = lambda law, h, t: -math.expm1(-t) * (law.score(h, t) + h)  # noqa: E731
    rejects(CHAPTER, claim, {"ditbook.subspace.GaussianMixture.q": printed})


def test_an_on_support_score_off_by_a_factor_is_caught_by_the_form_of_q(rejects):
    exact = SubspaceLaw.on_support_score
    rejects(
        CHAPTER, "erratum-18", {"ditbook.subspace.SubspaceLaw.on_support_score": lambda law, x, t: 2 * exact(law, x, t)}
    )


def test_a_kernel_with_the_standard_deviation_is_caught(rejects):
    rejects(CHAPTER, "erratum-27", {"ditbook.diffusion.ForwardProcess.sigma": sigma_as_standard_deviation})


def test_a_basis_of_nearly_unit_columns_is_caught(rejects):
    rejects(CHAPTER, "assumption-2.1", {"ditbook.subspace.random_subspace": columns_of_length_nearly_one})


def test_a_tail_constant_without_its_margin_is_caught(rejects):
    exact = GaussianMixture.tail_constants
    wrong = lambda latent: (exact(latent)[0], exact(latent)[1], 4 * exact(latent)[2])  # noqa: E731
    rejects(CHAPTER, "assumption-2.2", {"ditbook.subspace.GaussianMixture.tail_constants": wrong})


def test_a_lipschitz_bound_that_forgets_the_means_is_caught(rejects):
    wrong = lambda latent: max(1.0, 1 / torch.linalg.eigvalsh(latent.covariances).min().item())  # noqa: E731
    rejects(CHAPTER, "assumption-2.3", {"ditbook.subspace.GaussianMixture.lipschitz_bound": wrong})


def test_a_hessian_without_the_spread_of_the_components_is_caught(rejects):
    wrong = lambda latent, h, t: -torch.eye(h.shape[-1]).expand(*h.shape, h.shape[-1])  # noqa: E731
    rejects(CHAPTER, "assumption-2.3", {"ditbook.subspace.GaussianMixture.score_jacobian": wrong})
