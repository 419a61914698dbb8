"""Training speed and memory of GPT-2: FlashAttention Table 2 and Table 4, FlashAttention-2 Table 1.

A step has as many tokens as each of the paper's eight GPUs processed of a step's 512 sequences. Attention is swapped
in isolation (our model, one compile mode, every backend); separately, whole stacks are compared. Before a group is
timed, each contender's logits must agree with naive attention's in float32 (except nanoGPT's, which has other
weights), and its peak memory is measured. Then the group's contenders take turns in one process.
"""

import functools
import gc
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from kernels import get_attention
from model.config import GPTConfig
from model.gpt import GPT
from training.metrics import peak_flops

from . import contenders, nanogpt, timing
from .common import ReproduceError
from .contenders import FUSED, HF_EAGER, HF_SDPA, NANOGPT, NANOGPT_BIASES, PADDED, Contender, initial_model
from .experiment import Options, Sample, Timing
from .standard import CUT
from .standard import NAME as STANDARD
from .training_figures import draw, judge

__all__ = ["TINY", "Settings", "draw", "judge", "run"]

SHAPES = {
    "gpt2_small": GPTConfig(),
    "gpt2_medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt3_1.3b": GPTConfig(n_layer=24, n_head=16, n_embd=2048),
    "tiny": GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=32),
}
# Relative error allowed in 16-bit logits against float32; wrong attention is off by more than a tenth.
LOGIT_TOLERANCE = 0.02


PARTS = ("small", "replayed", "compiled", "today", "padded", "dropout", "whole", "context", "medium", "gpt3")
SELECTION = ("parts",)
NEEDED = ("core", "contexts")


@dataclass(frozen=True)
class Settings(Timing):
    # small, medium: Hugging Face and ours, eager (Table 2). replayed: likewise, as CUDA graphs: no host decides.
    # compiled: ours and nanoGPT, under torch.compile. today, padded: ours and Hugging Face, compiled, without and
    # with its vocabulary padded. whole: as compiled, with the whole step in one forward. dropout: with the paper's.
    # context: Table 4. gpt3: FlashAttention-2's Table 1.
    parts: tuple[str, ...] = PARTS
    # For the eager and replayed parts, as in the paper's training.
    dtype: str = "float16"
    # For the compiled parts, as in nanoGPT's training.
    compiled_dtype: str = "bfloat16"
    dropout: float = 0.1
    # Names in kernels.ATTENTION for the part `small`; if empty, all but the historical ones. Other parts use `core`,
    # where standard attention brings the form that is cut to its mask.
    backends: tuple[str, ...] = ()
    core: tuple[str, ...] = ("naive", STANDARD, "sdpa", "flash")
    # torch.compile's backend.
    compiler: str = "inductor"
    # Use CUDA graphs for all contenders that inductor compiles for a GPU, as train.py does: else a slow host decides.
    cuda_graphs: bool = True
    # Path of model.py in a nanoGPT checkout, which then takes part.
    nanogpt: str = ""
    small: str = "gpt2_small"
    medium: str = "gpt2_medium"
    large: str = "gpt3_1.3b"
    contexts: tuple[int, ...] = (1024, 2048, 4096)
    gpt3_contexts: tuple[int, ...] = (2048, 8192)
    # Tokens per step on one GPU (512 x 1024 shared by eight), and per forward except in `whole`.
    step_tokens: int = 65536
    micro_tokens: int = 16384
    gpt3_step_tokens: int = 16384
    gpt3_micro_tokens: int = 8192
    seconds: float = 3.0


TINY = Settings(
    dtype="float32", compiled_dtype="float32", backends=("naive", "sdpa"), core=(STANDARD, "naive"),
    compiler="aot_eager", small="tiny", medium="tiny", large="tiny", contexts=(8, 16), gpt3_contexts=(16,),
    step_tokens=32, micro_tokens=16, gpt3_step_tokens=32, gpt3_micro_tokens=16, processes=1, rounds=2, seconds=0.01,
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """A group of contenders that are timed together: what they have in common. Its fields are their coordinates."""

    part: str
    model: str
    context: int
    dropout: float
    mode: str  # eager, replayed (that, as CUDA graphs) or compiled
    dtype: str
    micro_batch: int
    accumulation: int

    @property
    def config(self) -> GPTConfig:
        return replace(SHAPES[self.model], seq_len=self.context, dropout=self.dropout)


def run(options: Options) -> None:
    unknown = set(options.settings.parts) - set(PARTS)
    if unknown:
        raise ReproduceError(f"parts={sorted(unknown)[0]} is unknown; choose from {', '.join(PARTS)}")
    if options.settings.nanogpt:
        nanogpt.load(options.settings.nanogpt)  # fail early if the path is wrong
    if options.device.type == "cuda":
        options.sample(lambda: {"peak_flops": peak_flops(options.device)}, kind="machine")
    for group, names in plan(options.settings):
        _run_group(options, group, names)


def plan(settings: Settings) -> list[tuple[Group, tuple[str, ...]]]:
    """The groups, each with the names of its contenders, the most useful group first."""
    base, small, medium = settings.contexts[0], settings.small, settings.medium
    with_cut = (each for name in settings.core for each in ((name, CUT) if name == STANDARD else (name,)))
    core, ours = tuple(dict.fromkeys(with_cut)), settings.core[-1]
    everyone = settings.backends or tuple(contenders.backends())
    fused = ours + FUSED
    peers = (NANOGPT, NANOGPT_BIASES) if settings.nanogpt else ()
    # The attention that the paper compares with, and today's default in transformers.
    huggingface = (HF_EAGER, HF_SDPA)
    # Naive draws its dropout mask in integer arithmetic, which took most of its step.
    dropped = tuple(name for name in core if name != "naive")
    padded = tuple(name + PADDED for name in huggingface)
    found: list[tuple[Group, tuple[str, ...]]] = []

    def add(
        part: str, model: str, context: int, names: tuple[str, ...], mode: str = "eager", dropout: float = 0.0
    ) -> None:
        large = part == "gpt3"
        step = settings.gpt3_step_tokens if large else settings.step_tokens
        micro = step if part == "whole" else settings.gpt3_micro_tokens if large else settings.micro_tokens
        dtype = settings.compiled_dtype if mode == "compiled" else settings.dtype
        batch = (max(1, micro // context), step // max(micro, context))
        found.append((Group(part, model, context, dropout, mode, dtype, *batch), names))

    add("small", small, base, (*huggingface, *everyone, fused))
    for model in (small, medium):
        # transformers' eager attention copies from the host, which no graph can hold.
        add("replayed", model, base, (HF_SDPA, *core, fused), "replayed")
    add("compiled", small, base, (*core, fused, *peers), "compiled")
    add("today", small, base, (*huggingface, fused), "compiled")
    add("padded", small, base, (*padded, fused), "compiled")
    add("dropout", small, base, (*huggingface, *dropped, fused), dropout=settings.dropout)
    for model in (small, medium):
        add("whole", model, base, (ours, fused, *peers), "compiled")
    for mode in ("eager", "compiled"):
        for context in settings.contexts[mode == "eager" :]:  # eager, `small` has the first one
            # What the claim sets beside each other: flash at every length, standard attention at the first.
            add("context", small, context, core if context == base else settings.core[-2:], mode)
    add("medium", medium, base, (*huggingface, *core, fused))
    for mode in ("eager", "compiled"):
        for context in settings.gpt3_contexts:
            add("gpt3", settings.large, context, core, mode)
    add("dropout", small, base, (*dropped, fused), "compiled", settings.dropout)
    return [(group, names) for group, names in found if group.part in settings.parts]


# ---- a group -----------------------------------------------------------------------------------------


def _run_group(options: Options, group: Group, names: tuple[str, ...]) -> None:
    # torch.compile falls back to eager after recompiling a function a few times.
    torch.compiler.reset()
    built: dict[str, Contender] = {}
    ready = []
    for name in names:
        measure = partial(_memory_with_others, options, group, name, built)
        sample = options.sample(measure, kind="memory", contender=name, **asdict(group))
        if sample.get("agrees"):
            ready.append(name)
        elif group.mode == "compiled":
            torch.compiler.reset()  # after a failure it would compile the next model only in pieces
        _report(options, group, name, sample)
    if ready:
        measure = partial(_speed_of_all, options, group, ready, built)
        sample = options.timed(measure, kind="speed", **asdict(group))
        for name, parts in sample.get("ms", {}).items():
            step = sum(map(sum, parts.values())) / len(parts["optimizer"])
            options.say(f"  {name}: {1e3 * sample['step_tokens'] / step:,.0f} tokens/s")


def _report(options: Options, group: Group, name: str, sample: Sample) -> None:
    found = sample.get("refused") or sample.get("failed") or "out of memory"
    if "peak_bytes" in sample:
        agrees = "" if sample["agrees"] else f"; its logits are off by {sample['logit_error']:.1%}: not timed"
        found = f"{sample['peak_bytes'] / 2**30:.2f} GiB{agrees}"
    where = f"{group.model}, context {group.context}, {group.mode}, {group.micro_batch} sequences"
    options.say(f"{where}, {name}: {found}")


def _build(options: Options, group: Group, name: str) -> Contender:
    settings, compiled = options.settings, group.mode == "compiled"
    on_gpu, graphs = options.device.type == "cuda", group.mode == "replayed"
    if compiled:
        graphs = settings.cuda_graphs and settings.compiler == "inductor"
    return Contender(
        name,
        group.config,
        device=options.device,
        dtype=getattr(torch, group.dtype),
        micro_batch=group.micro_batch,
        accumulation=group.accumulation,
        compiler=settings.compiler if compiled else None,
        graphs=on_gpu and graphs,
        pool=_pool() if on_gpu else None,
        nanogpt_path=settings.nanogpt,
    )


@functools.cache
def _pool() -> tuple[int, int]:
    """The memory pool for CUDA graphs of eager contenders: they take turns, so one's memory serves the next."""
    return torch.cuda.graph_pool_handle()


def _memory_with_others(options: Options, group: Group, name: str, built: dict[str, Contender]) -> Sample:
    """`_memory`; if the contender does not fit beside those that are built, they are freed first."""
    try:
        return _memory(options, group, name, built)
    except torch.OutOfMemoryError:
        if not built:
            raise
    _discard(options, built)
    return _memory(options, group, name, built)


def _memory(options: Options, group: Group, name: str, built: dict[str, Contender]) -> Sample:
    """Peak bytes of two steps, including weights and optimizer, and the logits' error against naive float32.

    The contender is kept in `built`, to be timed later.
    """
    _collect(options.device)
    contender = _build(options, group, name)
    error = None if name in (NANOGPT, NANOGPT_BIASES) else _logit_error(contender, group)
    states = contender.optimizer.state
    held = sum(
        x.nbytes
        for parameter in contender.model.parameters()
        for x in (parameter, parameter.grad, *states[parameter].values())
        if x is not None  # before the first step, gradients exist only with CUDA graphs
    )

    def two_steps() -> None:
        for number in range(2):
            for _ in contender.step(number):
                pass

    peak = held + timing.peak_bytes(two_steps, options.device)
    built[name] = contender
    return {"peak_bytes": peak, "logit_error": error, "agrees": error is None or error <= LOGIT_TOLERANCE}


def _logit_error(contender: Contender, group: Group) -> float:
    """Relative error of the logits (norm of the difference over norm) against our model with naive in float32."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(group.config.vocab_size, (1, group.context), generator=generator)
    tokens = tokens.to(contender.device)
    exact = initial_model(group.config, get_attention("naive"), contender.device).eval()
    with torch.no_grad():
        expected = exact(tokens)
    return float((contender.logits(tokens) - expected).norm() / expected.norm())


def _speed_of_all(options: Options, group: Group, names: list[str], built: dict[str, Contender]) -> Sample:
    """`_speed` of as many as fit into memory together: while they do not (CUDA graphs keep theirs), the first is left
    out. Those left out are timed after the others, one by one, and named under "alone".
    """
    together = list(names)
    while True:
        try:
            sample = _speed(options, group, together, built)
            break
        except torch.OutOfMemoryError:
            if len(together) == 1:
                raise
        options.say(f"  {together.pop(0)} does not fit beside the others, and is timed after them")
        _discard(options, built)
    _add_alone(options, group, names[: -len(together)], built, sample)
    return sample


def _add_alone(
    options: Options, group: Group, names: list[str], built: dict[str, Contender], sample: Sample
) -> None:
    """Add the times of each of `names` alone to a sample, and as "alone" the clocks meanwhile."""
    for name in names:
        _discard(options, built)
        try:
            own = _speed(options, group, [name], built)
        # Too little memory, as once of four times at 134 of 140 GiB; or a graph's error. The others' times stay.
        except RuntimeError as error:
            if "CUDA error" in str(error):
                raise
            options.say(f"  {name} was not timed alone: {type(error).__name__}")
            continue
        sample["ms"] |= own["ms"]
        sample["late"] |= own["late"]
        sample.setdefault("alone", {})[name] = own["clocks"]


def _speed(options: Options, group: Group, names: list[str], built: dict[str, Contender]) -> Sample:
    """Step times of `names`, which take turns."""
    for name in names:
        if name not in built:
            built[name] = _build(options, group, name)
    rounds = options.settings.rounds
    raced = timing.race(
        {name: built[name].step for name in names},
        options,
        ("forward", "backward") * group.accumulation + ("optimizer",),
        warmup=2,  # the second step records CUDA graphs
        rounds=(rounds, max(rounds, 30)),
        patience=1,  # waiting for the host is part of a training step
    )
    # The same for every contender, since all compute the same function.
    with torch.device("meta"):
        flops = GPT(group.config, get_attention("naive")).flops_per_token(group.context)
    step_tokens = group.micro_batch * group.accumulation * group.context
    return {**raced, "step_tokens": step_tokens, "flops_per_token": flops}


# ---- hygiene -----------------------------------------------------------------------------------------


def _discard(options: Options, built: dict[str, Contender]) -> None:
    """Free the contenders and what they recorded."""
    built.clear()
    torch.compiler.reset()
    _collect(options.device)


def _collect(device: torch.device) -> None:
    """Free what earlier contenders held; avoids fragmentation, so that a large contender fits."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
