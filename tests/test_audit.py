"""The audit sees every attention call and changes none; almost-linear attention keeps to its tolerance or stays out."""

import math

import matplotlib
import pytest
import torch
from diffusers import DiTTransformer2DModel, FluxTransformer2DModel, PixArtTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils._python_dispatch import TorchDispatchMode

from ditbook import audit
from ditbook.attention import CHUNK, exp_polynomial
from ditbook.audit import AttentionAudit, almost_linear

matplotlib.use("agg")


def tensors(*shape, generator, count=3, dtype=torch.float32):
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(count)]


def easy(L, d=4, heads=(1, 2), dtype=torch.float32):
    """q, k, v of norms that leave the fast method a chance."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = tensors(*heads, L, d, generator=generator, dtype=dtype)
    return 0.5 * q, 0.5 * k, v.clamp(-1, 1)


def is_clean():
    return (
        F.scaled_dot_product_attention is imported_by_name
        and torch.backends.mha.get_fastpath_enabled()
        and audit.AttentionHook.active is None
    )


@pytest.fixture(autouse=True)
def everything_is_put_back():
    assert is_clean()
    yield
    assert is_clean()


# --- numbers ----------------------------------------------------------------------------------------------------


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_largest_logit_and_entries_are_those_of_the_definition(data):
    batch = data.draw(st.sampled_from([(), (3,), (2, 2), (2, 1, 2)]))
    Lq, Lk, d, dv = (data.draw(st.integers(1, n)) for n in (40, 40, 6, 4))
    scale = data.draw(st.sampled_from([None, 1.0, 0.3, -0.7]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, k, v = (torch.randn(*batch, n, m, generator=generator) for n, m in ((Lq, d), (Lk, d), (Lk, dv)))
    with AttentionAudit() as seen:
        F.scaled_dot_product_attention(q, k, v, scale=scale)
    (record,) = seen.records
    logits = (d**-0.5 if scale is None else scale) * q.double() @ k.double().mT
    assert isinstance(record.max_logit, float)
    assert record.max_logit == pytest.approx(float(logits.abs().max()), rel=1e-5)
    assert record.max_logit <= record.logit_bound * (1 + 1e-5)
    assert (record.max_q, record.max_k, record.max_v) == tuple(float(t.abs().max()) for t in (q, k, v))
    assert (record.shape, record.keys, record.log_length) == ((*batch, Lq, d), Lk, math.log(Lk))


@pytest.mark.parametrize(("heads", "Lq", "Lk"), [(1, 1500, 1100), (3, 700, 900), (40, 100, 150)])
def test_blocks_of_logits_leave_nothing_out(heads, Lq, Lk, generator):
    q, k = torch.randn(heads, Lq, 4, generator=generator), torch.randn(heads, Lk, 4, generator=generator)
    expected = (0.5 * q @ k.mT).abs().amax((1, 2))
    torch.testing.assert_close(audit.largest_logits(q, k, 0.5), expected)


def test_no_array_holds_all_logits(generator):
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
            return result

    q, k, v = tensors(1, 2, 3000, 4, generator=generator)
    with AttentionAudit() as seen, Sizes() as sizes:
        F.scaled_dot_product_attention(q, k, v)
    assert len(seen.records) == 1
    assert sizes.largest <= 2 * CHUNK < 3000**2


def test_half_precision_and_grouped_heads_are_measured(generator):
    q, k, v = torch.randn(2, 4, 9, 8, generator=generator), *tensors(2, 2, 9, 8, generator=generator, count=2)
    q, k, v = (t.bfloat16() for t in (q, k, v))
    with AttentionAudit() as seen, torch.autocast("cpu"):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    logits = q.float() @ k.float().repeat_interleave(2, dim=1).mT / 8**0.5
    assert seen.records[0].max_logit == pytest.approx(float(logits.abs().max()), rel=1e-5)


def test_entries_that_are_not_finite_are_reported(generator):
    q, k, v = tensors(1, 1, 5, 4, generator=generator)
    q[0, 0, 0, 0] = math.nan
    with AttentionAudit() as seen:
        F.scaled_dot_product_attention(q, k, v)
    assert math.isnan(seen.records[0].max_q)
    assert math.isnan(seen.records[0].max_logit)


def test_degree_estimate_is_the_first_that_meets_the_tolerance():
    for bound in (0.0, 0.1, 1.0, 4.0):
        degree = audit.estimate_degree(bound, 1e-3)
        assert exp_polynomial(bound, degree).error_bound <= 5e-4
        assert degree == 0 or exp_polynomial(bound, degree - 2).error_bound > 5e-4
    assert audit.estimate_degree(30.0, 1e-3) is None
    assert audit.estimate_degree(1e6, 1e-3) is None


@pytest.mark.parametrize(("norm", "fast"), [(0.3, True), (3.0, False)])
def test_estimates_foretell_what_almost_linear_does(norm, fast, generator):
    q, k, v = tensors(1, 1, 2048, 4, generator=generator)
    with AttentionAudit() as seen:
        F.scaled_dot_product_attention(norm * q, norm * k, v)
    with almost_linear(1e-3) as report:
        F.scaled_dot_product_attention(norm * q, norm * k, v)
    (record,), (done,) = seen.records, report.records
    assert (record.predicted_speedup > 1) == (done.method != "exact") == fast
    if fast:
        assert done.rank / 2 <= record.rank <= 2 * done.rank
    else:
        assert record.rank is None


# --- models -----------------------------------------------------------------------------------------------------


def encoder_layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def multihead():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = layer

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    return Layer()


@pytest.mark.parametrize("make", [multihead, encoder_layer])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_torch_layers_are_seen_in_every_mode(make, train, grad, generator):
    model, x = make().train(train), torch.randn(3, 12, 16, generator=generator)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        with AttentionAudit() as seen:
            output = model(x)
    assert [record.shape for record in seen.records] == [(3, 2, 12, 8)]
    assert not seen.unseen
    assert output.requires_grad == expected.requires_grad
    torch.testing.assert_close(output, expected)  # the fused path rounds differently


def test_gradients_are_those_of_the_model(generator):
    model, x = encoder_layer(), torch.randn(3, 12, 16, generator=generator)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for context in (AttentionAudit(), almost_linear(1e-3)):
        with context:
            loss = model(x).square().sum()
        assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), expected))
    assert context.records[0].reason == "a gradient is required"


SMALL = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}


def dit(sample_size=8, **sizes):
    torch.manual_seed(0)
    sizes = SMALL | {"sample_size": sample_size, "norm_num_groups": 4, "num_embeds_ada_norm": 10} | sizes
    model = DiTTransformer2DModel(**sizes).eval()
    x = torch.randn(2, sizes["in_channels"], sample_size, sample_size)
    return lambda: model(x, timestep=torch.tensor([3, 4]), class_labels=torch.tensor([1, 2])).sample, model


def pixart():
    torch.manual_seed(0)
    model = PixArtTransformer2DModel(
        **SMALL, out_channels=8, caption_channels=12, cross_attention_dim=16, use_additional_conditions=False
    ).eval()
    x, text, mask = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12), torch.ones(2, 5)
    call = {"encoder_hidden_states": text, "encoder_attention_mask": mask, "timestep": torch.tensor([3, 4])}
    conditions = {"resolution": None, "aspect_ratio": None}
    return lambda: model(x, **call, added_cond_kwargs=conditions).sample, model


def flux():
    """Its attention goes through diffusers' own dispatcher."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    ).eval()
    call = {"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 5, 12)}
    call |= {"pooled_projections": torch.randn(2, 6), "timestep": torch.tensor([0.3, 0.4])}
    call |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
    return lambda: model(**call).sample, model


@pytest.mark.parametrize(("make", "calls"), [(dit, 2), (pixart, 4), (flux, 3)])
def test_every_attention_of_diffusers_models_is_seen(make, calls):
    forward, _ = make()
    with torch.no_grad():
        expected = forward()
        with AttentionAudit() as seen:
            output = forward()
    assert len(seen.records) == calls
    assert not seen.unseen
    assert torch.equal(output, expected)


def test_the_largest_logit_of_a_dit_is_the_hand_computation():
    forward, model = dit()
    projections = {}
    for name in ("to_q", "to_k"):
        layer = getattr(model.transformer_blocks[1].attn1, name)
        layer.register_forward_hook(lambda module, inputs, out, name=name: projections.__setitem__(name, out))
    with torch.no_grad(), AttentionAudit() as seen:
        forward()
    q, k = (projections[name].unflatten(-1, (2, 8)).transpose(1, 2) for name in ("to_q", "to_k"))
    assert seen.records[1].max_logit == pytest.approx(float((q @ k.mT).abs().max()) / 8**0.5, abs=1e-5)


def test_masks_of_cross_attention_are_named():
    forward, _ = pixart()
    with torch.no_grad(), AttentionAudit() as seen:
        forward()
    obstacles = [record.obstacle for record in seen.records]
    assert obstacles.count("mask") == 2
    assert obstacles.count("") == 2
    assert all(r.predicted_speedup == 1 and r.rank is None for r in seen.records if r.obstacle)


def test_a_function_imported_by_name_is_seen_once(generator):
    q, k, v = tensors(1, 2, 9, 4, generator=generator)
    with AttentionAudit() as seen:
        output = imported_by_name(q, k, v)
    assert len(seen.records) == 1
    assert torch.equal(output, imported_by_name(q, k, v))


def test_compiled_models_are_seen(generator):
    q, k, v = tensors(1, 2, 9, 4, generator=generator)
    compiled = torch.compile(lambda *qkv: F.scaled_dot_product_attention(*qkv), backend="eager")
    compiled(q, k, v)
    with AttentionAudit() as seen:
        compiled(q, k, v)
    assert len(seen.records) == 1


# --- what is not seen -------------------------------------------------------------------------------------------


def test_weights_computed_by_torch_itself_are_named(generator):
    layer, x = nn.MultiheadAttention(16, 2), torch.randn(12, 3, 16, generator=generator)
    with AttentionAudit() as seen:
        layer(x, x, x)
        layer(x, x, x)
    assert not seen.records
    assert list(seen.unseen.values()) == [2]
    assert "need_weights=True on (12, 3, 16)" in str(seen)


def test_a_softmax_of_ones_own_is_named(generator):
    q, k, _ = tensors(2, 9, 4, generator=generator)
    with AttentionAudit() as seen:
        (q @ k.mT).softmax(-1)
        torch.softmax(q @ k.mT, -1)
        F.softmax(q @ k.mT, -1)
    assert not seen.records
    assert "3 x: softmax of (2, 9, 9)" in str(seen)


def test_empty_attention_is_named(generator):
    q, k, v = tensors(2, 9, 4, generator=generator)
    with AttentionAudit() as seen:
        assert F.scaled_dot_product_attention(q[:, :0], k, v).shape == (2, 0, 4)
    assert not seen.records
    assert "empty" in str(seen)


def test_a_model_without_attention_is_told_so(generator):
    with AttentionAudit() as seen:
        nn.Linear(3, 3)(torch.randn(3))
    assert "no softmax attention" in str(seen)
    assert seen.table().empty
    with almost_linear(1e-3) as report:
        nn.Linear(3, 3)(torch.randn(3))
    assert "no softmax attention" in str(report)


# --- contexts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [AttentionAudit, almost_linear])
def test_everything_is_put_back_after_an_exception(context):
    def fail():
        assert not is_clean()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), context():
        fail()


def test_errors_of_the_model_stay_its_own(generator):
    q, k, v = tensors(2, 9, 4, generator=generator)
    with pytest.raises(RuntimeError) as expected:
        F.scaled_dot_product_attention(q, k[..., :3], v)
    for context in (AttentionAudit(), almost_linear()):
        with pytest.raises(RuntimeError) as found, context:
            F.scaled_dot_product_attention(q, k[..., :3], v)
        assert str(found.value) == str(expected.value)


def test_nested_contexts_are_refused_and_the_outer_one_goes_on(generator):
    q, k, v = tensors(2, 9, 4, generator=generator)
    with AttentionAudit() as outer:
        with pytest.raises(RuntimeError, match="AlmostLinear cannot be entered inside AttentionAudit"):
            almost_linear(1e-3).__enter__()
        F.scaled_dot_product_attention(q, k, v)
    assert len(outer.records) == 1


def test_a_context_entered_again_goes_on_with_its_records(generator):
    q, k, v = tensors(2, 9, 4, generator=generator)
    seen = AttentionAudit()
    for _ in range(2):
        with seen:
            F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert len(seen.records) == 2


def test_a_replacement_that_was_there_before_stays_in_charge(generator, monkeypatch):
    q, k, v = tensors(2, 9, 4, generator=generator)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda query, key, value: value)
        with AttentionAudit() as seen:
            assert F.scaled_dot_product_attention(q, k, v) is v
    assert len(seen.records) == 1


@pytest.mark.parametrize("tolerance", [0.0, -1e-3, math.inf, math.nan])
def test_tolerances_that_mean_nothing_are_refused(tolerance):
    for context in (AttentionAudit, almost_linear):
        with pytest.raises(ValueError, match="tolerance must be positive and finite"):
            context(tolerance)


def test_the_table_and_the_print_show_every_call(generator):
    q, k, v = tensors(1, 2, 9, 4, generator=generator)
    with AttentionAudit() as seen:
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    table = seen.table()
    assert list(table.obstacle) == ["", "causal"]
    assert list(table.max_logit) == [record.max_logit for record in seen.records]
    header, *rows = str(seen).splitlines()
    assert header.split() == list(table.columns)
    assert len(rows) == 2
    assert rows[1].endswith("causal")
    assert [list(line.get_ydata()) for line in seen.plot().lines][1] == list(table.max_logit)


# --- almost linear ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_calls_within_the_regime_are_fast_and_within_the_tolerance(dtype):
    q, k, v = easy(2048, dtype=dtype)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    with almost_linear(1e-3) as report, torch.no_grad():
        outputs = [F.scaled_dot_product_attention(q, k, v), imported_by_name(q, k, v)]
    for output, record in zip(outputs, report.records, strict=True):
        assert (output.shape, output.dtype) == (exact.shape, dtype)
        assert 0 < float((output - exact).abs().max()) <= 1e-3
        assert (record.fast_share, record.reason) == (1.0, "")
        assert record.sampled_error <= 5e-4
    assert str(report).startswith("2 of 2 calls in almost linear time")


def test_a_tolerance_that_the_dtype_cannot_hold_is_named():
    with almost_linear(1e-6) as report:
        F.scaled_dot_product_attention(*easy(2048))
    assert report.records[0].reason == "tolerance too fine for torch.float32"


def test_heads_are_judged_one_by_one():
    q, k, v = easy(2048)
    q = q * torch.tensor([30.0, 1.0])[:, None, None]
    with almost_linear(1e-3) as report:
        output = F.scaled_dot_product_attention(q, k, v)
    assert (report.records[0].method, report.records[0].fast_share) == ("mixed", 0.5)
    assert float((output - F.scaled_dot_product_attention(q, k, v)).abs().max()) <= 1e-3


def with_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[-2], k.shape[-2]).tril().bool())


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def dropped(q, k, v):
    torch.manual_seed(0)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def in_half_precision(q, k, v):
    return F.scaled_dot_product_attention(*(t.bfloat16() for t in (q, k, v)))


def under_autocast(q, k, v):
    with torch.autocast("cpu"):
        return F.scaled_dot_product_attention(q, k, v)


def differentiated(q, k, v):
    return F.scaled_dot_product_attention(q.clone().requires_grad_(), k, v)


def short(q, k, v):
    return F.scaled_dot_product_attention(q[..., :100, :], k, v)


def shared(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def not_finite(q, k, v):
    return F.scaled_dot_product_attention(q.masked_fill(q > 1, math.inf), k, v)


def enormous(q, k, v):
    return F.scaled_dot_product_attention(1e5 * q, k, v)


def outside_the_regime(q, k, v):
    return F.scaled_dot_product_attention(30 * q, k, v)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (with_mask, "mask"),
        (causal, "causal"),
        (dropped, "dropout"),
        (in_half_precision, "less than single precision"),
        (under_autocast, "less than single precision"),
        (differentiated, "a gradient is required"),
        (short, "too short to gain"),
        (shared, "shared"),
        (not_finite, "not finite"),
        (enormous, "logits far too large"),
        (outside_the_regime, "no rank worth its cost meets the tolerance"),
    ],
)
def test_elsewhere_the_output_is_the_models_own_and_the_reason_is_given(call, reason):
    q, k, v = easy(2048)
    expected = call(q, k, v)
    with almost_linear(1e-3) as report:
        output = call(q, k, v)
    (record,) = report.records
    assert record.method == "exact"
    assert reason in record.reason
    assert (output.dtype, output.requires_grad) == (expected.dtype, expected.requires_grad)
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


def test_a_dit_with_small_logits_is_sped_up():
    forward, _ = dit(64, patch_size=1, attention_head_dim=4, num_layers=1)
    with torch.no_grad():
        exact = forward()
        with almost_linear(1e-3) as report:
            output = forward()
    assert [(record.shape, record.fast_share) for record in report.records] == [((2, 2, 4096, 4), 1.0)]
    assert 0 < float((output - exact).abs().max()) <= 1e-2


# --- planted faults ---------------------------------------------------------------------------------------------


def without_scale(q, k, scale, right=audit.largest_logits):
    return right(q, k, 1.0)


def first_block_only(q, k, scale, right=audit.largest_logits):
    return right(q[:, :10], k, scale)


@pytest.mark.parametrize("wrong", [without_scale, first_block_only])
def test_the_chapter_refuses_wrong_logits(wrong, rejects):
    rejects("5-design", "section-5", {"ditbook.audit.largest_logits": wrong})


def test_the_chapter_refuses_a_context_that_leaves_its_hook(rejects, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", imported_by_name)  # put back when the test ends
    leave = audit.AttentionHook.__exit__

    def forgetful(self, *exception):
        hooked = F.scaled_dot_product_attention
        leave(self, *exception)
        F.scaled_dot_product_attention = hooked

    rejects("5-design", "section-5", {"ditbook.audit.AttentionHook.__exit__": forgetful})


def test_the_chapter_refuses_a_fast_method_that_forgets_the_mask(rejects):
    rejects("5-design", "section-5", {"ditbook.audit.Call.obstacle": ""})
