"""A micro-step as CUDA graphs, so that a slow host does not keep the GPU waiting.

A step of GPT-2 small with 16 sequences a forward launches 3,700 kernels: with one H200 it took 158 ms, with
another 117. torch.compile's mode "reduce-overhead" records once what a forward and a backward launch, and replays it;
torch.cuda.make_graphed_callables does so for a model that is not compiled. A replay writes where the recording wrote,
so what outlives a micro-step, the gradients, needs memory of its own.
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
    """Whether to use CUDA graphs. asked: trainer.cuda_graphs; None: for a compiled model only (another may be under a
    debugger), where they are possible and faster. Raises ConfigError when they are asked for and impossible.

    whole: attention causes no graph break in what is compiled, as one does that reads tensors on the host.

    On several GPUs torch.compile cuts a step's last micro-step where a bucket of gradients is full, so each piece is
    recorded, and the exchange runs between them. On two H200 a step took 122.6 ms, and 171 to 245 without replays,
    because the host was too slow (GPT-2 small, 131,072 tokens a step; results/nvidia-h200x2).

    The exchange of ranks that share a sequence is recorded with their kernels. With gathered keys, as short sequences
    have them, a step on four H200s took 74 ms at 32 k tokens, and 82 without replays; at 64 k and 128 k both took the
    same (results/nvidia-h200x4). A ring is recorded only when asked for: on four H100s 64 k and 128 k took 5 and 3 %
    longer (results/nvidia-h100-80gb-hbm3x4). The host reads where packed documents begin, which no replay can.
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
    """The model without gradient exchange: kernels may add to gradients in place, and no DDP bucket splits its graph.

    A module with a forward of its own, since torch.compile caches by the code object that is called, and does not
    check for DDP: of the model and its DDP form in one mode, whichever came first would serve both (torch 2.13).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor, **named: torch.Tensor | None) -> torch.Tensor:
        with summing():
            return self.model(*tensors, **named)


def compiled_to_graphs(model: nn.Module, dtype: torch.dtype, *, whole: bool = True) -> nn.Module:
    """`with_sums` under torch.compile, with CUDA graphs."""
    return replayed(with_sums(model, dtype, whole=whole), dtype)


def with_sums(model: nn.Module, dtype: torch.dtype, *, whole: bool = True) -> Local:
    """The model as a `Local`, each trained parameter with a gradient of zeros that every backward adds to.

    Our linear layers, loss and embedding add to these in their own kernels, with fewer roundings, so the bits are not
    those of a run without CUDA graphs.

    whole: no graph break, so the loss and the embedding may both add to the tied weight's gradient. With several
        graphs the embedding's finds that gradient changed by the loss's, which autograd refuses.
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
    """`precision.compiled` with CUDA graphs. Gradients must be allocated before the result is called."""
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
    """An uncompiled loss, its forward and backward captured as CUDA graphs. `add_gradients` takes its gradients.

    Args:
        model: as `with_sums` prepared it; its gradients are zeros, and are zeros again afterwards.
        loss: called with tensors of the shapes of `like`. It enters autocast itself, so that each replay casts the
            weights anew. It must not wait for the device: torch raises a RuntimeError then.
        pool: from `torch.cuda.graph_pool_handle`, for several losses whose steps take turns.
    """
    replay = torch.cuda.make_graphed_callables(
        _Loss(model, loss), tuple(like), allow_unused_input=True, pool=pool
    )
    # The warm-up runs before the capture, which compile the kernels, have added to the gradients.
    torch._foreach_zero_([each.grad for each in model.parameters() if each.grad is not None])
    return replay


def add_gradients(loss: Tensor, model: nn.Module, graphs: bool = False) -> None:
    """As loss.backward(), but it adds to existing gradients at the end, all in a few launches; autograd launches one
    per parameter. So it holds all new ones until then, and runs no post-accumulate-grad hooks.

    Without graphs in the calling thread: autograd's own thread waits for Python's lock at each of our operators.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.autograd.set_multithreading_enabled(graphs):
        if any(parameter.grad is None for parameter in parameters):
            return loss.backward()  # which launches nothing where there is nothing to add to
        new = torch.autograd.grad(loss, parameters, allow_unused=True)  # None: summed by its product
    pairs = [(parameter.grad, d) for parameter, d in zip(parameters, new, strict=True) if d is not None]
    torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
