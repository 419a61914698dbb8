"""Time and peak memory of attention against length: FlashAttention Figure 3 and Tables 9-21, FlashAttention-2
Figures 4-7, FlashAttention-3 Figures 5-6, and the shape of GPT-2 small.

Every backend in `kernels.ATTENTION` that supports a workload takes part, the papers' baseline (`standard.py`), and
what is in `peers.py`.
First each one's results are checked against float64: out and all gradients at up to 1024 tokens, and rows of out and
dq at the full length, where its peak memory is measured too. Then those that passed take turns in one process to be
timed. The forward is the one used in training: it saves what the backward needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels import ATTENTION, get_attention, history

from . import peers, timing
from .attention_figures import draw
from .attention_verdicts import judge
from .common import ReproduceError
from .experiment import Options, Sample, Timing
from .peers import MASK_NAMES, Attend
from .standard import NAME as STANDARD
from .standard import score_bias

__all__ = ["TINY", "Settings", "draw", "judge", "run"]

DROPOUT = 0.1
PADDED, DROPPED = "padding", "padding+dropout"
# They store the length x length scores; the most memory first.
HOLD_SCORES = ("sdpa_math", "naive", peers.COMPILED, STANDARD, peers.CUT, peers.STORED_P)

# The longest at which they take part, unless `backends` names them. Beyond, they took three quarters of the time of
# the whole experiment on an H200, and nothing is judged of them: there, standard attention is faster than naive.
LONGEST = {
    **dict.fromkeys(("naive", "sdpa_math"), 4096),
    **dict.fromkeys(("sdpa", "sdpa_flash", "sdpa_efficient", peers.CUT, peers.DETERMINISTIC), 16384),
}
SELECTION = NEEDED = ("figures", "lengths")


@dataclass(frozen=True)
class Settings(Timing):
    dtype: str = "bfloat16"
    # Names in kernels.ATTENTION and in peers.MAKE; if empty, all of them.
    backends: tuple[str, ...] = ()
    # fa1: batch 16, 8 heads, d 64 (Tables 9-21). fa2: 16k tokens, hidden 2048, 512 to 16k long. gpt2: 12 heads, 1024,
    # causal. stored: batch 64, 16 heads, mask and dropout, to 512 tokens (Table 7). beyond: as fa2, but
    # shorter, or one longer sequence, as in no paper.
    figures: tuple[str, ...] = ("fa1", "gpt2", "fa2", "stored", "beyond")
    # The most useful first.
    lengths: tuple[int, ...] = (1024, 2048, 4096, 512, 8192, 256, 128, 16384, 32768, 65536)
    # Compiled again for every shape, which takes longer than timing all the others: timed only at GPT-2's shapes and
    # where a claim is judged, fa1's and fa2's from 1024 to 4096 tokens.
    compiled: tuple[str, ...] = ("flex", peers.COMPILED, peers.FLEX_MASK)
    # Those of kernels.history are up to 157 times as slow as flash on an H200; chunked takes 31 s a call at 65536
    # tokens. So they are timed only at fa1's shape and up to 4096 tokens, unless `backends` names them.
    old: tuple[str, ...] = history.NAMES


# In float16, so that flash runs on a CPU too: Triton's interpreter gets bfloat16 products wrong.
TINY = Settings(
    dtype="float16", backends=(STANDARD, "flash", "sdpa", *peers.APPROXIMATE), lengths=(64,), processes=1, rounds=1,
    seconds=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    figure: str
    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    mask: str = "plain"

    @property
    def bytes(self) -> int:
        """Size of q, k, v and the gradient of the output, in 16 bits."""
        return 4 * 2 * self.batch * self.heads * self.length * self.head_dim

    @property
    def features(self) -> dict[str, object]:
        """The features that a backend must support, as arguments of `resolve_attention`."""
        features: dict[str, object] = {}
        if self.mask in (PADDED, DROPPED):
            features["kv_lengths"] = torch.ones(self.batch, dtype=torch.int32)
        if self.mask == DROPPED:
            features["dropout_p"] = DROPOUT
        return features


def workloads(settings: Settings, tiny: bool) -> list[Workload]:
    """The workloads to run, the most useful first."""
    batch, heads, head_dims, tokens, hidden = (16, 8, (64, 128, 256), 16384, 2048)
    gpt2 = [(16, 12, 1024, 64), (64, 12, 1024, 64)]
    if tiny:
        batch, heads, head_dims, tokens, hidden = (2, 1, (32,), 64, 32)
        gpt2 = [(1, 2, settings.lengths[0], 32)]
    found = []
    for place, length in enumerate(settings.lengths):
        for mask in MASK_NAMES:
            if mask == "plain" or length <= 8192:
                found.append(Workload("fa1", batch, heads, length, head_dims[0], False, mask))
        for head_dim in head_dims:
            for causal in (True,) if tiny else (True, False):
                figure = "fa2" if (64 if tiny else 512) <= length <= tokens else "beyond"
                shape = (max(1, tokens // length), hidden // head_dim, length, head_dim)
                found.append(Workload(figure, *shape, causal))
        if length <= 512:
            found.append(Workload("stored", 4 * batch, 2 * heads, length, head_dims[0], False, DROPPED))
        if place == min(3, len(settings.lengths) - 1):
            found += [Workload("gpt2", *shape, True) for shape in gpt2]
    return [each for each in found if each.figure in settings.figures]


class Inputs:
    """New random tensors for a workload, each (batch, heads, length, head_dim)."""

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
        shape = (workload.batch, workload.heads, workload.length, workload.head_dim)
        self.workload = workload
        self.qkv = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        self.d_out = torch.randn(shape, device=device, dtype=dtype)
        self.kv_lengths = None
        if workload.mask in (PADDED, DROPPED):  # as in the paper: random, at most 20 tokens shorter
            # Seeded, to be the same in every run: the counted traffic depends on them, by 1 % at 1024 tokens.
            seeded = torch.Generator().manual_seed(0)
            lengths = torch.randint(
                workload.length - 20, workload.length + 1, (workload.batch,), generator=seeded
            )
            self.kv_lengths = lengths.to(device, torch.int32)
        self.dropout_p = DROPOUT if workload.mask == DROPPED else 0.0
        self._bias: torch.Tensor | None = None

    def bias(self) -> torch.Tensor | None:
        """The mask as a tensor (`score_bias`), made once: some take it in that form."""
        if self._bias is None:
            self._bias = score_bias(self.qkv[0].detach(), self.workload.causal, self.kv_lengths)
        return self._bias

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype, as new autograd leaves."""
        other = Inputs.__new__(Inputs)
        other.__dict__.update(self.__dict__)
        other.qkv = [x.detach().to(dtype).requires_grad_() for x in self.qkv]
        other.d_out, other._bias = self.d_out.to(dtype), None
        return other


def attend_with(name: str) -> Attend:
    """The contender as a function (inputs, dropout seed) -> out."""
    if name in peers.MAKE:
        return peers.MAKE[name]()
    function = get_attention(name)

    def attend(inputs: Inputs, seed: int) -> torch.Tensor:
        features: dict[str, object] = {}
        if inputs.kv_lengths is not None:
            features["kv_lengths"] = inputs.kv_lengths
        if inputs.dropout_p:
            features |= {"dropout_p": inputs.dropout_p, "dropout_seed": seed}
        return function(*inputs.qkv, causal=inputs.workload.causal, **features)

    return attend


def gradients(attend: Attend, inputs: Inputs, seed: int = 0) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    out = attend(inputs, seed)
    return [out.detach(), *torch.autograd.grad(out, inputs.qkv, inputs.d_out)]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; NaN if either contains a NaN."""
    return float(torch.linalg.vector_norm(value.double() - reference) / torch.linalg.vector_norm(reference))


def check(backend: str, workload: Workload, dtype: torch.dtype, device: torch.device) -> Sample:
    """`compare` of out, dq, dk, dv on a small shape; AttentionError if the backend cannot take the workload."""
    peers.refuse(backend, workload, dtype, device)
    if backend in peers.APPROXIMATE:
        return {"errors": {}, "limits": {}, "passed": True}
    on_gpu = device.type == "cuda"
    length = min(workload.length, 1024 if on_gpu else 64)
    # As many heads as `auto` asks for to take the kernels that are timed, where those have as many.
    heads = min(workload.batch * workload.heads // 2, 2**14 // length) if on_gpu else 1
    mask = PADDED if workload.mask != "plain" else "plain"
    small = replace(workload, batch=2, heads=heads, length=length, mask=mask)
    inputs, naive, attend = Inputs(small, dtype, device), attend_with("naive"), attend_with(backend)
    exact = gradients(naive, inputs.to(torch.float64))
    found = compare(gradients(attend, inputs), gradients(naive, inputs), exact, dtype)
    if workload.mask == DROPPED:
        bias, limit = _dropout_bias(attend, replace(small, mask=DROPPED), dtype, device)
        found["errors"]["dropout"], found["limits"]["dropout"] = bias, limit
        found["passed"] = found["passed"] and bias <= limit
    return found


def compare(
    found: Sequence[torch.Tensor], naive: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], dtype: torch.dtype,
    names: tuple[str, ...] = ("out", "dq", "dk", "dv"),
) -> Sample:  # fmt: skip
    """Relative errors against float64; the limit is twice naive's in this dtype: {"errors", "limits", "passed"}."""
    least = 0.1 * torch.finfo(dtype).eps
    errors = {name: relative_error(*pair) for name, *pair in zip(names, found, exact, strict=True)}
    limits = {
        name: 2 * relative_error(*pair) + least for name, *pair in zip(names, naive, exact, strict=True)
    }
    return {"errors": errors, "limits": limits, "passed": all(errors[each] <= limits[each] for each in names)}


def _dropout_bias(
    attend: Attend, workload: Workload, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """|mean of out - 1| and its limit (6 sigma), for equal probabilities and v = 1: dropout must keep the mean 1."""
    inputs = Inputs(workload, dtype, device)
    q, k, v = inputs.qkv
    inputs.qkv = [torch.zeros_like(q), k, torch.ones_like(v)]
    rows = attend(inputs, 1)[..., 0].detach().double()
    sigma = math.sqrt(DROPOUT / (1 - DROPOUT) / (workload.length - 20) / rows.numel())
    return abs(float(rows.mean()) - 1), 6 * sigma + torch.finfo(dtype).eps


def memory(backend: str, workload: Workload, dtype: torch.dtype, device: torch.device) -> Sample:
    """Peak bytes of inputs, forward and backward, and the errors of some rows of out and dq, at the full shape."""
    attend = attend_with(backend)
    kept: list[object] = []

    def once() -> None:
        inputs = Inputs(workload, dtype, device)
        kept.extend((inputs, *gradients(attend, inputs)))

    peak = timing.peak_bytes(once, device)
    inputs, out, *grads = kept
    return {
        "peak_bytes": peak,
        "row_errors": {} if backend in peers.APPROXIMATE else _row_errors(inputs, out, grads[0]),
        "finite": all(bool(torch.isfinite(x).all()) for x in (out, *grads)),
    }


def _row_errors(inputs: Inputs, out: torch.Tensor, dq: torch.Tensor) -> dict[str, float]:
    """Relative errors of 16 rows of out and dq against float64; {} with dropout, whose mask may be the backend's own.

    A row of out or dq needs all keys but only one query, so float64 fits in memory at any length; a row of dk or dv
    would need all queries.
    """
    workload = inputs.workload
    if inputs.dropout_p:
        return {}
    row = torch.randint(workload.length, (16,), device=out.device)
    head, batch = int(torch.randint(workload.heads, ())), int(torch.randint(workload.batch, ()))
    q, k, v = (x.detach()[batch, head].double() for x in inputs.qkv)
    queries = q[row].requires_grad_()
    scores = queries @ k.T / math.sqrt(workload.head_dim)
    keys = torch.arange(workload.length, device=out.device)
    if workload.causal:
        scores.masked_fill_(keys > row[:, None], float("-inf"))
    if inputs.kv_lengths is not None:
        scores.masked_fill_(keys >= inputs.kv_lengths[batch], float("-inf"))
    exact = scores.softmax(-1) @ v
    (d_queries,) = torch.autograd.grad(exact, queries, inputs.d_out[batch, head, row].double())
    found = {"out": (out, exact.detach()), "dq": (dq, d_queries)}
    return {name: relative_error(x[batch, head, row], reference) for name, (x, reference) in found.items()}


def time_all(backends: list[str], workload: Workload, options: Options, dtype: torch.dtype) -> Sample:
    """`timing.race` of the backends' forward and backward.

    If memory runs out, the backends that store the scores are dropped one after another, in HOLD_SCORES' order.
    """
    competing = list(backends)
    while True:
        try:
            return _time(competing, workload, options, dtype)
        except torch.OutOfMemoryError:
            hungry = [name for name in HOLD_SCORES if name in competing]
            if not hungry or len(competing) == 1:
                raise
            competing.remove(hungry[0])
        torch.cuda.empty_cache()


def _time(backends: list[str], workload: Workload, options: Options, dtype: torch.dtype) -> Sample:
    attends = {backend: attend_with(backend) for backend in backends}
    return race(attends, input_sets(workload, dtype, options.device), options)


def input_sets(workload: Workload, dtype: torch.dtype, device: torch.device) -> list[Inputs]:
    """Inputs to be used in rotation, so many that none is in the cache when its turn comes."""
    return [Inputs(workload, dtype, device) for _ in range(timing.input_sets(workload.bytes, device))]


def race(
    attends: Mapping[str, Callable[[Any, int], Any]], sets: Sequence[Any], options: Options, backward: bool = True,
    **how: Any,
) -> Sample:  # fmt: skip
    """`timing.race` of functions (inputs, number of the turn) -> out: "forward" and "backward", or the call as "all".

    sets: inputs for them, used in rotation; `qkv` holds the autograd leaves, `d_out` the output's gradient.
    """

    def call_of(attend: Callable[[Any, int], Any]) -> timing.Call:
        def call(number: int) -> Iterator[None]:
            inputs = sets[number % len(sets)]
            out = attend(inputs, number)
            yield
            if backward:
                torch.autograd.grad(out, inputs.qkv, inputs.d_out)
                yield

        return call

    calls = {name: call_of(attend) for name, attend in attends.items()}
    return timing.race(calls, options, ("forward", "backward") if backward else ("all",), **how)


def run(options: Options) -> None:
    settings, device, dtype = options.settings, options.device, options.dtype
    if device.type == "cpu" and not options.tiny:
        return _count_memory(options, torch.float16)  # bfloat16's size; the interpreter gets bfloat16 wrong
    for workload in workloads(settings, options.tiny):
        able = [each for each in _names(settings, workload) if _ready(each, workload, options, dtype)]
        if able:
            options.timed(partial(time_all, able, workload, options, dtype), kind="time", **asdict(workload))


def _count_memory(options: Options, dtype: torch.dtype) -> None:
    """What a CPU can measure on a GPU's behalf: bytes allocated, which are proportional to batch * heads (1 here)."""
    for length in (512, 1024, 2048, 4096):
        workload = Workload("fa1", 1, 1, length, 64, False)
        for backend in _names(options.settings, workload):
            if _ready(backend, workload, options, dtype):
                options.say(f"  counted {backend} at {length}")


def backend_names(chosen: tuple[str, ...], more: Iterable[str] = (STANDARD,)) -> tuple[str, ...]:
    """`chosen` with its names checked; if it is empty, `more` and all registered backends."""
    known = (*more, *ATTENTION)
    for name in chosen:
        if name not in known:
            raise ReproduceError(f"there is no attention {name}; choose from {', '.join(known)}")
    return chosen or known


def _names(settings: Settings, workload: Workload) -> list[str]:
    left_out: set[str] = set()
    judged = 1024 <= workload.length <= 4096
    if workload.figure not in ("gpt2", "stored") and not judged:
        left_out |= set(settings.compiled)
    if workload.figure != "fa1" or workload.length > 4096:
        left_out |= set(settings.old) - set(settings.backends)
    left_out |= {name for name, most in LONGEST.items() if workload.length > most} - set(settings.backends)
    names = backend_names(settings.backends, peers.MAKE)
    return [each for each in names if each not in left_out and peers.suits(each, workload)]


def _ready(backend: str, workload: Workload, options: Options, dtype: torch.dtype) -> bool:
    """Whether to time `backend`: it supports the workload, its results are right, and it fits in memory."""
    how = (backend, workload, dtype, options.device)
    kind: Sample = {"head_dim": workload.head_dim, "causal": workload.causal, "mask": workload.mask}
    if workload.figure == "stored":  # each of its lengths has other kernels
        kind["length"] = workload.length
    verdict = options.sample(lambda: check(*how), kind="check", backend=backend, **kind)
    if "passed" not in verdict:
        return False
    used = options.sample(lambda: memory(*how), kind="memory", backend=backend, **asdict(workload))
    if "peak_bytes" not in used:
        return False
    rows, limits = used["row_errors"], verdict["limits"]
    right = verdict["passed"] and used["finite"] and all(rows[x] <= 2 * limits[x] for x in rows)
    if not right:
        errors = f"{verdict['errors']}, limits {limits}, rows {rows} at full length"
        options.say(f"  wrong, so not timed: {backend} {workload}: {errors}")
    return right
