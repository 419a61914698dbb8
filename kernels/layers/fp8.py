"""The head's matrix products in 8 bits, two of its three: `linear_cross_entropy(fp8=True)`.

    logits     hidden (e4m3) @ weight (e4m3).T
    d_hidden   d_logits (e5m2) @ weight (e4m3)
    d_weight   d_logits.T @ hidden, both in 16 bits: an optimizer sums it over steps, and nothing it sums is 8 bits

e4m3 has one bit of fraction more, e5m2 the range: gradients of logits lie between 1 and the smallest probability that
matters, and need no scale that depends on them. On Hopper and later these products take half of the time.
"""

import torch
from torch import Tensor

from .softmax_gradient import LOW_SCALE

GRADIENT = torch.float8_e5m2
LARGEST = torch.finfo(torch.float8_e4m3fn).max


SAMPLE = 2048  # targets whose weights' mean is taken off all


class HeadIn8Bits:
    """hidden (rows, width), weight (padded vocabulary, width), each in 8 bits with one scale for all of it.

    Before, hidden loses the mean of its rows, m, and weight that of rows that are targets, w: trained ones have most of
    themselves in common, and rounding that would cost what tells them apart its bits. With h and v for a row of each,

        h . v = (h - m) . (v - w) + m . (v - w) + h . w

    The second is a bias of each token, in 16 bits. The third is the same for all tokens: a softmax does not see it, and
    in d_hidden, whose coefficients then sum to 0, w counts for nothing.

    alike: so it is; else, with a softcap or a z-loss, which see it, weight keeps w.
    A product's second operand must lie by columns, so there are two copies of weight: 39 MB each for GPT-2's.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, alike: bool) -> None:
        self.dtype = hidden.dtype
        middle = hidden.mean(0)
        self.hidden, self.hidden_scale = rounded(hidden - middle)
        if alike:
            weight = weight - weight[targets[:SAMPLE].clamp(0, vocab_size - 1)].mean(0, dtype=torch.float32)
        self.bias = (weight.float() @ middle.float()).to(self.dtype)
        self.by_rows, self.weight_scale = rounded(weight.to(self.dtype))
        self.by_columns = self.by_rows.T.contiguous()
        self.gradient_scale = torch.full_like(self.weight_scale, 1 / LOW_SCALE.value)

    def logits(self, rows: slice) -> Tensor:
        """(rows, padded vocabulary), in hidden's dtype; if alike, each row less a number of its own."""
        # width terms: what Hopper's fast sums lose, which keep about 14 bits, is far below what 8 bits have.
        return torch._scaled_mm(
            self.hidden[rows], self.by_rows.T, self.hidden_scale, self.weight_scale,
            bias=self.bias, out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip

    def d_hidden(self, gradient: Tensor, out: Tensor) -> None:
        """Write d_hidden (rows, width) to out. gradient: LOW_SCALE times that of the logits, in GRADIENT."""
        # As many terms as the vocabulary, most of them small beside the target's: fast sums would lose those.
        torch._scaled_mm(
            gradient, self.by_columns.T, self.gradient_scale, self.weight_scale,
            out_dtype=self.dtype, use_fast_accum=False, out=out,
        )  # fmt: skip


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3, and the float32 scale by which to multiply it. A power of 2, so that x is rounded once."""
    largest = torch.linalg.vector_norm(x, float("inf")).float()
    # At most what x's dtype holds, so of zeros, too. A NaN makes the scale NaN, inf makes it inf, and the loss NaN.
    power = torch.log2(LARGEST / largest.clamp(min=LARGEST / torch.finfo(x.dtype).max)).floor()
    return (x * torch.exp2(power)).to(torch.float8_e4m3fn), torch.exp2(-power)
