"""The transformer and the score network: against torch's own layers, einops, closed forms and finite differences."""

import math

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ditbook import transformer
from ditbook.diffusion import ForwardProcess, denoising_loss
from ditbook.subspace import GaussianMixture, SubspaceLaw, random_subspace
from ditbook.transformer import (
    Attention,
    FeedForward,
    Fold,
    LatentTransformer,
    Patchify,
    ScoreNetwork,
    Transformer,
    attention_lipschitz,
    lipschitz_bound,
    lipschitz_estimate,
    norm_profile,
    output_bound,
)

CHAPTER = "2-3-score-network"


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def without_encoding(network: Transformer) -> Transformer:
    torch.nn.init.zeros_(network.E)
    return network


# R


@given(p=st.integers(1, 4), side=st.integers(1, 4), channels=st.integers(1, 3), batch=st.lists(st.integers(1, 3)))
@settings(deadline=None, max_examples=40)
def test_patchify_is_einops_patchify_and_a_permutation_of_the_entries(p, side, channels, batch):
    reshape = Patchify(p * side, p, channels)
    size = channels * (p * side) ** 2
    h = torch.arange(math.prod(batch) * size, dtype=torch.float64).reshape(*batch, size)
    X = reshape(h)
    pattern = "... (c r p s q) -> ... (r s) (c p q)"
    assert torch.equal(X, rearrange(h, pattern, c=channels, r=side, s=side, p=p, q=p))
    assert X.shape == (*batch, reshape.L, reshape.d)
    assert torch.equal(reshape.inverse(X), h)
    assert torch.equal(X.flatten().sort().values, h.flatten())


def test_a_token_is_the_patch_one_sees():
    image = torch.arange(16.0).reshape(4, 4)
    tokens = Patchify(4, 2)(image.flatten())
    assert torch.equal(tokens[1], image[0:2, 2:4].flatten())
    assert torch.equal(tokens[2], image[2:4, 0:2].flatten())


def test_fold_keeps_the_order_of_the_entries():
    h = torch.arange(6.0)
    assert torch.equal(Fold(3, 2)(h), torch.tensor([[0.0, 1, 2], [3, 4, 5]]))
    assert torch.equal(Fold(3, 2).inverse(Fold(3, 2)(h)), h)


# Attention and feed-forward layer


def multihead(layer: Attention) -> torch.nn.MultiheadAttention:
    """torch's layer with the same weights; it divides logits by sqrt(m), so its queries are sqrt(m) times larger."""
    heads, m, d = layer.W_Q.shape
    twin = torch.nn.MultiheadAttention(d, heads, bias=layer.b_Q is not None, batch_first=True)
    with torch.no_grad():
        queries = layer.W_Q.reshape(d, d) * math.sqrt(m)
        twin.in_proj_weight.copy_(torch.cat([queries, layer.W_K.reshape(d, d), layer.W_V.reshape(d, d)]))
        twin.out_proj.weight.copy_(torch.cat(list(layer.W_O), 1))
        if layer.b_Q is not None:
            twin.in_proj_bias.zero_()[:d] = layer.b_Q.flatten() * math.sqrt(m)
            twin.out_proj.bias.zero_()
    return twin


@pytest.mark.parametrize("query_bias", [False, True])
@pytest.mark.parametrize(("heads", "m"), [(1, 6), (2, 3), (6, 1)])
def test_attention_is_torchs_multihead_attention(heads, m, query_bias, generator):
    layer = Attention(heads * m, heads, m, query_bias, generator)
    if query_bias:
        torch.nn.init.normal_(layer.b_Q, generator=generator)
    X = torch.randn(3, 7, heads * m, generator=generator)
    expected = X + multihead(layer)(X, X, X, need_weights=False)[0]
    assert (layer(X) - expected).abs().max() < 1e-12


def columns(layer: Attention, X):
    """Equation 2.6 as printed, X with tokens as columns."""
    out = X
    for O, V, K, Q in zip(layer.W_O, layer.W_V, layer.W_K, layer.W_Q, strict=True):
        out = out + O @ V @ X @ torch.softmax((K @ X).T @ (Q @ X), dim=0)
    return out


@pytest.mark.parametrize("shape", [(5, 3), (4, 5, 3), (2, 4, 5, 3)])
def test_attention_is_the_printed_formula_for_every_batch_shape(shape, generator):
    layer = Attention(3, heads=2, head_size=2, generator=generator)
    X = torch.randn(*shape, generator=generator)
    expected = torch.stack([columns(layer, x.T).T for x in X.reshape(-1, 5, 3)]).reshape(shape)
    assert (layer(X) - expected).abs().max() < 1e-13
    assert torch.equal(layer.W_OV[1], layer.W_O[1] @ layer.W_V[1])
    assert torch.allclose(layer.W_KQ[1], layer.W_K[1].T @ layer.W_Q[1], rtol=1e-14)


def test_feed_forward_is_the_printed_formula(generator):
    layer = FeedForward(3, 5, generator)
    torch.nn.init.normal_(layer.b_1, generator=generator)
    torch.nn.init.normal_(layer.b_2, generator=generator)
    Y = torch.randn(3, 7, generator=generator)
    ones = torch.ones(1, 7)
    inner = torch.relu(layer.W_1 @ Y + layer.b_1[:, None] @ ones)
    expected = Y + layer.W_2 @ inner + layer.b_2[:, None] @ ones
    assert (layer(Y.T).T - expected).abs().max() < 1e-14


class Operations(TorchDispatchMode):
    """Every operation that runs, and the size of the largest tensor that any of them returns."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("shape", [(512, 4), (3, 512, 4)])
@pytest.mark.parametrize("grad", [False, True])
def test_the_fused_kernel_runs_and_no_operation_returns_an_L_by_L_array(shape, grad):
    with Operations() as seen, torch.set_grad_enabled(grad):
        Attention(4, 2, 1)(torch.ones(shape))
    assert any("scaled_dot_product_flash_attention" in name for name in seen.names)
    assert not any("softmax" in name for name in seen.names)
    assert seen.largest < 512 * 512 / 8


def test_memory_of_attention_grows_linearly_with_the_sequence():
    def allocated(L: int) -> int:
        layer, X = Attention(4, 2, 1), torch.ones(L, 4)
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
            layer(X)
        return sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())

    short, long = allocated(2048), allocated(8192)
    assert long < 5 * short
    assert long < 8192 * 8192 * 8 / 20


# Transformer


@given(seed=st.integers(0, 1000), L=st.integers(2, 6), d=st.integers(1, 4), blocks=st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_without_encoding_the_network_commutes_with_permutations(seed, L, d, blocks):
    generator = torch.Generator().manual_seed(seed)
    network = without_encoding(Transformer(d, L, blocks, generator=generator))
    X = torch.randn(L, d, generator=generator)
    order = torch.randperm(L, generator=generator)
    assert (network(X[order]) - network(X)[order]).abs().max() < 1e-10 * (1 + network(X).abs().max())


def test_with_encoding_it_does_not(generator):
    network = Transformer(4, 5, 2, generator=generator)
    X = torch.randn(5, 4, generator=generator)
    assert (network(X.flip(0)) - network(X).flip(0)).abs().max() > 1e-2


def test_the_encoding_is_added_once_in_front_of_the_first_block(generator):
    network = Transformer(4, 5, 2, generator=generator)
    X = torch.randn(5, 4, generator=generator)
    moved = network(X - network.E)
    assert torch.allclose(without_encoding(network)(X), moved, atol=1e-12)


def test_defaults_are_the_papers_minimal_class():
    network = Transformer(d=4, L=4, blocks=3)
    block = network.blocks[0]
    assert len(network.blocks) == 3
    assert block.attention.W_Q.shape == (2, 1, 4)
    assert block.attention.W_O.shape == (2, 4, 1)
    assert block.feed_forward.W_1.shape == (4, 4)
    assert block.attention.b_Q is None
    assert network.E.shape == (4, 4)


def test_networks_repeat_with_the_generator_and_leave_the_global_one_alone():
    state = torch.get_rng_state()
    first, second, other = (Transformer(3, 2, 1, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(first.blocks[0].attention.W_Q, second.blocks[0].attention.W_Q)
    assert not torch.equal(first.blocks[0].attention.W_Q, other.blocks[0].attention.W_Q)
    assert torch.equal(state, torch.get_rng_state())


def test_constructors_follow_the_default_dtype_and_outputs_follow_the_input():
    torch.set_default_dtype(torch.float32)
    network = Transformer(2, 2, 1)
    assert network.E.dtype == torch.float32
    assert network(torch.zeros(2, 2)).dtype == torch.float32
    assert network.double()(torch.zeros(2, 2, dtype=torch.float64)).dtype == torch.float64


# Time and the latent network


def test_a_new_network_is_the_papers_and_time_enters_with_training(generator):
    f_T = Transformer(2, 3, 2, generator=generator)
    timed, timeless = LatentTransformer(f_T), LatentTransformer(f_T, time_features=0)
    h, t = torch.randn(4, 6, generator=generator), torch.tensor([0.1, 0.5, 1.0, 2.0])
    assert torch.equal(timed(h, t), timeless(h, t))
    torch.nn.init.normal_(timed.time.W_out, generator=generator)
    assert not torch.allclose(timed(h, t), timed(h, t.flip(0)))
    assert torch.equal(timeless(h, t), timeless(h, t.flip(0)))
    # A batch of times is the same as one time after another.
    one_by_one = torch.stack([timed(row, time) for row, time in zip(h, t, strict=True)])
    assert torch.allclose(timed(h, t), one_by_one, atol=1e-12)


def test_modulation_is_scale_and_shift_of_the_tokens_before_each_block(generator):
    f_T = Transformer(2, 3, 1, generator=generator)
    site = torch.randn(2, 2, 1, 2, generator=generator)
    X = torch.randn(3, 2, generator=generator)
    (a, b), (c, e) = site[0], site[1]
    expected = (1 + c) * f_T.blocks[0]((1 + a) * (X + f_T.E) + b) + e
    assert torch.allclose(f_T(X, site), expected, atol=1e-13)


def test_the_latent_network_reshapes_works_and_reshapes_back(generator):
    R = Patchify(4, 2)
    f_T = Transformer(R.d, R.L, 1, generator=generator)
    h = torch.randn(5, 16, generator=generator)
    f = LatentTransformer(f_T, reshape=R)
    assert torch.equal(f(h, torch.tensor(0.5)), R.inverse(f_T(R(h))))


# Score network


def mixture(d0: int, generator) -> GaussianMixture:
    roots = torch.randn(3, d0, d0, generator=generator) / 2
    return GaussianMixture(
        torch.tensor([0.5, 0.3, 0.2]), torch.randn(3, d0, generator=generator), roots @ roots.mT + 0.1 * torch.eye(d0)
    )


@pytest.mark.parametrize("D", [4, 16, 256, 4096])
@pytest.mark.parametrize("t", [0.01, 0.3, 5.0])
def test_with_the_true_basis_and_q_it_is_the_exact_score_in_every_dimension(D, t, generator):
    law = SubspaceLaw(random_subspace(D, 4, generator=generator), mixture(4, generator))
    network = ScoreNetwork(law.basis, law.latent.q, T0=0.01, T=5.0)
    x = torch.randn(20, D, generator=generator)
    exact = law.score(x, t)
    assert (network(x, t) - exact).abs().max() < 1e-10 * max(1, exact.abs().max())


def test_a_time_may_be_a_number_or_a_tensor_that_broadcasts(generator):
    law = SubspaceLaw(random_subspace(6, 2, generator=generator), mixture(2, generator))
    network = ScoreNetwork(law.basis, law.latent.q, 0.01, 5.0)
    x, t = torch.randn(3, 4, 6, generator=generator), torch.tensor([0.1, 0.2, 0.5, 1.0])
    slices = torch.stack([network(x[:, k], float(t[k])) for k in range(4)], 1)
    assert torch.allclose(network(x, t), slices, rtol=1e-12)
    assert torch.equal(network(x, 1), network(x, torch.tensor(1.0)))


def test_another_process_only_changes_the_variance(generator):
    basis = random_subspace(5, 2, generator=generator)
    process = ForwardProcess(lambda t: 1 + t)
    x = torch.randn(4, 5, generator=generator)
    network = ScoreNetwork(basis, lambda h, t: 0 * h, 0.1, 2.0, process=process)
    sigma = 1 - math.exp(-(0.5 + 0.5**2 / 2))
    assert torch.allclose(network(x, 0.5), -x / sigma, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_trained_basis_stays_orthonormal_and_starts_where_it_was_put(dtype, generator):
    torch.set_default_dtype(dtype)
    basis = random_subspace(12, 4, generator=generator)
    network = ScoreNetwork(basis, LatentTransformer(Transformer(2, 2, 1)), 0.05, 3.0, train_basis=True)
    assert torch.allclose(network.W_B, basis, atol=20 * torch.finfo(dtype).eps)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.1)
    x0, t = torch.randn(32, 12, generator=generator), 0.05 + torch.rand(32, generator=generator)
    for _ in range(10):
        xt = ForwardProcess().perturb(x0, t, generator=generator)
        optimiser.zero_grad()
        denoising_loss(network, x0, t, xt, ForwardProcess()).backward()
        optimiser.step()
    assert (network.W_B - basis).abs().max() > 0.05
    assert (network.W_B.mT @ network.W_B - torch.eye(4)).abs().max() < 20 * torch.finfo(dtype).eps
    assert network.W_B.dtype == dtype


def test_a_frozen_basis_is_no_parameter_and_does_not_alias_the_caller(generator):
    basis = random_subspace(6, 4, generator=generator)
    network = ScoreNetwork(basis, LatentTransformer(Transformer(2, 2, 1)), 0.05, 3.0)
    assert "W_B" not in dict(network.named_parameters())
    basis.zero_()
    assert network.W_B.abs().max() > 0


# Definition 3.2


def largest_column(Z) -> float:
    return max(math.sqrt(sum(float(z) ** 2 for z in column)) for column in Z.T.detach())


def spectral(Z) -> float:
    return math.sqrt(torch.linalg.eigvalsh(Z @ Z.T).max().item())


def test_norm_profile_is_the_definition_in_the_papers_orientation(generator):
    network = Transformer(3, 4, 2, heads=2, head_size=2, hidden=5, generator=generator)
    profile = norm_profile(network, 2.0)
    layers = [block.attention for block in network.blocks]
    OV = [O @ V for layer in layers for O, V in zip(layer.W_O, layer.W_V, strict=True)]
    KQ = [K.T @ Q for layer in layers for K, Q in zip(layer.W_K, layer.W_Q, strict=True)]
    ff = [W for block in network.blocks for W in (block.feed_forward.W_1, block.feed_forward.W_2)]
    E = network.E.T  # the paper's d x L matrix
    expected = {
        "C_OV": max(map(spectral, OV)),
        "C_OV_2inf": max(largest_column(W.T) for W in OV),
        "C_KQ": max(map(spectral, KQ)),
        "C_KQ_2inf": max(map(largest_column, KQ)),
        "C_F": max(map(spectral, ff)),
        "C_F_2inf": max(map(largest_column, ff)),
        "C_E": largest_column(E.T),
    }
    for name, value in expected.items():
        assert getattr(profile, name) == pytest.approx(value, rel=1e-10), name
    assert (profile.blocks, profile.d, profile.heads, profile.head_size, profile.C_X) == (2, 3, 2, 2, 2.0)


def test_the_papers_own_encoding_has_the_printed_order():
    network = Transformer(3, 6, 1)
    with torch.no_grad():
        network.E.copy_(torch.arange(6.0)[:, None].expand(6, 3))
    exact = math.sqrt(sum(j**2 for j in range(6)))
    assert norm_profile(network, 1.0).C_E - exact == pytest.approx(0, abs=1e-12)
    assert exact <= math.sqrt(6) * 5


def ball(n: int, L: int, d: int, R: float, generator):
    """Points whose tokens have norm at most R, half of them exactly R."""
    X = torch.randn(n, L, d, generator=generator)
    lengths = torch.rand(n, L, 1, generator=generator).mul(2).clamp(max=1)
    return R * lengths * X / X.norm(dim=-1, keepdim=True)


@given(seed=st.integers(0, 10_000), R=st.floats(0.1, 20), L=st.integers(1, 5), query_bias=st.booleans())
@settings(deadline=None, max_examples=40)
def test_neither_slope_nor_output_exceeds_its_bound_on_the_ball(seed, R, L, query_bias):
    generator = torch.Generator().manual_seed(seed)
    network = Transformer(2, L, 2, query_bias=query_bias, generator=generator)
    for name, weight in network.named_parameters():
        if "b_" in name:
            torch.nn.init.normal_(weight, generator=generator)
    X = ball(20, L, 2, R, generator)
    assert lipschitz_estimate(network, X) <= lipschitz_bound(network, R)
    assert network(X).flatten(1).norm(dim=1).max() <= output_bound(network, R)


@pytest.mark.parametrize("R", [1.0, 10.0, 100.0])
def test_three_tokens_on_a_line_show_that_the_bound_must_grow_like_R_squared(R):
    # Tokens (R, -R, 0) seen from the token at 0: the weights are uniform, with variance 2 R^2 / 3.
    layer = Attention(1, 1, 1)
    for weight in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O):
        torch.nn.init.ones_(weight)
    X = torch.tensor([[R], [-R], [0.0]])
    slope = torch.autograd.functional.jacobian(layer, X)[2, 0, 2, 0]
    assert slope == pytest.approx(1 + 1 / 3 + 2 * R**2 / 3, rel=1e-9)
    assert 2 * R**2 / 3 < slope < attention_lipschitz(layer, 3, R) < 3 * R**2 + 3


def test_bound_is_sharp_where_all_queries_look_at_one_key():
    # Without logits' slope the values' term is sqrt(L): every output copies the same token.
    L = 9
    layer = Attention(1, 1, 1, query_bias=True)
    for weight in (layer.W_K, layer.W_V, layer.W_O):
        torch.nn.init.ones_(weight)
    torch.nn.init.zeros_(layer.W_Q)
    torch.nn.init.constant_(layer.b_Q, 1e4)
    X = torch.zeros(L, 1)
    X[0] = 1.0
    jacobian = torch.autograd.functional.jacobian(lambda X: layer(X) - X, X).reshape(L, L)
    assert torch.linalg.matrix_norm(jacobian, 2) == pytest.approx(math.sqrt(L))


def test_the_estimate_is_the_norm_of_the_jacobian(generator):
    network = Transformer(2, 3, 1, generator=generator)
    X = torch.randn(4, 3, 2, generator=generator)
    norms = []
    for point in X:
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.autograd.functional.jacobian(network, point).reshape(6, 6)
        norms.append(torch.linalg.matrix_norm(jacobian, 2))
    assert lipschitz_estimate(network, X) == pytest.approx(max(norms).item(), rel=1e-12)


# Bad input


def times(t):
    return ScoreNetwork(torch.eye(4), lambda h, t: h, 0.1, 2.0)(torch.ones(3, 4), t)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Patchify(8, 3), "p must divide the image side i = 8, got p = 3"),
        (lambda: Patchify(0, 1), "i must be an integer of at least 1, got 0"),
        (lambda: Patchify(4, 2)(torch.ones(2, 15)), r"h must have shape \(..., d0 = 16\), got \(2, 15\)"),
        (lambda: Patchify(4, 2).inverse(torch.ones(4, 3)), r"X must have shape \(..., L = 4, d = 4\), got \(4, 3\)"),
        (lambda: Attention(4, 0, 1), "heads must be an integer of at least 1, got 0"),
        (lambda: Transformer(4, 4, 1, heads=0), "heads must be an integer of at least 1, got 0"),
        (lambda: Transformer(4, 4, 0), "blocks must be an integer of at least 1, got 0"),
        (lambda: FeedForward(4, 0), "hidden must be an integer of at least 1, got 0"),
        (lambda: Transformer(3, 4, 1)(torch.ones(1, 3)), r"X must have shape \(..., L = 4, d = 3\), got \(1, 3\)"),
        (lambda: LatentTransformer(Transformer(3, 4, 1), reshape=Patchify(4, 2)), "reshape makes tokens"),
        (lambda: LatentTransformer(Transformer(3, 4, 1), time_features=5), "time_features must be even"),
        (lambda: LatentTransformer(Transformer(3, 4, 1), time_features=-2), "time_features must not be negative"),
        (
            lambda: ScoreNetwork(torch.eye(8, 6), LatentTransformer(Transformer(2, 4, 1)), 0.1, 1.0),
            "f must take d0 = 6 numbers, the columns of W_B, but its d0 = d L = 8",
        ),
        (lambda: ScoreNetwork(2 * torch.eye(4), lambda h, t: h, 0.1, 1.0), "W_B must have orthonormal columns"),
        (lambda: ScoreNetwork(torch.eye(4), lambda h, t: h, 1.0, 1.0), "0 < T0 < T, got T0 = 1.0 and T = 1.0"),
        (lambda: ScoreNetwork(torch.eye(4), lambda h, t: h, 0.0, 1.0), "0 < T0 < T, got T0 = 0.0"),
        (
            lambda: ScoreNetwork(torch.eye(4), lambda h, t: h[..., :2], 0.1, 1.0)(torch.ones(3, 4), 0.5),
            r"f must return the shape of its input h, \(3, 4\), got \(3, 2\)",
        ),
        (
            lambda: ScoreNetwork(torch.eye(4), lambda h, t: h, 0.1, 1.0)(torch.ones(3, 5), 0.5),
            r"x must have shape \(..., D = 4\), got \(3, 5\)",
        ),
        (
            lambda: ScoreNetwork(torch.eye(4), lambda h, t: h, 0.1, 1.0)(torch.ones(3, 4).float(), 0.5),
            "x must have dtype torch.float64",
        ),
        (lambda: times(0.05), "t must satisfy T0 <= t <= T with T0 = 0.1 and T = 2.0, got 0.05"),
        (lambda: times(torch.tensor([0.5, 1.0, 2.5])), "T = 2.0, got 2.5"),
        (lambda: times(torch.tensor([0.5, 1.0, math.nan])), "got nan"),
        (lambda: times(torch.full((2,), 0.5)), r"t must broadcast to the batch shape \(3,\)"),
        (lambda: norm_profile(Transformer(2, 2, 1), -1.0), "C_X must be a finite norm, at least 0, got -1"),
        (lambda: lipschitz_bound(Transformer(2, 2, 1), math.inf), "C_X must be a finite norm"),
        (lambda: output_bound(Transformer(2, 2, 1), math.nan), "C_X must be a finite norm"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_ends_of_the_time_range_are_inside_also_in_single_precision():
    network = ScoreNetwork(torch.eye(2, dtype=torch.float32), lambda h, t: h, 0.1, 0.7)
    for t in (0.1, 0.7, torch.tensor([0.1, 0.7], dtype=torch.float32)):
        assert network(torch.ones(2, 2, dtype=torch.float32), t).isfinite().all()


# Planted faults: the chapter's own checks refuse the wrong variant


def scaled(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def softmax_over_queries(q, k, v):
    return torch.softmax(q @ k.mT, dim=-2) @ v


def stored_weights(q, k, v):
    return torch.softmax(q @ k.mT, dim=-1) @ v


def transposed_output(Z, W_O):
    heads, d, m = W_O.shape
    if heads * m != d:
        return transformer_merge(Z, W_O)
    return torch.nn.functional.linear(Z.transpose(1, 2).flatten(2), W_O.transpose(0, 1).flatten(1).T)


def no_skip(self, Y):
    return FeedForward_forward(self, Y) - Y


def mixing_tokens(self, Y):
    return FeedForward_forward(self, Y) + Y.mean(-2, keepdim=True)


def encoding_after_first_block(self, X, modulation=None):
    for k, block in enumerate(self.blocks):
        X = block(X) + (self.E if k == 0 else 0)
    return X


def encoding_forgotten(self, X, modulation=None):
    for block in self.blocks:
        X = block(X)
    return X


def channels_last(self, h):
    return rearrange(Patchify_call(self, h), "... (c q) -> ... (q c)", c=self.channels)


def columns_before_rows(self, h):
    side = self.i // self.p
    return rearrange(Patchify_call(self, h), "... (r s) d -> ... (s r) d", r=side)


def halved_inverse(self, X):
    return Patchify_inverse(self, X) / 2


def norm_of_rows(W):
    return W.norm(dim=-1).max().item()


def slope_without_radius(layer, L, R):
    return attention_lipschitz(layer, L, 1.0)


def radii_without_values(network, C_X):
    return [C_X] * (len(network.blocks) + 1)


def skip_with_square(x, decoded, sigma):
    return decoded / sigma - x / sigma**2


def sigma_as_deviation(x, decoded, sigma):
    return decoded / sigma.sqrt() - x / sigma.sqrt()


transformer_merge, FeedForward_forward = transformer.merge_heads, FeedForward.forward
Patchify_call, Patchify_inverse = Patchify.__call__, Patchify.inverse


@pytest.mark.parametrize(
    ("claim", "target", "wrong"),
    [
        ("equation-2.6", "attend", scaled),
        ("equation-2.6", "attend", softmax_over_queries),
        ("equation-2.6", "attend", stored_weights),
        ("equation-2.6", "merge_heads", transposed_output),
        ("equation-2.7", "FeedForward.forward", no_skip),
        ("equation-2.7", "FeedForward.forward", mixing_tokens),
        ("equation-2.8", "Transformer.forward", encoding_after_first_block),
        ("equation-2.8", "Transformer.forward", encoding_forgotten),
        ("definition-3.1", "Patchify.__call__", channels_last),
        ("definition-3.1", "Patchify.__call__", columns_before_rows),
        ("definition-3.1", "Patchify.inverse", halved_inverse),
        ("definition-3.2", "_largest_column", norm_of_rows),
        ("definition-3.2", "attention_lipschitz", slope_without_radius),
        ("definition-3.2", "token_radii", radii_without_values),
        ("definition-3.3", "Orthonormal.forward", lambda self, W: W),
        ("definition-3.3", "assemble", skip_with_square),
        ("definition-3.3", "assemble", sigma_as_deviation),
        ("figure-1", "assemble", skip_with_square),
    ],
)
def test_the_chapter_refuses(claim, target, wrong, rejects):
    rejects(CHAPTER, claim, {f"ditbook.transformer.{target}": wrong})


def test_the_chapter_refuses_a_skip_weight_that_is_right_in_print_only(rejects):
    # The witness of the erratum compares both weights with the exact score; a wrong score would hide the misprint.
    wrong = lambda self, x, t: -x / (1 - math.exp(-t)) ** 2  # noqa: E731
    rejects(CHAPTER, "erratum-20", {"ditbook.subspace.SubspaceLaw.score": wrong})


torch_kron, torch_flatten, torch_reshape = torch.kron, torch.flatten, torch.reshape


@pytest.mark.parametrize(
    ("claim", "target", "wrong"),
    [
        ("definition-D.1", "torch.flatten", lambda X: torch_flatten(X.mT)),
        ("definition-D.2", "torch.reshape", lambda x, shape: torch_reshape(x, shape[::-1]).mT),
        ("definition-D.3", "torch.kron", lambda A, B: torch_kron(B, A)),
        ("definition-D.4", "torch.kron", lambda A, B: torch_kron(B, A)),
        ("lemma-D.1", "torch.kron", lambda A, B: torch_kron(B, A)),
        ("lemma-D.1", "torch.flatten", lambda X: torch_flatten(X.mT)),
        ("proposition-D.1", "ditbook.transformer.attend", scaled),
        ("proposition-D.1", "ditbook.transformer.attend", softmax_over_queries),
        ("erratum-36", "torch.kron", lambda A, B: torch_kron(B, A)),
        ("erratum-36", "ditbook.transformer.attend", lambda q, k, v: math.sqrt(2) * stored_weights(q, k, v)),
    ],
)
def test_the_chapter_on_the_tensor_trick_refuses(claim, target, wrong, rejects):
    rejects("d-3-tensor-trick", claim, {target: wrong})
