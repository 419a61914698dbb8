"""The fused head and loss against the same computation in float64, and against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from kernels.layers import FusedError
from kernels.layers import linear_cross_entropy as room
from kernels.layers.linear_cross_entropy import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, PADDED = 9000, 9024  # two steps of the kernel, the last one partly padding


def torchs(hidden, weight, targets, vocab_size):
    logits = F.linear(hidden, weight)[:, :vocab_size]
    total = F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, ignore_index=-1, reduction="sum"
    )
    return total / (targets != -1).sum().clamp(min=1)


def problem(dtype, rows=37, width=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(DEVICE, dtype)
    weight = (torch.randn(PADDED, width, generator=generator) * 0.3).to(DEVICE, dtype)
    targets = torch.randint(VOCAB, (rows,), generator=generator).to(DEVICE)
    targets[::5] = -1
    return hidden, weight, targets


def gradients(loss_fn, hidden, weight, targets, factor=1.0):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = loss_fn(hidden, weight, targets, VOCAB)
    (loss * factor).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loss_and_gradients_as_exact_as_torchs(dtype):
    hidden, weight, targets = problem(dtype)
    exact = gradients(torchs, hidden.double(), weight.double(), targets)
    ours = gradients(linear_cross_entropy, hidden, weight, targets)
    theirs = gradients(torchs, hidden, weight, targets)
    for name, x, ours_x, theirs_x in zip(("loss", "hidden", "weight"), exact, ours, theirs, strict=True):
        ulp = torch.finfo(ours_x.dtype).eps * x.abs().max()
        error, reference = (ours_x - x).abs().max(), (theirs_x - x).abs().max()
        assert error <= 2 * reference + 2 * ulp, name


def test_targets_may_be_strided_and_negative_targets_are_ignored():
    hidden, weight, targets = problem(torch.float32)
    wanted = gradients(linear_cross_entropy, hidden, weight, targets)
    targets[targets < 0] = -100  # as PyTorch's own losses have it
    strided = torch.stack([targets, targets + 1], 1)[:, 0]
    assert all(map(torch.equal, gradients(linear_cross_entropy, hidden, weight, strided), wanted))
    same = targets[1:2].expand(len(targets))
    assert linear_cross_entropy(hidden, weight, same, VOCAB) == linear_cross_entropy(
        hidden, weight, same.contiguous(), VOCAB
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_vocabulary_of_one_in_a_transposed_matrix(reduction):
    """Whose strides are (1, 1). Of a single token all is 0."""
    hidden, _, targets = problem(torch.float32)
    weight = torch.randn(hidden.shape[1], 1, device=DEVICE).T.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets.clamp(max=0), reduction=reduction).sum()
    (d_weight,) = torch.autograd.grad(loss, weight)
    assert not loss
    assert not d_weight.any()


@pytest.mark.parametrize("wrong", [VOCAB, PADDED, PADDED + 3, 2**40])
def test_a_too_large_target_makes_the_loss_nan_but_no_other_row_wrong(wrong):
    hidden, weight, targets = problem(torch.float32)
    _, right, _ = gradients(linear_cross_entropy, hidden, weight, targets)
    targets[2] = wrong
    loss, gradient, _ = gradients(linear_cross_entropy, hidden, weight, targets)
    assert loss.isnan()
    others = torch.arange(len(targets)) != 2
    assert torch.equal(gradient[others], right[others])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden": lambda x: x[None]}, r"hidden must be \(rows, width\) and weight .* got \(1, 37, 48\)"),
        ({"weight": lambda x: x[:, :40]}, r"got \(37, 48\) and \(9024, 40\)"),
        (
            {"targets": lambda x: x[:3]},
            r"targets must be int64 \(37,\), one per row of hidden, got .* \(3,\)",
        ),
        ({"targets": lambda x: x.float()}, r"targets must be int64 .* got torch.float32"),
        ({"targets": lambda x: x.to("meta")}, "targets is on meta, but hidden on"),
        ({"hidden": lambda x: x.double()}, r"^hidden is torch\.float64; fused layers take float32, bfloat16"),
        ({"hidden": lambda x: x.int()}, r"^hidden is torch\.int32"),
        ({"weight": lambda x: x.double()}, r"^weight is torch\.float64"),
        ({"weight": lambda x: x.to(torch.complex64)}, r"^weight is torch\.complex64"),
        ({"vocab_size": lambda x: PADDED + 1}, "vocab_size must be 1 to 9024, the rows of weight, got 9025"),
        ({"vocab_size": lambda x: 0}, "vocab_size must be 1 to 9024"),
        (
            {"bias": lambda x: torch.zeros(VOCAB)},
            r"bias must be \(9024,\), one per row of weight, got \(9000,\)",
        ),
        ({"reduction": lambda x: "batchmean"}, "reduction must be mean, sum or none, got 'batchmean'"),
        ({"label_smoothing": lambda x: 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        ({"z_loss": lambda x: -1.0}, "z_loss must be positive and finite, or 0 for none, got -1.0"),
        ({"softcap": lambda x: float("inf")}, "softcap must be positive and finite"),
        ({"softcap": lambda x: torch.ones(())}, "softcap must be a number of Python's, got Tensor"),
    ],
)
def test_arguments_of_wrong_shape_dtype_or_device_are_refused(change, told):
    inputs = dict(zip(("hidden", "weight", "targets"), problem(torch.float32), strict=True))
    inputs["vocab_size"] = VOCAB
    for name, alter in change.items():
        inputs[name] = alter(inputs.get(name))
    with pytest.raises(ValueError, match=told):
        linear_cross_entropy(**inputs)


@pytest.mark.gpu
def test_in_bf16_at_the_size_of_gpt2():
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(8192, 768, device=DEVICE, generator=generator).bfloat16()
    weight = torch.randn(50304, 768, device=DEVICE, generator=generator) * 0.02
    targets = torch.randint(50257, (8192,), device=DEVICE, generator=generator)
    with torch.autocast("cuda", torch.bfloat16):
        ours = gradients(lambda h, w, t, _: linear_cross_entropy(h, w, t, 50257), hidden, weight, targets)
        theirs = gradients(lambda h, w, t, _: torchs(h, w, t, 50257), hidden, weight, targets)
    exact = gradients(lambda h, w, t, _: torchs(h, w, t, 50257), hidden.double(), weight.double(), targets)
    for x, ours_x, theirs_x in zip(exact, ours, theirs, strict=True):
        assert (ours_x - x).norm() <= 1.5 * (theirs_x - x).norm() + 1e-6 * x.norm()


@pytest.mark.gpu
def test_the_full_logits_are_never_in_memory():
    hidden = torch.randn(65536, 768, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50304, 768, device=DEVICE, requires_grad=True)
    targets = torch.randint(50257, (65536,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets, 50257).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.25 * 2**30  # float32 logits alone would be 13 GB


@pytest.mark.parametrize(
    ("rows", "chunk_rows"), [(37, 10), pytest.param(300, 140, marks=pytest.mark.slow), (0, 10)]
)
def test_computing_in_chunks_does_not_change_the_result(monkeypatch, rows, chunk_rows):
    hidden, weight, targets = problem(torch.float32, rows)
    whole = gradients(linear_cross_entropy, hidden, weight, targets)
    monkeypatch.setattr(room, "CHUNK_BYTES", chunk_rows * PADDED * 4)
    for chunked, one in zip(gradients(linear_cross_entropy, hidden, weight, targets), whole, strict=True):
        torch.testing.assert_close(chunked, one)


def test_padding_has_no_probability_and_no_gradient():
    hidden, weight, targets = problem(torch.float32)
    _, _, d_weight = gradients(linear_cross_entropy, hidden, weight, targets)
    assert torch.equal(d_weight[VOCAB:], torch.zeros_like(d_weight[VOCAB:]))
    # Both without a gradient: with one the kernel is compiled into another, which on a GPU sums in another order.
    loss = linear_cross_entropy(hidden, weight, targets, VOCAB)
    weight[VOCAB:] = 100.0
    assert linear_cross_entropy(hidden, weight, targets, VOCAB) == loss


def test_padding_may_be_longer_than_the_vocabulary():
    hidden, weight, targets = problem(torch.float32)
    weight = torch.cat([weight, weight])
    loss, d_hidden, d_weight = gradients(linear_cross_entropy, hidden, weight, targets)
    short = gradients(linear_cross_entropy, hidden, weight[:PADDED], targets)
    torch.testing.assert_close((loss, d_hidden, d_weight[:PADDED]), short)
    assert not d_weight[VOCAB:].any()


def test_rows_with_negative_targets_have_no_loss_and_no_gradient():
    hidden, weight, targets = problem(torch.float32)
    _, d_hidden, _ = gradients(linear_cross_entropy, hidden, weight, targets)
    assert torch.equal(d_hidden[::5], torch.zeros_like(d_hidden[::5]))
    assert d_hidden[1].abs().max() > 0
    loss, d_hidden, d_weight = gradients(linear_cross_entropy, hidden, weight, torch.full_like(targets, -1))
    assert loss == 0
    assert not d_hidden.any()
    assert not d_weight.any()


def test_the_gradient_scales_with_the_loss():
    hidden, weight, targets = problem(torch.float32)
    _, once, _ = gradients(linear_cross_entropy, hidden, weight, targets)
    _, scaled, _ = gradients(linear_cross_entropy, hidden, weight, targets, factor=0.25)
    torch.testing.assert_close(scaled, once * 0.25)


def test_a_second_derivative_is_refused():
    hidden, weight, targets = problem(torch.float32)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets, VOCAB)
    with pytest.raises(
        FusedError, match=r"model\.loss=fused has no second derivative; use model\.loss=torch"
    ):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_forward_mode_gradients_are_refused_and_not_lost(name):
    inputs = dict(zip(("hidden", "weight", "targets"), problem(torch.float32), strict=True))
    with forward_ad.dual_level():
        assert linear_cross_entropy(**inputs, vocab_size=VOCAB).isfinite()  # none is asked for
        inputs[name] = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
        with pytest.raises(FusedError, match=r"has no forward-mode derivative; use model\.loss=torch"):
            linear_cross_entropy(**inputs, vocab_size=VOCAB)


def test_loss_scaling_keeps_small_gradients_in_fp16():
    """Scaled by 2^16 as a gradient scaler does, gradients that would vanish in fp16 must come through."""
    hidden, weight, targets = problem(torch.float16, rows=400)
    exact = gradients(torchs, hidden.double(), weight.double(), targets, factor=2.0**16)
    ours = gradients(linear_cross_entropy, hidden, weight, targets, factor=2.0**16)
    for x, ours_x in zip(exact[1:], ours[1:], strict=True):
        assert (ours_x - x).norm() <= 2e-3 * x.norm()


@pytest.mark.slow
def test_a_gradient_whose_sum_over_rows_overflows_fp16_is_right():
    hidden = torch.full((1500, 4), 100.0, dtype=torch.float16, device=DEVICE)
    weight = torch.randn(64, 4, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).half() * 1e-3
    weight.requires_grad_()
    targets = torch.zeros(1500, dtype=torch.int64, device=DEVICE)
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 64), weight)
    exact = weight.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(F.cross_entropy(hidden.double() @ exact.T, targets), exact)
    assert wanted.abs().max() * 1500 > torch.finfo(torch.float16).max
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_a_common_offset_of_the_logits_costs_no_accuracy(offset):
    hidden, weight, targets = problem(torch.float32)
    hidden[:, 0], weight[:, 0] = 1.0, offset
    _, _, found = gradients(linear_cross_entropy, hidden, weight, targets)
    logits = (hidden @ weight.T)[:, :VOCAB].double().requires_grad_()  # as rounded as the kernel reads them
    (d_logits,) = torch.autograd.grad(F.cross_entropy(logits, targets, ignore_index=-1), logits)
    wanted = d_logits.T @ hidden.double()
    assert (found[:VOCAB] - wanted).norm() <= 1e-6 * wanted.norm()


def test_huge_logits_stay_finite():
    hidden, weight, targets = problem(torch.float32)
    for x in gradients(linear_cross_entropy, hidden * 1e4, weight, targets):
        assert x.isfinite().all()


def test_no_gradients_are_computed_under_no_grad():
    hidden, weight, targets = problem(torch.float32)
    with torch.no_grad():
        loss, d_hidden, d_weight, _, _ = room._forward(hidden, weight, None, targets, VOCAB, False)
    torch.testing.assert_close(loss, torchs(hidden, weight, targets, VOCAB))
    assert d_hidden.numel() == d_weight.numel() == 0


def test_meta_tensors_give_meta_results_of_the_right_shape():
    hidden, weight, targets = (x.to("meta") for x in problem(torch.float32))
    loss, d_hidden, d_weight = gradients(linear_cross_entropy, hidden, weight, targets)
    assert (loss.shape, loss.dtype, loss.device.type) == ((), torch.float32, "meta")
    assert (d_hidden.shape, d_weight.shape) == (hidden.shape, weight.shape)


def test_the_operator_passes_opcheck_and_compiles_without_graph_breaks():
    hidden, weight, targets = problem(torch.float32, rows=8)
    hidden.requires_grad_()
    weight.requires_grad_()
    torch.library.opcheck(room._forward, (hidden, weight, None, targets, VOCAB, True))
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(hidden, weight, targets, VOCAB)
    torch.testing.assert_close(loss, torchs(hidden, weight, targets, VOCAB))
    bias = torch.randn(PADDED, device=DEVICE, requires_grad=True)
    operands, options = (hidden, weight, bias, targets, VOCAB), (0.1, 1e-4, 30.0)
    torch.library.opcheck(room._forward, (*operands, True, False, *options))
    torch.library.opcheck(room._rows_forward, (*operands, *options))
    each_row = {"bias": bias, "reduction": "none", "softcap": 30.0}
    losses = [loss(hidden, weight, targets, VOCAB, **each_row) for loss in (compiled, linear_cross_entropy)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), (hidden, weight, bias)) for each in losses))
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.shape == hidden.shape
