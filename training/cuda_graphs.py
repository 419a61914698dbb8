"""A micro-step as CUDA graphs, so that a slow host does not keep the GPU waiting.

A step of GPT-2 small with 16 sequences a forward launches 3,700 kernels: with one H200 it took 158 ms, with
another 117. torch.compile's mode "reduce-overhead" records what a forward and a backward launch once, and replays it;
what is not compiled, torch.cuda.make_graphed_callables records. A replay writes where the recording wrote, so what
outlives a micro-step needs memory of its own: the gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernels import fusion
from kernels.layers.sums import sum_in_place, sum_in_product, summing
from kernels.versions import kernels_lack
from model.gpt import Embedding, Linear

from .config import ConfigError
from .distributed import World
from .parallel.config import ParallelConfig, Recompute, Shard
from .precision import compiled


def resolve_graphs(
    asked: bool | None,
    is_compiled: bool,
    ranks: World,
    parallel: ParallelConfig,
    *,
    documents: bool = False,
    gather_keys: bool = False,
    whole: bool = True,
) -> bool:
    """Whether to replay; null: a compiled model, where it can be done and pays (another may be under a debugger).
    Raises ConfigError when it is asked for and cannot.

    whole: attention does not cut what is compiled into several graphs, as one does that reads something on the host.

    On several GPUs torch.compile cuts a step's last micro-step where a bucket of gradients is full, so each piece is
    recorded, and the exchange runs between them. On two H200 a step took 122.6 ms for 171 to 245 without (GPT-2
    small, 131,072 tokens a step; results/nvidia-h200x2), because the host was too slow.

    The exchange of ranks that share a sequence is recorded with their kernels. With gathered keys, which short
    sequences have, a step over four H200s took 74 ms for 82 at 32 k tokens, and as long at 64 k and 128 k
    (results/nvidia-h200x4). A ring's only when asked for: over four H100s 64 k and 128 k took 5 and 3 % longer
    (results/nvidia-h100-80gb-hbm3x4). The host reads where packed documents begin, which no replay can.
    """
    lacking = None
    if ranks.device.type != "cuda":
        lacking = f"a CUDA device, not {ranks.device.type}"
    elif not is_compiled and (ranks.size > 1 or not whole):
        lacking = f"trainer.compile=true {'on several GPUs' if whole else 'with this attention'}"
    elif parallel.shard is not Shard.none:
        lacking = f"parallel.shard=none, not {parallel.shard.value}"
    elif parallel.context > 1 and documents:
        lacking = f"data.document_mask=false with parallel.context={parallel.context}"
    elif parallel.recompute is not Recompute.none:
        lacking = f"parallel.recompute=none, not {parallel.recompute.value}"
    if asked and lacking:
        raise ConfigError(f"trainer.cuda_graphs=true needs {lacking}; leave it out, or set it to false.")
    pays = is_compiled and (parallel.context == 1 or gather_keys)
    wanted = pays if asked is None else asked
    return lacking is None and wanted


class Local(nn.Module):
    """The model where no exchange waits for gradients: they may be summed, and DDP's buckets do not cut it.

    It has code of its own, since torch.compile keeps what it compiled by the code that is called, and takes it
    without asking for DDP: of the model and its DDP in one mode, whichever came first would serve both (torch 2.13).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor, **named: torch.Tensor | None) -> torch.Tensor:
        with summing():
            return self.model(*tensors, **named)


def compiled_to_graphs(model: nn.Module, dtype: torch.dtype, *, whole: bool = True) -> nn.Module:
    """`with_sums`, compiled and replayed."""
    return replayed(with_sums(model, dtype, whole=whole), dtype)


def with_sums(model: nn.Module, dtype: torch.dtype, *, whole: bool = True) -> Local:
    """The model without an exchange. What is trained gets a gradient of zeros, to be added to.

    Our linear layers' products, loss and embedding add to them themselves, with fewer roundings: not the bits of a
    run without replays.

    whole: it is one graph, in which the loss and the embedding may add to one weight's gradient. Of several graphs
        the embedding's finds that changed by the loss's, which autograd refuses.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    if kernels_lack() is None:
        from kernels.layers.linear import linear

        for layer in model.modules():
            if isinstance(layer, Linear) and layer.product is linear and layer.weight.requires_grad:
                sum_in_product(layer.weight, dtype)
            elif whole and isinstance(layer, Embedding) and layer.weight.requires_grad:
                sum_in_place(layer.weight)
    return Local(model)


def replayed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As `precision.compiled`, with replays. Its gradients are to be there when it is called."""
    compiled(model, dtype)  # for an older torch's cache tag; it compiles nothing before the first call
    return fusion.compiled(model, mode="reduce-overhead")


class _Loss(nn.Module):
    """A loss and the model whose parameters it depends on, for `make_graphed_callables`."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.loss(*tensors)


def recorded(
    model: nn.Module, loss: Callable[..., Tensor], like: Sequence[Tensor], pool: Any = None
) -> Callable[..., Tensor]:
    """A loss that is not compiled, its forward and its backward recorded; for `add_gradients`.

    Args:
        model: as `with_sums` prepared it; its gradients are zeros, and are so again afterwards.
        loss: called with tensors of the shapes of `like`. It enters autocast itself, so that each replay casts the
            weights anew. It must not wait for the device: torch raises a RuntimeError then.
        pool: of `torch.cuda.graph_pool_handle`, for several whose steps take turns.
    """
    replay = torch.cuda.make_graphed_callables(
        _Loss(model, loss), tuple(like), allow_unused_input=True, pool=pool
    )
    # The runs before the recording, by which kernels are compiled, added to what is summed.
    torch._foreach_zero_([each.grad for each in model.parameters() if each.grad is not None])
    return replay


def add_gradients(loss: Tensor, model: nn.Module) -> None:
    """As loss.backward() without hooks: autograd would start a kernel for each parameter, this starts a few."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    new = torch.autograd.grad(loss, parameters, allow_unused=True)  # None: summed by its product
    pairs = [(parameter.grad, d) for parameter, d in zip(parameters, new, strict=True) if d is not None]
    torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
