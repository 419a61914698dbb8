"""Batched generation from prompts of unequal lengths, a token a step, in buffers that are allocated once.

Rows are padded on the right: a causal prompt never sees padding, and a step writes each row's key and value at the
row's own length and attends to as many. So every step computes the same shapes, and can be one CUDA graph.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .cache import KVCache
from .generate import check_sampling, draw
from .gpt import GPT, Block

# (q (B, H, 1, D), k, v (B, H, room, D), lengths int32 (B,), *, scale) -> (B, H, 1, D); q sees the first `length` keys
AttendFn = Callable[..., Tensor]


def attend_masked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """Attend with PyTorch's attention and a mask, on any device."""
    seen = torch.arange(k.size(2), device=k.device) < lengths[:, None]  # (B, room)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=scale)


def alone(model: GPT) -> str | None:
    """The model's settings, as text, that need sequences to be generated one at a time; None if there is none."""
    document = [] if model.config.document_end is None else ["document_end"]
    return ", ".join([*document, *model.config.switches]) or None


class Decoder:
    """The state of a batch in generation: each row's cached keys and values, and its length.

    attend: computes a step's attention; `kernels.flash.decode.decode_attention` is one for a GPU.
    cuda_graph: replay a step as a CUDA graph, so that the host launches once and not dozens of times.
    """

    def __init__(
        self, model: GPT, batch: int, room: int, attend: AttendFn = attend_masked, *, cuda_graph: bool = False
    ):
        if reason := alone(model):
            raise ValueError(f"with {reason}, generate one sequence at a time")
        device = model.wte.weight.device
        self.model, self.attend, self.room, self.cuda_graph = model, attend, room, cuda_graph
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)  # tokens that a row holds
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)  # of the next step
        self.rows = torch.arange(batch, device=device)
        self.k: list[Tensor] = []  # of each layer, (B, H, room, D), allocated at the first read
        self.v: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)

    @torch.no_grad()
    def read(self, rows: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        """Start these rows (int64 (R,)) with prompts of 1 to `room` tokens; logits (R, vocab_size) after them."""
        lengths = torch.tensor([len(each) for each in prompts], device=self.rows.device)
        tokens = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)  # (R, T)
        cache = KVCache(tokens.size(1))
        hidden = self.model.hidden(tokens, cache=cache)
        if not self.k:
            k = cache.k[0]
            shape = (len(self.rows), k.size(1), self.room, k.size(3))
            self.k, self.v = ([k.new_zeros(shape) for _ in cache.k] for _ in range(2))
        for layer in cache.k:
            self.k[layer][rows, :, : tokens.size(1)] = cache.k[layer]
            self.v[layer][rows, :, : tokens.size(1)] = cache.v[layer]
        self.lengths[rows] = lengths.to(torch.int32)
        return self.model.logits(hidden[torch.arange(len(rows), device=rows.device), lengths - 1])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token (B,) to each row; logits (B, vocab_size) after it. A full row overwrites its last token."""
        self.tokens.copy_(tokens)
        if not self.cuda_graph:
            return self._step()
        self.graph = self.graph or self._capture()
        self.graph.replay()
        return self.logits

    def _step(self) -> Tensor:
        model, place = self.model, self.lengths.clamp(max=self.room - 1)  # of the new token
        x = model.wte(self.tokens) + model.wpe(place)  # (B, C)
        for layer, block in enumerate(cast(list[Block], list(model.h))):
            attn = block.attn
            qkv = attn.c_attn(block.ln_1(x)).view(len(x), 3, attn.n_head, attn.head_dim)
            q, k, v = qkv.unbind(1)  # (B, H, D)
            self.k[layer][self.rows, :, place] = k
            self.v[layer][self.rows, :, place] = v
            out = self.attend(q[:, :, None], self.k[layer], self.v[layer], place + 1, scale=attn.scale)
            x = x + attn.c_proj(out.flatten(1))
            x = x + block.mlp(block.ln_2(x))
        self.lengths.copy_(place + 1)
        return model.logits(model.ln_f(x))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record a step. The warm-up steps that torch wants before a capture write only what the replay writes."""
        before = self.lengths.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.lengths.copy_(before)
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._step()
        self.lengths.copy_(before)
        return graph


@torch.no_grad()
def generate_batch(
    model: GPT,
    prompts: Sequence[Tensor],
    n: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    end_token: int | None = None,
    never: Tensor | None = None,
    attend: AttendFn = attend_masked,
    cuda_graph: bool = False,
) -> list[Tensor]:
    """Continue prompts, each int64 (length,), by up to n tokens, ending with end_token if drawn; prompts included.

    ValueError for a model that is `alone`.

    The other arguments are `generate`'s. A row's window slides as there; at temperature 0 its tokens are the same.
    attend, cuda_graph: see `Decoder`.
    """
    check_sampling(n, temperature, top_k)
    if not len(prompts) or any(each.dim() != 1 or not len(each) for each in prompts):
        raise ValueError("prompts must be 1-d tensors of at least one token, and at least one of them")
    generator = generator or torch.Generator().manual_seed(0)
    seq_len, was_training = model.config.seq_len, model.training
    texts, ended = [list(each.tolist()) for each in prompts], [False] * len(prompts)
    longest = max(len(text) for text in texts)
    decoder = Decoder(model, len(texts), min(seq_len, longest + n), attend, cuda_graph=cuda_graph)
    device = decoder.rows.device
    model.eval()
    try:
        logits = decoder.read(decoder.rows, [each[-seq_len:].to(device) for each in prompts])
        held = [min(len(text), seq_len) for text in texts]
        for step in range(n):
            token = draw(logits, temperature, top_k, generator, never)
            for row, drawn in enumerate(token.tolist()):
                if not ended[row]:
                    texts[row].append(drawn)
                    ended[row] = drawn == end_token
            if all(ended) or step == n - 1:
                break
            logits = decoder.step(token)
            full = [row for row, length in enumerate(held) if length == seq_len and not ended[row]]
            held = [min(length + 1, seq_len) for length in held]
            if full:  # learned positions cannot slide: the row restarts from its newer half
                newer = [torch.tensor(texts[row][-max(1, seq_len // 2) :], device=device) for row in full]
                rows = torch.tensor(full, device=device)
                logits = logits.index_copy(0, rows, decoder.read(rows, newer))
                for row in full:
                    held[row] = max(1, seq_len // 2)
    finally:
        model.train(was_training)
    return [torch.tensor(text, device=device) for text in texts]
