"""The construction of Appendix E against exact rational arithmetic, brute force and the real transformer."""

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditbook import universality
from ditbook.transformer import Transformer
from ditbook.universality import Grid, ThreePieces, construct, hardmax_attention, quantise_layers, value_layers

# (d, L, 1/delta)
SMALL = [(1, 2, n) for n in range(2, 9)] + [(1, 3, 3), (2, 2, 2), (2, 2, 3), (2, 3, 2), (1, 4, 3)]
MORE = [(1, 3, 2), (1, 3, 4), (1, 4, 2), (1, 5, 2), (1, 6, 2), (2, 4, 2), (3, 2, 2)]


def mixing(X):
    """A smooth function in which every output entry depends on every input entry."""
    return torch.sin(3 * X) + X.sum((-1, -2), keepdim=True).cos() * X.flip(-2)


def uniform(count, d, L, generator):
    return torch.rand(count, L, d, generator=generator, dtype=torch.float64)


def centres(X, n):
    return (torch.floor(X * n) + 0.5) / n


def grid_points(d, L, n):
    """Every point of {-J, 0, delta, ..., 1 - delta}^{L x d}, as exact rationals, tokens as rows."""
    J = L + 3 * L * n ** (d * L)
    entries = [Fraction(-J)] + [Fraction(k, n) for k in range(n)]
    for flat in itertools.product(entries, repeat=d * L):
        yield [flat[j * d : (j + 1) * d] for j in range(L)]


def brute_force_ids(G, n):
    """Lemma E.4 in closed form: a swept column rises by delta^{-d} (max - min), the last layer lifts by the max."""
    L, d = len(G), len(G[0])
    delta = Fraction(1, n)
    ids = [sum((x + j) / delta**i for i, x in enumerate(row)) for j, row in enumerate(G)]
    for j in range(L):
        start = j * (delta - delta ** (1 - d)) / (delta - 1)
        for k in range(n**d):
            rise = (max(ids) - min(ids)) / delta**d
            ids = [s + rise if s == start + k * delta else s for s in ids]
    gain = L / delta ** ((L + 1) * d + 1)
    return [s + gain * (max(ids) if s > 0 else min(ids)) for s in ids]


def ids_of(d, L, n):
    """Contextual ids of all grid points, split into those inside the cube and those with an entry -J."""
    network = construct(torch.zeros_like, d, L, 1 / n)
    points = torch.tensor([[[float(x) for x in row] for row in G] for G in grid_points(d, L, n)], dtype=torch.float64)
    inside = (points >= 0).all(-1).all(-1)
    ids = network.contextual_ids(points)
    return network, ids[inside], ids[~inside]


# --- contextual ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "L", "n"), SMALL)
def test_contextual_ids_equal_the_rational_brute_force(d, L, n):
    points = list(grid_points(d, L, n))
    exact = [brute_force_ids(G, n) for G in points]
    G = torch.tensor([[[float(x) for x in row] for row in point] for point in points], dtype=torch.float64)
    ids = construct(torch.zeros_like, d, L, 1 / n).contextual_ids(G)
    assert ids.tolist() == [[float(s) for s in row] for row in exact]
    inside = (G >= 0).all(-1).all(-1)
    assert construct(torch.zeros_like, d, L, 1 / n).contextual_ids(G[inside].float()).equal(ids[inside])


def test_corrected_bounds_give_all_four_properties_and_the_printed_one_fails_where_erratum_5_says():
    printed_fails, printed_is_empty = [], []
    for d, L, n in SMALL + MORE:
        network, inside, outside = ids_of(d, L, n)
        t_l, t_r = network.bounds
        assert inside.unique().numel() == inside.numel() == L * n ** (d * L)
        assert ((t_l <= inside) & (inside <= t_r)).all()
        assert ((outside < t_l) | (outside > t_r)).all()
        printed = L * n ** (2 * (L + 1) * d) * (n**d - 1)
        if (inside < printed).any():
            printed_fails.append((d, L, n))
        if printed > t_r:
            printed_is_empty.append((d, L, n))
    passes = {(1, 3, 2), (1, 4, 2), (1, 5, 2), (1, 6, 2), (2, 4, 2)}
    assert set(printed_fails) == set(SMALL + MORE) - passes
    assert len(printed_fails) == 14
    assert printed_is_empty == [(2, 2, 3), (3, 2, 2)]


def test_hardmax_attention_gives_the_largest_id_above_the_threshold_and_the_smallest_below(generator):
    ids = torch.randn(500, 5, generator=generator, dtype=torch.float64).numpy()
    for threshold in (-0.5, 0.0, 0.7):
        expected = np.where(ids > threshold, ids.max(1, keepdims=True), ids.min(1, keepdims=True))
        assert np.array_equal(hardmax_attention(ids, threshold), expected)


# --- the network as a function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "L", "n"), SMALL + MORE)
def test_network_equals_f_at_the_cube_centre_and_vanishes_outside(d, L, n, generator):
    network = construct(mixing, d, L, 1 / n)
    X = uniform(3000, d, L, generator)
    expected = mixing(centres(X, n))
    assert (network(X) - expected).abs().max() <= 1e-12 * expected.abs().max()
    which = torch.randint(d * L, (3000,), generator=generator)
    away = torch.where(torch.rand(3000, generator=generator) < 0.5, -1e-9, 1.0)
    outside = X.flatten(1).scatter(1, which[:, None], away[:, None].double()).view_as(X)
    assert torch.count_nonzero(network(outside)) == 0


@pytest.mark.parametrize("n", [3, 7, 49])
def test_cells_are_half_open_also_where_k_over_n_is_no_float(n):
    network = construct(lambda X: X, 1, 2, 1 / n)
    edges = torch.arange(n, dtype=torch.float64) / n
    X = torch.stack([edges, edges], -1)[..., None]
    assert torch.allclose(network(X), X + 0.5 / n, rtol=0, atol=1e-15)
    below = torch.tensor([[[math.nextafter(1.0, 0)], [0.0]]], dtype=torch.float64)
    assert torch.allclose(network(below), torch.tensor([[[1 - 0.5 / n], [0.5 / n]]], dtype=torch.float64))


def test_huge_and_infinite_entries_are_outside():
    network = construct(mixing, 2, 2, 0.5)
    for x in (1e20, -1e300, math.inf, -math.inf):
        X = torch.full((2, 2), 0.3, dtype=torch.float64)
        X[1, 0] = x
        assert torch.count_nonzero(network(X)) == 0


rational = st.fractions(min_value=-Fraction(1, 4), max_value=Fraction(5, 4), max_denominator=64)


@settings(deadline=None, max_examples=10)
@given(data=st.data())
@pytest.mark.parametrize(("d", "L", "n"), [(1, 2, 2), (1, 2, 3), (1, 3, 2), (2, 2, 2)])
def test_fast_evaluation_equals_the_layers_in_exact_arithmetic(d, L, n, data):
    network = construct(lambda X: X.flip(-2) * 4 - 1, d, L, Fraction(1, n))
    flat = data.draw(st.lists(rational, min_size=d * L, max_size=d * L))
    exact = network.exact(np.array(flat, dtype=object).reshape(1, L, d))
    assert all(isinstance(x, Fraction) for x in exact.flat)
    fast = network(torch.tensor([float(x) for x in flat], dtype=torch.float64).reshape(1, L, d))
    assert np.abs(exact.astype(float) - fast.numpy()).max() <= 1e-14


def test_batch_shape_dtype_and_block_size_do_not_matter(generator, monkeypatch):
    network = construct(mixing, 2, 3, 0.5)
    X = uniform(60, 2, 3, generator)
    values = network(X)
    assert torch.equal(network(X.view(3, 4, 5, 3, 2)), values.view(3, 4, 5, 3, 2))
    assert network(X.float()).dtype == torch.float32
    assert torch.allclose(network(X.float()).double(), network(X.float().double()), atol=1e-6)
    assert network(X[:0]).shape == (0, 3, 2)
    monkeypatch.setattr(universality, "BLOCK_TOKENS", 10)
    assert torch.equal(network(X), values)
    assert torch.equal(construct(mixing, 2, 3, 0.5)(X), values)


def test_evaluation_does_not_hold_the_layers_activations(generator):
    X = uniform(5000, 1, 2, generator)

    def peak(n):
        network = construct(mixing, 1, 2, 1 / n)
        tracemalloc.start()
        network(X)
        high = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return high

    few, many = peak(4), peak(40)
    assert many <= few + 2e6 < 1e7  # the second network has 3,200 value layers, the first 32


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "L", "n"), [(1, 2, 3), (2, 2, 2), (1, 4, 2)])
def test_layer_counts_are_the_layers_that_are_there(d, L, n):
    network = construct(mixing, d, L, 1 / n)
    counted = {kind: len(list(network.layers(kind))) for kind in ("quantise", "shift", "value")}
    assert counted == network.layer_counts
    assert counted == {"quantise": d * n + d, "shift": L * n**d + 1, "value": L * n ** (d * L) + d + 1}


@pytest.mark.parametrize(("d", "L", "n"), [(1, 2, 2), (1, 2, 4), (1, 3, 3), (2, 2, 2), (2, 2, 3), (1, 4, 2)])
def test_no_entry_behind_the_attention_layers_exceeds_M(d, L, n):
    grid, largest = Grid(d, L, n), 0
    for G in grid_points(d, L, n):
        rise = [
            s - sum((x + j) * n**i for i, x in enumerate(row))
            for j, (s, row) in enumerate(zip(brute_force_ids(G, n), G, strict=True))
        ]
        largest = max(largest, *(row[0] + j + rise[j] for j, row in enumerate(G)))
    assert largest <= universality.largest_entry(grid)


finite = st.fractions(min_value=-3, max_value=3, max_denominator=8)


@settings(deadline=None, max_examples=40)
@given(st.tuples(finite, finite), st.tuples(finite, finite), st.sampled_from([0, 1, 2]), st.data())
def test_four_relus_equal_a_three_piece_function_off_its_slopes(slopes, intercepts, flat, data):
    slopes = (*slopes[:flat], Fraction(0), *slopes[flat:])
    zeta = ThreePieces((Fraction(-1), Fraction(1)), slopes, (*intercepts, Fraction(1, 2)))
    width = Fraction(1, 16)
    signs, knots, gains, constant = zeta.relu(width)
    assert len(gains) == 4
    t = data.draw(st.fractions(min_value=-4, max_value=4, max_denominator=32))
    four = constant + sum(g * max(s * (t - k), 0) for s, k, g in zip(signs, knots, gains, strict=True))
    if not any(c - width <= t < c for c in zeta.breaks):
        assert four == zeta(np.array(t, dtype=object))


def test_values_that_look_like_ids_make_value_layers_interfere_in_every_order():
    grid = Grid(1, 2, 2)
    network = construct(torch.zeros_like, 1, 2, 0.5)
    ids = [Fraction(int(c), 2) for c in network.ids[:4]]
    sources = [[Fraction(int(s), 2)] for (s,) in network.sources[:4]]
    swapped = [sources[k] for k in (1, 0, 3, 2)]  # the value of each column is the column of another id
    X = np.array(sources, dtype=object)[:, None, :]
    for order in itertools.permutations(range(4)):
        Y = X
        rows = ([table[k] for k in order] for table in (ids, sources, swapped))
        for layer in list(value_layers(grid, *rows))[-4:]:
            Y = layer(Y)
        assert (Y[:, 0] != np.array(swapped, dtype=object)).any()


# --- the standard transformer --------------------------------------------------------------------------------------


def transition_l2(standard, network, width, generator, samples=2000):
    """L2 distance on the cube, sampled stratum by stratum: each entry on a slope, just behind an edge, or elsewhere."""
    n, L, d = network.grid.n, network.grid.L, network.grid.d
    shape, behind = (samples, L, d), 1e-3
    total = 0.0
    for strata in itertools.product(range(3), repeat=d * L):
        strata = torch.tensor(strata).view(L, d)
        U = torch.rand(shape, generator=generator, dtype=torch.float64)
        edge = torch.randint(1, n + 1, shape, generator=generator).double() / n
        before, after = edge - width + U * width, edge - 1 / n + U * behind
        elsewhere = edge - 1 / n + behind + U * (1 / n - behind - width)
        X = torch.where(strata == 0, before, torch.where(strata == 1, after, elsewhere))
        share = torch.tensor([n * width, n * behind, 1 - n * (width + behind)], dtype=torch.float64)[strata].prod()
        total += share * (standard(X) - network(X)).square().sum((-1, -2)).mean()
    return float(total) ** 0.5


def test_standard_transformer_reaches_1e_3_in_L2_and_scales_like_the_root_of_the_slope_width(generator):
    network = construct(mixing, 1, 2, 0.5)
    errors = []
    for width in (2.0**-30, 2.0**-40):
        standard = network.to_standard(temperature=1e3, slope_width={"quantise": width, "value": 1 / 16})
        errors.append(transition_l2(standard, network, width, generator))
    assert errors[1] <= 1e-3
    assert errors[0] / errors[1] == pytest.approx(2**5, rel=0.1)


def test_standard_transformer_is_a_member_of_T_2_1_4_with_a_query_bias():
    network = construct(mixing, 2, 2, 0.5)
    standard = network.to_standard(1e3, 0.01)
    assert all(isinstance(part, Transformer) for part in standard)
    blocks = [block for part in standard for block in part.blocks]
    assert len(blocks) == sum(network.layer_counts.values())
    for block in blocks:
        assert block.attention.W_Q.shape == (2, 1, 2)
        assert block.attention.b_Q.shape == (2, 1)
        assert block.feed_forward.W_1.shape == (4, 2)
    assert torch.count_nonzero(standard[0].E) == 0
    assert torch.equal(standard[1].E, torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64))


@pytest.mark.parametrize(("d", "L", "n"), [(1, 2, 2), (1, 2, 3), (2, 2, 2), (1, 3, 2)])
def test_standard_transformer_equals_the_modified_one_away_from_the_slopes(d, L, n, generator):
    network = construct(mixing, d, L, 1 / n)
    standard = network.to_standard(temperature=4000, slope_width={"quantise": 2.0**-20, "value": 1 / (8 * n)})
    X = uniform(2000, d, L, generator)
    X = (torch.floor(X * n) + 0.02 + 0.96 * (X * n % 1)) / n
    assert (standard(X) - network(X)).abs().max() <= 1e-6


def test_quantising_layers_of_the_standard_transformer_also_catch_points_outside():
    network = construct(mixing, 1, 2, 0.5)
    standard = network.to_standard(1e3, {"quantise": 2.0**-30, "value": 1 / 16})
    X = torch.tensor([[[-0.2], [0.4]], [[0.3], [1.7]], [[1.2], [-3.0]]], dtype=torch.float64)
    assert standard(X).abs().max() <= 1e-6


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "L", "finest"), [(1, 2, 82), (1, 3, 31), (1, 4, 16), (2, 2, 12), (2, 3, 6), (3, 2, 5)])
def test_grids_finer_than_float64_are_refused_with_the_finest_that_fits(d, L, finest):
    with pytest.raises(ValueError, match=f"too fine for float64.*finest grid is delta = 1/{finest}$"):
        construct(mixing, d, L, 1 / (finest + 1))


def test_the_finest_grid_still_has_distinct_ids_and_the_right_values(generator):
    network = construct(mixing, 1, 2, 1 / 82)
    assert np.unique(network.ids).size == network.ids.size
    X = uniform(200, 1, 2, generator)
    assert (network(X) - mixing(centres(X, 82))).abs().max() <= 1e-12


def test_a_grid_that_does_not_fit_is_refused_before_f_is_called():
    def never(X):
        raise AssertionError("f was called")

    with pytest.raises(ValueError, match=r"1e\+16 cells, 4e\+16 layers and tables of 2.88e\+18 bytes"):
        construct(never, 4, 4, 0.1)


@pytest.mark.parametrize("delta", [1, 1.0, 0.0, -0.5, 0.3, 2 / 3, math.nan, math.inf])
def test_delta_must_be_one_over_an_integer(delta):
    with pytest.raises(ValueError, match="delta must be 1/n with an integer n >= 2, got"):
        construct(mixing, 1, 2, delta)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mixing, 1, 1, 0.5), "L must be at least 2"),
        ((mixing, 0, 2, 0.5), "d must be at least 1"),
        ((lambda X: X[..., 0], 1, 2, 0.5), r"shape of its input \(4, 2, 1\), got \(4, 2\)"),
        ((lambda X: X.numpy(), 1, 2, 0.5), "got ndarray"),
        ((lambda X: X / 0 * (X > 0.5), 1, 2, 0.5), "finite at every cube centre"),
        ((lambda X: torch.where(X > 0.5, torch.nan, X), 1, 2, 0.5), r"got NaN or infinity at \[\[0.25\], \[0.75\]\]"),
        ((lambda X: 100 * X, 1, 2, 0.5), "max abs u'f < t_l - delta/2 = 31.75, got 75: scale f"),
    ],
)
def test_construct_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        construct(*arguments)


def test_calls_refuse_wrong_shapes_nan_and_points_off_the_grid():
    network = construct(mixing, 1, 2, 0.5)
    with pytest.raises(ValueError, match=r"X must have shape \(..., L = 2, d = 1\), got \(5, 3, 1\)"):
        network(torch.zeros(5, 3, 1))
    with pytest.raises(ValueError, match="X must not hold NaN"):
        network(torch.full((2, 1), math.nan))
    with pytest.raises(ValueError, match="G must hold multiples of delta = 1/2"):
        network.contextual_ids(torch.tensor([[0.25], [0.5]]))
    with pytest.raises(ValueError, match="kind must be one of"):
        network.layers("attention")


@pytest.mark.parametrize(
    ("temperature", "slope_width", "message"),
    [
        (0.0, 0.1, "temperature must be positive"),
        (math.inf, 0.1, "temperature must be positive"),
        (1.0, 0.0, "slope_width of quantise must lie in"),
        (1.0, {"quantise": 0.1, "value": 0.6}, "slope_width of value must lie in"),
        (1.0, {"quantise": 0.1}, "keys quantise and value"),
    ],
)
def test_to_standard_refuses(temperature, slope_width, message):
    with pytest.raises(ValueError, match=message):
        construct(mixing, 1, 2, 0.5).to_standard(temperature, slope_width)


def test_quantising_layers_read_like_definitions_E_5_and_E_6():
    J = Grid(1, 2, 4).J
    clip, *stairs = quantise_layers(Grid(1, 2, 4))
    assert [clip.zeta(np.array(t, dtype=object)) for t in (-2, Fraction(1, 2), 1)] == [2 - J, 0, -1 - J]
    assert [layer.zeta(np.array(Fraction(3, 8), dtype=object)) for layer in stairs] == [0, Fraction(-1, 8), 0, 0]


# --- planted faults: the chapter's own checks refuse them ------------------------------------------------------------


def printed_bounds(grid, bounds=universality.id_bounds):
    return grid.L * grid.n ** (2 * (grid.L + 1) * grid.d) * (grid.n**grid.d - 1), bounds(grid)[1]


FAULTS = {
    "column_weights": lambda grid: [1] * grid.d,
    "positional_encoding": lambda grid: [0] * grid.L,
    "sweep_levels": lambda grid, levels=universality.sweep_levels: levels(grid)[::-1],
    "selective_gain": lambda grid: 1,
    "global_gain": lambda grid: 0,
    "half_window": lambda grid: Fraction(1, grid.n),
    "id_bounds": printed_bounds,
    "largest_entry": lambda grid: 0,
}


@pytest.mark.parametrize(
    ("claim", "name"),
    [
        ("lemma-E.4", "column_weights"),
        ("definition-E.4", "positional_encoding"),
        ("lemma-E.3", "positional_encoding"),
        ("lemma-E.4", "sweep_levels"),
        ("lemma-E.4", "selective_gain"),
        ("lemma-E.4", "global_gain"),
        ("lemma-E.3", "half_window"),
        ("definition-E.10", "half_window"),
        ("lemma-E.4", "id_bounds"),
        ("lemma-E.3", "id_bounds"),
        ("definition-E.8", "largest_entry"),
    ],
)
def test_the_chapter_rejects(rejects, claim, name):
    rejects("e-universality", claim, {f"ditbook.universality.{name}": FAULTS[name]})


def test_the_chapter_rejects_four_relus_without_the_mirror(rejects):
    def unmirrored(zeta, width, relu=ThreePieces.relu):
        _, knots, gains, constant = relu(zeta, width)
        return [1] * 4, knots, gains, constant

    rejects("e-universality", "lemma-E.7", {"ditbook.universality.ThreePieces.relu": unmirrored})


def printed_depth(grid):
    return {"quantise": 0, "shift": 0, "value": grid.n ** (2 * grid.L)}


@pytest.mark.parametrize(
    ("claim", "target", "wrong"),
    [
        ("theorem-3.1", "transformer.assemble", lambda x, decoded, sigma: (decoded - x) / sigma.sqrt()),
        ("remark-3.2", "transformer.assemble", lambda x, decoded, sigma: decoded / sigma - x),
        ("erratum-9", "universality.Grid.layer_counts", property(printed_depth)),
        ("equation-F.8", "universality.global_gain", lambda grid: grid.n ** (grid.L * grid.d)),
        ("equation-F.11", "universality.positional_encoding", lambda grid: [10 * j for j in range(grid.L)]),
        ("lemma-F.2", "subspace.GaussianMixture.q", lambda latent, h, t: h.square()),
    ],
)
def test_the_chapter_on_score_approximation_rejects(rejects, claim, target, wrong):
    rejects("3-2-score-approximation", claim, {f"ditbook.{target}": wrong})
