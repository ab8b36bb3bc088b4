"""Universality by construction (Appendix E): a transformer that equals a piecewise-constant function.

Three groups of layers, applied one after another. Feed-forward layers *quantise* every entry to the grid.
Attention layers *shift* columns until each column of each grid point carries an id of its own. Feed-forward
layers read the id and write the *value*. ``construct`` builds the network with hardmax and three-piece activations
(Definition E.3), ``to_standard`` replaces them by softmax and ReLU (Lemma E.7).

The constants are exact rationals in the paper's units. The fast evaluation keeps the state in units of delta:
on the grid every number is then an integer, and float64 is exact up to 2^53.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ditbook.inputs import typed
from ditbook.transformer import Transformer

MAX_BYTES = 2**31  # what the tables of one network may take
BLOCK_TOKENS = 2**16  # tokens that walk through the layers together; bounds the memory of an evaluation
KINDS = ("quantise", "shift", "value")


@dataclass(frozen=True)
class Grid:
    """The grid of width delta = 1/n on [0, 1)^{dL}: points are cube corners, cubes are half-open.

    Source: Definition E.1
    """

    d: int
    L: int
    n: int

    @property
    def cells(self) -> int:
        return self.n ** (self.d * self.L)

    @property
    def J(self) -> int:
        """Entries outside [0, 1) are sent to -J, below everything else (E.7)."""
        return self.L + 3 * self.L * self.cells

    @property
    def layer_counts(self) -> dict[str, int]:
        """Number of layers of each group, ``quantise``, ``shift`` and ``value``.

        Source: Lemma E.6
        """
        d, L, n = self.d, self.L, self.n
        return {"quantise": d * n + d, "shift": L * n**d + 1, "value": L * self.cells + d + 1}


def column_weights(grid: Grid) -> list[int]:
    """u = (1, 1/delta, ..., delta^{-d+1}): the digits of a column become one number (E.7)."""
    return [grid.n**i for i in range(grid.d)]


def positional_encoding(grid: Grid) -> list[int]:
    """Token j is moved up by j - 1 in every feature, so that no two grid points are permutations (E.4)."""
    return list(range(grid.L))


def sweep_levels(grid: Grid) -> list[Fraction]:
    """The column ids that the selective shifts look for, token by token, in increasing order (E.8)."""
    d, L, n = grid.d, grid.L, grid.n
    starts = [j * (n**d - 1) // (n - 1) for j in range(L)]
    return [start + Fraction(k, n) for start in starts for k in range(n**d)]


def selective_gain(grid: Grid) -> int:
    """delta^{-d}, the gain of a selective shift (E.11)."""
    return grid.n**grid.d


def global_gain(grid: Grid) -> int:
    """L delta^{-(L+1)d-1}, the gain of the last attention layer (E.12)."""
    return grid.L * grid.n ** ((grid.L + 1) * grid.d + 1)


def id_bounds(grid: Grid) -> tuple[int, int]:
    """t_l and t_r: the ids of points inside the cube lie in [t_l, t_r], all others outside.

    The exponent of t_l is -2Ld; the printed -2(L+1)d is too large (erratum 5).

    Source: Lemma E.4
    """
    d, L, n = grid.d, grid.L, grid.n
    return L * n ** (2 * L * d) * (n**d - 1), L**2 * n ** (2 * (L + 1) * d + 1) + L * n ** ((L + 1) * d)


def largest_entry(grid: Grid) -> int:
    """M: no entry that leaves the attention layers is larger (Definition E.8).

    At worst L - 1 columns of a point outside the cube are shifted, each by delta^{-d} times (largest - smallest).
    """
    top = grid.L * sum(column_weights(grid))
    low = grid.J * sum(column_weights(grid))
    for _ in range(grid.L - 1):
        top += selective_gain(grid) * (top + low)
    return max(top * (1 + global_gain(grid)), id_bounds(grid)[1])


def half_window(grid: Grid) -> Fraction:
    """Half the width of the window in which a value layer recognises an id (Definition E.10)."""
    return Fraction(1, 2 * grid.n)


# --- one layer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThreePieces:
    """t -> slopes[i] t + intercepts[i], with i = 0 below c1, 1 on [c1, c2), 2 from c2 on; one slope is zero.

    Source: Definition E.3
    """

    breaks: tuple
    slopes: tuple
    intercepts: tuple

    def __call__(self, t: np.ndarray) -> np.ndarray:
        line = [a * t + b for a, b in zip(self.slopes, self.intercepts, strict=True)]
        return np.where(t < self.breaks[0], line[0], np.where(t < self.breaks[1], line[1], line[2]))

    def relu(self, width: float) -> tuple[list[int], list, list, float]:
        """Four ReLUs: constant + sum_i gain_i ReLU(sign_i (t - knot_i)) equals the function off [c - width, c).

        Each break becomes two knots. ReLUs left of the constant piece are mirrored, those right of it are not.

        Source: Lemma E.7
        """
        (c1, c2), a, b = self.breaks, self.slopes, self.intercepts
        knots = [c1 - width, c1, c2 - width, c2]
        heights = [a[i] * c + b[i] for i, c in zip((0, 1, 1, 2), knots, strict=True)]
        jump1, jump2 = heights[1] - heights[0], heights[3] - heights[2]
        slopes = [a[0], jump1 / width, a[1], jump2 / width, a[2]]
        gains = [right - left for left, right in pairwise(slopes)]
        flat = a.index(0)
        signs = [-1 if i < 2 * flat else 1 for i in range(4)]
        return signs, knots, gains, b[flat]


@dataclass(frozen=True)
class FeedForwardLayer:
    """X + zeta(X w) v': one hidden unit that reads direction w and writes direction v.

    Source: Definition E.3
    """

    w: tuple
    zeta: ThreePieces
    v: tuple

    def __call__(self, X: np.ndarray) -> np.ndarray:
        return X + self.zeta(X @ np.array(self.w))[..., None] * np.array(self.v)


@dataclass(frozen=True)
class AttentionLayer:
    """X + sum_h gain_h xi(X; b_h): hardmax heads that read the ids X u and write the first feature.

    Source: Equation E.5, Equation E.6
    """

    u: tuple
    heads: tuple  # of (gain, threshold)

    def __call__(self, X: np.ndarray) -> np.ndarray:
        ids = X @ np.array(self.u)
        out = X.copy()
        out[..., 0] += sum(gain * hardmax_attention(ids, threshold) for gain, threshold in self.heads)
        return out


def hardmax_attention(ids: np.ndarray, threshold: Fraction) -> np.ndarray:
    """xi(X; b) for ids (..., L): keys and values u'X_k, queries u'X_j - b, the mean over the keys of largest logit.

    Source: Equation E.5
    """
    logits = (ids - threshold)[..., :, None] * ids[..., None, :]
    largest = logits == logits.max(axis=-1, keepdims=True)
    return (largest * ids[..., None, :]).sum(axis=-1) / largest.sum(axis=-1)


def quantise_layers(grid: Grid) -> Iterator[FeedForwardLayer]:
    """Send entries outside [0, 1) to -J, then each entry of [k delta, (k+1) delta) to k delta.

    Source: Definition E.5, Definition E.6
    """
    n = grid.n
    for i in range(grid.d):
        e_i = tuple(int(i == k) for k in range(grid.d))
        yield FeedForwardLayer(e_i, ThreePieces((0, 1), (-1, 0, -1), (-grid.J, 0, -grid.J)), e_i)
        for k in range(n):
            edges = (Fraction(k, n), Fraction(k + 1, n))
            yield FeedForwardLayer(e_i, ThreePieces(edges, (0, -1, 0), (0, edges[0], 0)), e_i)


def shift_layers(grid: Grid) -> Iterator[AttentionLayer]:
    """The selective shifts, one per level of the sweep, then the global shift.

    Source: Lemma E.4
    """
    u, half = tuple(column_weights(grid)), Fraction(1, 2 * grid.n)
    for level in sweep_levels(grid):
        gain = selective_gain(grid)
        yield AttentionLayer(u, ((gain, level - half), (-gain, level + half)))
    yield AttentionLayer(u, ((global_gain(grid), Fraction(0)),))


def value_layers(grid: Grid, ids: Iterable, sources: Iterable, values: Iterable) -> Iterator[FeedForwardLayer]:
    """Clear the points outside the cube, then replace f_c2(G)_j by (A_G)_j where the id of (G, j) is read.

    ``ids``, ``sources`` (the columns of f_c2) and ``values`` run over all (G, j) in the same order.

    Source: Definition E.8, Definition E.9, Definition E.10
    """
    u, half = tuple(column_weights(grid)), half_window(grid)
    outside = ThreePieces(id_bounds(grid), (0, 0, 0), (1, 0, 1))
    yield FeedForwardLayer(u, outside, (-largest_entry(grid) - 1,) * grid.d)
    for i in range(grid.d):
        e_i = tuple(int(i == k) for k in range(grid.d))
        yield FeedForwardLayer(e_i, ThreePieces((0, 1), (-1, 0, 0), (0, 0, 0)), e_i)
    for c, source, value in zip(ids, sources, values, strict=True):
        window = ThreePieces((c - half, c + half), (0, 0, 0), (0, 1, 0))
        yield FeedForwardLayer(u, window, tuple(a - b for a, b in zip(value, source, strict=True)))


# --- the network -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModifiedTransformer:
    """The constructed network: hardmax attention and three-piece activations.

    Call it on X (..., L, d), float, for the values; give ``exact`` a numpy array of Fractions for exact arithmetic.
    The tables hold one row per value layer, in cell order: ``ids`` (cells L,) and ``sources`` (cells L, d) in units
    of delta, ``values`` (cells L, d).

    Source: Definition E.3, Lemma E.3
    """

    grid: Grid
    ids: np.ndarray
    sources: np.ndarray
    values: np.ndarray

    @property
    def layer_counts(self) -> dict[str, int]:
        """Number of layers of each group, ``quantise``, ``shift`` and ``value``.

        Source: Lemma E.6
        """
        return self.grid.layer_counts

    @property
    def bounds(self) -> tuple[float, float]:
        """(t_l, t_r), the range of the ids inside the cube.

        Source: Lemma E.4
        """
        t_l, t_r = id_bounds(self.grid)
        return float(t_l), float(t_r)

    @typed
    @torch.no_grad()
    def __call__(self, X: Float[Tensor, "*batch L d"]) -> Float[Tensor, "*batch L d"]:
        """f at the centre of the half-open cube that holds X, and 0 outside [0, 1)^{dL}; computed in float64.

        :raises ValueError: X has the wrong last two dimensions, or holds NaN.
        """
        points = _points(X, self.grid)
        out = np.empty_like(points)
        size = max(1, BLOCK_TOKENS // self.grid.L)
        for start in range(0, len(points), size):
            state = _enter(points[start : start + size], self.grid)
            _quantise(state, self.grid)
            _shift(state, self.grid)
            _write_values(state, self)
            out[start : start + size] = state.T / self.grid.n
        return torch.from_numpy(out).reshape(X.shape).to(X)

    @typed
    def contextual_ids(self, G: Float[Tensor, "*batch L d"]) -> Float[Tensor, "*batch L"]:
        """u' f_c2(G), the id of each column after the global shift, for grid points before the positional encoding.

        Always float64, because ids need the digits.

        :param G: entries in {-J, 0, delta, ..., 1 - delta}.
        :raises ValueError: G has the wrong last two dimensions, or entries off that grid.

        Source: Lemma E.4
        """
        points, grid = _points(G, self.grid), self.grid
        state = _enter(points, grid)
        steps = np.rint(state)
        known = (steps == -grid.n * grid.J) | ((steps >= 0) & (steps < grid.n))
        if not (known & (np.abs(state - steps) <= 1e-6 * np.abs(steps))).all():
            raise ValueError(f"G must hold multiples of delta = 1/{grid.n} in [0, 1), or -J = {-grid.J}")
        _shift(steps, grid)
        return torch.from_numpy(_column_ids(steps, grid).T / grid.n).reshape(G.shape[:-1]).to(G.device)

    def layers(self, kind: str) -> Iterator[FeedForwardLayer | AttentionLayer]:
        """The layers of one group in the paper's units, weights as exact rationals; built as they are asked for."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        if kind == "quantise":
            return quantise_layers(self.grid)
        if kind == "shift":
            return shift_layers(self.grid)
        n = self.grid.n
        ids = (Fraction(int(c), n) for c in self.ids)
        sources = ([Fraction(int(s), n) for s in row] for row in self.sources)
        values = ([Fraction(float(a)) for a in row] for row in self.values)
        return value_layers(self.grid, ids, sources, values)

    def exact(self, X: np.ndarray) -> np.ndarray:
        """The same function in exact rational arithmetic, one layer at a time, for an object array of Fractions."""
        for layer in self.layers("quantise"):
            X = layer(X)
        X = X + np.array(positional_encoding(self.grid), dtype=object)[:, None]
        for layer in chain(self.layers("shift"), self.layers("value")):
            X = layer(X)
        return X

    def to_standard(self, temperature: float, slope_width: float | Mapping[str, float]) -> torch.nn.Sequential:
        """Softmax for hardmax, four ReLUs for each three-piece function: a member of T^{2,1,4} plus a query bias.

        Two transformers in a row, since the positional encoding comes after the quantising layers (erratum 39).

        :param temperature: lambda; the logits are multiplied by it, so *large* values are close to hardmax.
        :param slope_width: width on which a jump becomes a slope, in (0, delta]; one number, or one for each of
            the kinds ``quantise`` and ``value``.
        :raises ValueError: temperature or slope_width out of range.

        Source: Lemma E.7
        """
        widths = _slope_widths(slope_width, self.grid)
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        counts, E = self.layer_counts, torch.tensor(positional_encoding(self.grid), dtype=torch.float64)
        first = _standard(self.grid, counts["quantise"])
        for block, layer in zip(first.blocks, self.layers("quantise"), strict=True):
            _load(block, layer, temperature, widths["quantise"])
        second = _standard(self.grid, counts["shift"] + counts["value"])
        second.E.copy_(E[:, None].expand(self.grid.L, self.grid.d))
        layers = chain(self.layers("shift"), self.layers("value"))
        for block, layer in zip(second.blocks, layers, strict=True):
            _load(block, layer, temperature, widths["value"])
        return torch.nn.Sequential(first, second)


@typed
def construct(f: Callable, d: int, L: int, delta: float | int | Fraction) -> ModifiedTransformer:
    """Build the transformer that equals f_delta, the piecewise-constant function with f's values at cube centres.

    :param f: maps float64 tensors (..., L, d) to tensors of the same shape; called on batches of cube centres.
    :param d: token width.
    :param L: number of tokens, at least 2.
    :param delta: grid width 1/n with an integer n >= 2, as a float or a Fraction.
    :raises ValueError: d < 1, L < 2, 1/delta not an integer >= 2; tables that do not fit (nothing is allocated);
        a grid too fine for float64; f of the wrong shape, not finite, or so large that value layers interfere.

    Source: Lemma E.3
    """
    grid = Grid(d, L, _cells_per_side(delta))
    _require_grid(grid)
    ids = np.empty((grid.cells, L))
    sources, values = np.empty((grid.cells, L, d)), np.empty((grid.cells, L, d))
    size = max(1, BLOCK_TOKENS // L)
    for start in _progress(range(0, grid.cells, size), "sampling f and the contextual ids"):
        block = slice(start, min(start + size, grid.cells))
        corners = np.stack(np.unravel_index(np.arange(block.start, block.stop), (grid.n,) * (d * L)), axis=-1)
        corners = corners.reshape(-1, L, d).astype(float)
        values[block] = _sample(f, torch.from_numpy((corners + 0.5) / grid.n))
        state = np.ascontiguousarray(corners.T)
        _shift(state, grid)
        ids[block], sources[block] = _column_ids(state, grid).T, state.T
    _require_small(values, grid)
    return ModifiedTransformer(grid, ids.reshape(-1), sources.reshape(-1, d), values.reshape(-1, d))


# --- fast evaluation: state (d, L, points) in units of delta, changed in place ------------------------------------


def _enter(points: np.ndarray, grid: Grid) -> np.ndarray:
    return np.ascontiguousarray(points.T) * grid.n


def _column_ids(state: np.ndarray, grid: Grid) -> np.ndarray:
    return sum(weight * x for weight, x in zip(column_weights(grid), state, strict=True))


def _quantise(state: np.ndarray, grid: Grid) -> None:
    # Where the float k/n lands in units of delta; it need not be the integer k.
    edges = np.arange(grid.n + 1) / grid.n * grid.n
    for x in state:
        x[~((x >= 0) & (x < grid.n))] = -grid.n * grid.J  # x + (-x - J)
        for k in range(grid.n):
            x[(x >= edges[k]) & (x < edges[k + 1])] = k  # x - (x - k)


def _shift(state: np.ndarray, grid: Grid) -> None:
    state += grid.n * np.array(positional_encoding(grid), dtype=float)[:, None]
    for layer in shift_layers(grid):
        ids = _column_ids(state, grid)
        # What hardmax attention selects: the largest id for tokens above the threshold, the smallest for those below.
        largest, smallest = ids.max(axis=0), ids.min(axis=0)
        heads = ((gain, float(threshold * grid.n)) for gain, threshold in layer.heads)
        state[0] += sum(gain * np.where(ids > b, largest, smallest) for gain, b in heads)


def _write_values(state: np.ndarray, network: ModifiedTransformer) -> None:
    grid = network.grid
    half = float(half_window(grid) * grid.n)
    ids = _column_ids(state, grid)
    t_l, t_r = (bound * grid.n for bound in id_bounds(grid))
    state -= grid.n * float(largest_entry(grid) + 1) * ((ids < t_l) | (ids >= t_r))
    np.maximum(state, 0, out=state)  # x + zeta_4(x)
    tokens, ids = state.reshape(grid.d, -1), _column_ids(state, grid).reshape(-1)
    weights = column_weights(grid)
    above, below = np.empty(ids.shape, bool), np.empty(ids.shape, bool)
    for c, source, value in _progress(_rows(network), "value layers", total=len(network.ids)):
        np.greater_equal(ids, c - half, out=above)
        np.less(ids, c + half, out=below)
        np.logical_and(above, below, out=above)
        hit = above.nonzero()[0]
        if hit.size:
            # x + (a - s), added in the order that loses nothing of a. Ids change only where a layer fired.
            for x, s, a in zip(tokens, source, value, strict=True):
                x[hit] = (x[hit] - s) + grid.n * a
            ids[hit] = sum(weight * x[hit] for weight, x in zip(weights, tokens, strict=True))


def _rows(network: ModifiedTransformer) -> Iterator[tuple]:
    """The tables row by row as plain numbers, which cost less to read than numpy scalars."""
    for start in range(0, len(network.ids), BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        tables = network.ids[block], network.sources[block], network.values[block]
        yield from zip(*(table.tolist() for table in tables), strict=True)


# --- softmax and ReLU ----------------------------------------------------------------------------------------------


def _standard(grid: Grid, blocks: int) -> Transformer:
    network = Transformer(grid.d, grid.L, blocks, heads=2, head_size=1, hidden=4, query_bias=True).double()
    for weight in network.parameters():
        weight.requires_grad_(False).zero_()
    return network


def _load(block: torch.nn.Module, layer: FeedForwardLayer | AttentionLayer, temperature: float, width: float) -> None:
    """Write one layer into one block; the other half of the block stays the identity."""
    if isinstance(layer, AttentionLayer):
        target, u = block.attention, torch.tensor(layer.u, dtype=torch.float64)
        for h, (gain, threshold) in enumerate(layer.heads):
            target.W_K[h, 0], target.W_V[h, 0], target.W_Q[h, 0] = u, u, temperature * u
            target.b_Q[h, 0] = -temperature * float(threshold)
            target.W_O[h, 0, 0] = float(gain)
        return
    target = block.feed_forward
    w, v = (torch.tensor([float(a) for a in weights], dtype=torch.float64) for weights in (layer.w, layer.v))
    signs, knots, gains, constant = (torch.tensor(x, dtype=torch.float64) for x in layer.zeta.relu(width))
    target.W_1.copy_(signs[:, None] * w)
    target.b_1.copy_(-signs * knots)
    target.W_2.copy_(v[:, None] * gains)
    target.b_2.copy_(constant * v)


# --- what can go wrong -----------------------------------------------------------------------------------------------


def _cells_per_side(delta: float | int | Fraction) -> int:
    n = round(1 / delta) if 0 < delta < 1 else 0
    if n < 2 or abs(1 / delta - n) > 1e-9 * n:
        raise ValueError(f"delta must be 1/n with an integer n >= 2, got {delta}")
    return n


def _require_grid(grid: Grid) -> None:
    d, L, n = grid.d, grid.L, grid.n
    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")
    if L < 2:
        raise ValueError(f"L must be at least 2 (the shifts compare tokens), got {L}")
    size = 8 * grid.cells * L * (2 * d + 1)
    if size > MAX_BYTES:
        raise ValueError(
            f"delta = 1/{n} at d = {d}, L = {L} gives {grid.cells:.3g} cells, "
            f"{sum(grid.layer_counts.values()):.3g} layers and tables of {size:.3g} bytes; "
            f"at most {MAX_BYTES:.3g} bytes are allowed"
        )
    if not _fits_float64(grid):
        finest = next((m for m in range(n - 1, 1, -1) if _fits_float64(Grid(d, L, m))), None)
        raise ValueError(
            f"delta = 1/{n} is too fine for float64 at d = {d}, L = {L}: ids reach {id_bounds(grid)[1]:.3g} and differ "
            f"by delta; " + (f"the finest grid is delta = 1/{finest}" if finest else "no grid fits")
        )


def _fits_float64(grid: Grid) -> bool:
    return id_bounds(grid)[1] * grid.n <= 2**53


def _sample(f: Callable, centres: Tensor) -> np.ndarray:
    values = f(centres)
    if not isinstance(values, Tensor) or values.shape != centres.shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"f must return a tensor of the shape of its input {tuple(centres.shape)}, got {got}")
    if not values.isfinite().all():
        bad = centres[~values.isfinite().all(-1).all(-1)][0].tolist()
        raise ValueError(f"f must be finite at every cube centre, got NaN or infinity at {bad}")
    return values.detach().double().cpu().numpy()


def _require_small(values: np.ndarray, grid: Grid) -> None:
    """A value must not be read as an id by a later layer (erratum 40)."""
    largest = np.abs(values @ np.array(column_weights(grid), dtype=float)).max()
    limit = id_bounds(grid)[0] - half_window(grid)
    if not largest < limit:
        raise ValueError(f"f must satisfy max abs u'f < t_l - delta/2 = {float(limit):g}, got {largest:g}: scale f")


def _points(X: Tensor, grid: Grid) -> np.ndarray:
    if X.shape[-2:] != (grid.L, grid.d):
        raise ValueError(f"X must have shape (..., L = {grid.L}, d = {grid.d}), got {tuple(X.shape)}")
    if X.isnan().any():
        raise ValueError("X must not hold NaN")
    return X.detach().double().cpu().numpy().reshape(-1, grid.L, grid.d)


def _slope_widths(slope_width: float | Mapping[str, float], grid: Grid) -> Mapping[str, float]:
    widths = slope_width if isinstance(slope_width, Mapping) else {"quantise": slope_width, "value": slope_width}
    if set(widths) != {"quantise", "value"}:
        raise ValueError(f"slope_width must be a number or have the keys quantise and value, got {sorted(widths)}")
    for kind, width in widths.items():
        if not 0 < width <= 1 / grid.n:
            raise ValueError(f"slope_width of {kind} must lie in (0, delta] = (0, {1 / grid.n:g}], got {width}")
    return widths


def _progress(items: Iterable, what: str, total: int | None = None) -> Iterable:
    """A progress bar on a terminal for what takes more than two seconds, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, total=total, delay=2, disable=None, leave=False)
