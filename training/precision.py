"""The dtype that a run computes in, and torch.compile and weight casts under autocast to it."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, compiler, nn
from torch.func import functional_call

from kernels import fusion
from kernels.versions import numbers_of
from model.gpt import Linear

from .config import Precision

_USERS_TAG: str = compiler.config.cache_key_tag


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of activations and matrix products."""
    if precision is Precision.auto:
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = Precision.bf16 if has_bf16 else Precision.fp32
    return {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}[
        precision
    ]


def compiled(
    model: nn.Module, dtype: torch.dtype, backend: str | Callable[..., Any] = "inductor"
) -> nn.Module:
    """torch.compile of a model that is called under autocast to dtype.

    Before PyTorch's pull request 181564 (in 2.13, not in 2.11) the key of its compiled graphs on disk lacked
    autocast's dtype: a bf16 run found the graph of an fp16 run of the same model, computed in fp16 without a gradient
    scaler, and ended at a loss of 2.97 instead of 2.85. There a tag keeps them apart; it belongs to the process, so
    call the model before compiling another for another dtype. Later versions get none: TorchInductor's workers do
    not learn of a tag, so tiles were stored under a key that no run looked up, each run timed them anew, and with
    2.15 a resumed run ended up to 7e-5 nats from the uninterrupted one (kernels/log/versions.md).
    """
    if numbers_of(torch.__version__) < (2, 13):  # read when the model is first called
        compiler.config.cache_key_tag = f"{_USERS_TAG}{dtype}"
    return fusion.compiled(model, backend=backend)


def cast_together(model: nn.Module, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The model for calls under autocast to dtype, the weights of its linear layers cast together, in a few launches.

    Autocast casts them one by one, and autograd their gradients: 96 launches in a micro-step of GPT-2 small, for
    which a GPU may wait. The bits are the same. All gradients arrive with the last: too late for DDP to overlap.
    """
    layers = {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, Linear)}
    weights = {name: each.weight for name, each in layers.items() if each.weight.requires_grad}
    if dtype is torch.float32 or not weights:
        return model

    def call(*tensors: Tensor, **named: Any) -> Tensor:
        cast = dict(zip(weights, _Cast.apply(dtype, *weights.values()), strict=True))
        return functional_call(model, cast, tensors, named, tie_weights=False)

    return call


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype, *weights):
        ctx.set_materialize_grads(False)
        return _cast(weights, dtype)

    @staticmethod
    def backward(ctx, *gradients):
        found = iter(_cast([each for each in gradients if each is not None], torch.float32))
        return None, *(each if each is None else next(found) for each in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = [torch.empty_like(each, dtype=dtype) for each in tensors]
    torch._foreach_copy_(cast, tensors)
    return tuple(cast)


def forget_compiled() -> None:
    """Drop what was compiled, and the CUDA graphs of it."""
    if "torch._dynamo" in sys.modules:  # whose import takes 2 s
        compiler.reset()
