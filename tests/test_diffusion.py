import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from ditbook.diffusion import ForwardProcess, backward_drift, count_steps, denoising_loss, sample_backward

LINEAR = ForwardProcess(lambda t: 0.5 + 2 * t)
times = st.floats(min_value=0, max_value=20)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@settings(deadline=None)
@given(times)
def test_unit_weight_has_the_paper_s_beta_and_sigma(t):
    process = ForwardProcess()
    assert math.isclose(process.beta(t), math.exp(-t / 2), rel_tol=1e-14)
    assert math.isclose(process.sigma(t), -math.expm1(-t), rel_tol=1e-14)


@settings(deadline=None)
@given(times)
def test_linear_weight_is_integrated_exactly(t):
    assert math.isclose(LINEAR.clock(t), 0.5 * t + t**2, rel_tol=1e-13, abs_tol=1e-300)


@settings(deadline=None)
@given(times)
def test_beta_squared_and_sigma_add_up_to_one(t):
    assert math.isclose(LINEAR.beta(t) ** 2 + LINEAR.sigma(t), 1, rel_tol=1e-14)


def test_exponential_weight_is_integrated_to_rounding():
    assert math.isclose(ForwardProcess(torch.exp).clock(3.0), math.expm1(3), rel_tol=1e-14)


def test_sigma_keeps_its_digits_near_zero():
    assert math.isclose(ForwardProcess().sigma(1e-12), 1e-12, rel_tol=1e-11)


@pytest.mark.parametrize("t", [2, 2.0, torch.tensor(2), torch.tensor(2.0), torch.tensor([2.0, 2.0])])
def test_times_may_be_numbers_or_tensors(t):
    assert LINEAR.sigma(t).flatten()[-1].item() == pytest.approx(-math.expm1(-5.0), rel=1e-6)


def test_dtype_follows_a_tensor_of_times():
    assert LINEAR.beta(torch.tensor([1.0, 2.0], dtype=torch.float32)).dtype == torch.float32
    assert LINEAR.beta(torch.tensor([1, 2])).dtype == torch.float64


def test_perturbed_points_have_the_moments_of_the_closed_form(generator):
    x0, t = torch.full((400_000, 1), 3.0), 0.7
    xt = LINEAR.perturb(x0, t, generator=generator)
    beta, sigma = math.exp(-(0.35 + 0.49) / 2), -math.expm1(-(0.35 + 0.49))
    assert abs(xt.mean() - 3 * beta) < 5 * math.sqrt(sigma / len(x0))
    assert abs(xt.var() / sigma - 1) < 5 * math.sqrt(2 / len(x0))


def test_perturb_takes_one_time_per_row(generator):
    x0, t = torch.ones(3, 4), torch.tensor([0.0, 1.0, 50.0])
    xt = ForwardProcess().perturb(x0, t, generator=generator)
    assert torch.equal(xt[0], x0[0])
    assert not torch.allclose(xt[1], x0[1])


def test_perturb_repeats_with_the_generator_and_ignores_the_global_seed():
    draws = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        draws.append(ForwardProcess().perturb(torch.zeros(5, 2), 1, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(*draws)


def test_float32_data_stay_float32(generator):
    x0 = torch.ones(5, 2, dtype=torch.float32)
    assert ForwardProcess().perturb(x0, 0.3, generator=generator).dtype == torch.float32
    assert ForwardProcess().transition_score(x0, 0.3, x0).dtype == torch.float32


def test_transition_score_is_the_gradient_of_the_gaussian_log_density(generator):
    x0, t = torch.randn(6, 3, generator=generator), torch.rand(6, generator=generator) + 0.1
    xt = LINEAR.perturb(x0, t, generator=generator).requires_grad_()
    clock = 0.5 * t + t**2
    normal = torch.distributions.Normal(torch.exp(-clock / 2)[:, None] * x0, (1 - torch.exp(-clock)).sqrt()[:, None])
    (gradient,) = torch.autograd.grad(normal.log_prob(xt).sum(), xt)
    assert torch.allclose(LINEAR.transition_score(x0, t, xt.detach()), gradient, rtol=1e-12)


def test_denoising_loss_is_zero_for_the_transition_score_itself(generator):
    process, x0, t = ForwardProcess(), torch.randn(50, 3, generator=generator), 0.5
    xt = process.perturb(x0, t, generator=generator)
    assert denoising_loss(lambda x, t: process.transition_score(x0, t, x), x0, t, xt, process) == 0


def test_denoising_loss_of_the_zero_score_is_dimension_over_sigma(generator):
    process, x0 = ForwardProcess(), torch.randn(200_000, 3, generator=generator)
    xt = process.perturb(x0, 0.5, generator=generator)
    loss = denoising_loss(lambda x, t: torch.zeros_like(x), x0, 0.5, xt, process)
    assert abs(loss * process.sigma(0.5) / 3 - 1) < 0.01


def test_denoising_loss_sends_gradients_to_the_score(generator):
    process, x0 = ForwardProcess(), torch.randn(10, 3, generator=generator)
    slope = torch.tensor(-1.0, requires_grad=True)
    denoising_loss(lambda x, t: slope * x, x0, 0.5, process.perturb(x0, 0.5, generator=generator), process).backward()
    assert slope.grad.isfinite()


def test_backward_drift_is_half_y_plus_the_score():
    assert backward_drift(torch.tensor(4.0), torch.tensor(1.0)) == 3


@pytest.mark.parametrize("process", [ForwardProcess(), LINEAR])
def test_backward_sampling_follows_the_variance_recursion_of_a_gaussian(process, generator):
    # For N(0, v) data every step is linear, so the variance obeys an exact recursion.
    v, T, T0, step = 0.25, 2.0, 0.1, 0.05
    variance, t = 1.0, T
    for k in range(round((T - T0) / step)):
        t = T - k * step
        advance = float(process.clock(t) - process.clock(t - step))
        slope = 0.5 - 1 / float(process.beta(t) ** 2 * v + process.sigma(t))
        variance = variance * (1 + advance * slope) ** 2 + advance

    def score(y, t):
        return -y / (process.beta(t) ** 2 * v + process.sigma(t))

    y = sample_backward(score, process, (400_000, 1), T, T0, step, generator=generator)
    assert abs(y.var() / variance - 1) < 5 * math.sqrt(2 / len(y))


def test_the_score_is_asked_for_at_the_start_of_each_step_and_never_at_T0(generator):
    seen = []
    sample_backward(
        lambda y, t: (seen.append(t), -y)[1], ForwardProcess(), (1, 1), 1.0, 0.25, 0.25, generator=generator
    )
    assert seen == [1.0, 0.75, 0.5]


def test_backward_samples_have_the_shape_and_the_default_dtype(generator):
    process = ForwardProcess()
    assert sample_backward(lambda y, t: -y, process, (4, 3, 2), 1, 0.5, 0.5, generator=generator).shape == (4, 3, 2)
    torch.set_default_dtype(torch.float32)
    y = sample_backward(lambda y, t: -y, process, (4, 2), 1, 0.5, 0.5, generator=generator)
    assert y.dtype == torch.float32


@settings(deadline=None)
@given(st.integers(1, 2000), st.floats(1e-4, 1), st.floats(0, 1))
def test_steps_that_divide_are_counted_in_spite_of_rounding(steps, step, T0):
    assert count_steps(T0 + steps * step, T0, step) == steps


@pytest.mark.parametrize(("T", "T0"), [(1, 1), (1, 2), (1, -0.1), (math.inf, 1), (math.nan, 0)])
def test_times_out_of_order_are_refused(T, T0):
    with pytest.raises(ValueError, match="T0 and T must satisfy 0 <= T0 < T"):
        count_steps(T, T0, 0.1)


@pytest.mark.parametrize("step", [0, -0.1, math.nan])
def test_steps_that_are_not_positive_are_refused(step):
    with pytest.raises(ValueError, match="step must be positive"):
        count_steps(1, 0, step)


def test_a_step_that_does_not_divide_is_refused_with_the_nearest_that_do():
    with pytest.raises(ValueError, match=r"step must divide .* got 0\.3, .* 3 = 0\.333333333333 or .* 4 = 0\.25"):
        count_steps(1, 0, 0.3)
    with pytest.raises(ValueError, match=r"\(T - T0\) / 1 = 1 "):
        count_steps(1, 0, 1.7)


@pytest.mark.parametrize("t", [-1, -0.1, math.nan, torch.tensor([1.0, -1.0])])
def test_times_before_zero_are_refused(t):
    with pytest.raises(ValueError, match="t must satisfy t >= 0"):
        ForwardProcess().sigma(t)


def test_the_transition_score_has_no_value_at_time_zero():
    with pytest.raises(ValueError, match="t must satisfy t > 0, got 0"):
        ForwardProcess().transition_score(torch.ones(2, 3), 0, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda t: t - 1, "positive and nondecreasing"),
        (lambda t: 1 / (1 + t), "positive and nondecreasing"),
        (lambda t: torch.full_like(t, math.nan), "positive and nondecreasing"),
        (lambda t: torch.ones(()), "keep the shape"),
    ],
)
def test_unsuitable_weights_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        ForwardProcess(weight).beta(2.0)


def test_wrong_shapes_and_dtypes_name_the_argument(generator):
    process, x = ForwardProcess(), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"t must broadcast to the batch shape \(4,\), got shape \(3,\)"):
        process.perturb(x, torch.ones(3), generator=generator)
    with pytest.raises(ValueError, match=r"t must broadcast to the batch shape \(4,\), got shape \(4, 1\)"):
        process.perturb(x, torch.ones(4, 1), generator=generator)
    with pytest.raises(ValueError, match=r"t must have dtype torch\.float64 like the data, got torch\.float32"):
        process.perturb(x, torch.ones(4, dtype=torch.float32), generator=generator)
    with pytest.raises(ValueError, match=r"xt must have dtype torch\.float64 like x0, got torch\.float32"):
        denoising_loss(lambda x, t: x, x, 1, x.float(), process)
    with pytest.raises(ValueError, match=r"score must return the shape \(4, 3\) of its input, got \(4,\)"):
        denoising_loss(lambda x, t: x[:, 0], x, 1, x, process)
    with pytest.raises(TypeCheckError, match="xt"):
        denoising_loss(lambda x, t: x, x, 1, x[:, :2], process)


# --- planted faults: the chapter's own checks refuse them

CHAPTER = "2-1-diffusion"


def sigma_as_standard_deviation(self, t):
    return (-torch.expm1(-self.clock(t))).sqrt()


def beta_without_the_half(self, t):
    return torch.exp(-self.clock(t))


def drift_without_the_half(y, s):
    return y + s


def printed_loss(score, x0, t, xt, process):
    return (score(xt, t) - x0).square().sum(-1).mean()


def printed_target(self, x0, t, xt):
    return x0


def sampler_with_noise_scaled_by_the_variance(score, process, shape, T, T0, step, *, generator):
    y = torch.randn(shape, generator=generator)
    for k in range(count_steps(T, T0, step)):
        advance = float(process.clock(T - k * step) - process.clock(max(T - (k + 1) * step, T0)))
        noise = torch.randn(shape, generator=generator)
        y = y + advance * backward_drift(y, score(y, T - k * step)) + advance * noise
    return y


@pytest.mark.parametrize(
    ("claim", "target", "wrong"),
    [
        ("equation-D.1", "ForwardProcess.sigma", sigma_as_standard_deviation),
        ("equation-D.1", "ForwardProcess.beta", beta_without_the_half),
        ("equation-2.1", "ForwardProcess.sigma", sigma_as_standard_deviation),
        ("equation-2.1", "ForwardProcess.transition_score", printed_target),
        ("equation-2.1", "denoising_loss", printed_loss),
        ("erratum-16", "denoising_loss", printed_loss),
        ("equation-2.2", "denoising_loss", printed_loss),
        ("equation-D.2", "backward_drift", drift_without_the_half),
        ("equation-D.3", "ForwardProcess.beta", beta_without_the_half),
        ("equation-D.4", "backward_drift", drift_without_the_half),
        ("equation-D.4", "sample_backward", sampler_with_noise_scaled_by_the_variance),
    ],
)
def test_a_wrong_variant_is_caught_by_the_chapter(claim, target, wrong, rejects):
    rejects(CHAPTER, claim, {f"ditbook.diffusion.{target}": wrong})
