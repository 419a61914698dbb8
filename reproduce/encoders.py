"""Attention that looks both ways: a step of BERT-large (FlashAttention, Table 1), and long-range tasks (Tables 3, 6).

BERT-large is transformers', at MLPerf's length of 512 with dropout in the attention, random tokens without padding;
only its attention differs. The long-range task is ListOps, made here by its rule (Nangia and Bowman 2018, in the
lengths of Long Range Arena), for an encoder of four layers that is trained with each attention; Path-X is a step at
its length of 16,384 pixels, untrained.
"""

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import kernels
from model.config import GPTConfig
from model.gpt import AttentionFn
from training.optimizer import OptimizerConfig, build_optimizer, update
from training.schedule import Decay, ScheduleConfig, learning_rate

from . import paper, plots
from .attention import race
from .comparison.seeds import half_width
from .contenders import initial_model
from .experiment import NOT_STATED, Options, Results, Sample, Timing, Verdict, Verdicts, pick
from .peers import BASELINE, OURS
from .sparse import butterfly_mask
from .standard import standard_attention
from .timing import gain, timed, took

IN_TRANSFORMERS = "tilegpt"  # the name of our attention there
SPARSE = f"{OURS}+butterfly"  # block-sparse, as in FlashAttention's Tables 3 and 6
# Tokens of ListOps after the ten digits; the first of a sequence is read for the answer, the last fill it up.
OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "max": max,
    "min": min,
    "median": lambda values: sorted(values)[len(values) // 2],
    "sum": lambda values: sum(values) % 10,
}
CLOSE, FIRST, FILL, VOCABULARY = 14, 15, 16, 17
MOST_ARGUMENTS, DEEPEST = 10, 10
NEEDED = ("bert", "lengths")
# The most by which equal accuracies are apart, noise added; the paper's differ by 0.010 and 0.016.
EQUAL = 0.02


@dataclass(frozen=True)
class Settings(Timing):
    dtype: str = "bfloat16"
    # "standard", names in kernels.ATTENTION, and flash's block-sparse form; the tasks' contenders.
    tasks: tuple[str, ...] = (BASELINE, "sdpa", OURS, SPARSE)
    # transformers' names of its own attentions, and of ours.
    bert: tuple[str, ...] = ("eager", "sdpa", IN_TRANSFORMERS)
    # BERT-large; MLPerf's batch of 448 sequences of 512 is 56 on each of eight GPUs.
    layers: int = 24
    width: int = 1024
    bert_heads: int = 16
    sequences: int = 56
    bert_length: int = 512
    bert_vocabulary: int = 30528
    dropout: float = 0.1
    # The encoder of the tasks: four layers of 512, head_dim 64.
    task_layers: int = 4
    task_width: int = 512
    task_heads: int = 8
    lengths: tuple[int, ...] = (2048, 4096)
    path_length: int = 16384
    # Tokens of a step of the tasks.
    tokens: int = 65536
    # Training on ListOps at the first of `lengths`: contenders, each with every seed of the data; steps, and examples
    # that are then answered; processes that make examples, of which one takes 50 ms for a step's.
    trained: tuple[str, ...] = (BASELINE, OURS, SPARSE)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 2000
    examples: int = 2048
    workers: int = 8
    seconds: float = 1.0


TINY = Settings(
    dtype="float32", tasks=(BASELINE, OURS, SPARSE), layers=1, width=32, bert_heads=1, sequences=1, bert_length=16,
    bert_vocabulary=64, dropout=0.0, task_layers=1, task_width=32, task_heads=1, lengths=(32,), path_length=32,
    tokens=32, seeds=(0, 1), steps=1, examples=2, workers=0, processes=1, rounds=1, seconds=0.0,
)  # fmt: skip


def run(options: Options) -> None:
    settings = options.settings
    options.timed(partial(time_bert, options), kind="bert", length=settings.bert_length)
    for length in settings.lengths:
        options.timed(partial(time_task, length, VOCABULARY, options), kind="listops", length=length)
    options.timed(
        partial(time_task, settings.path_length, 256, options), kind="path", length=settings.path_length
    )
    for seed in settings.seeds:
        for name in settings.trained:
            where = {"kind": "accuracy", "contender": name, "length": settings.lengths[0], "seed": seed}
            options.sample(partial(train, name, seed, options), **where)


# ---- BERT ----------------------------------------------------------------------------------------------


def time_bert(options: Options) -> Sample:
    """A training step of BERT-large with each attention; and how far each one's logits are from the first's."""
    settings, device = options.settings, options.device
    shape = (settings.sequences, settings.bert_length)
    tokens, labels = torch.randint(settings.bert_vocabulary, (2, *shape), device=device)
    labels = labels.masked_fill(torch.rand(shape, device=device) > 0.15, -100)  # a 15 % share is predicted
    scaler = torch.amp.GradScaler(device.type, enabled=False)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: None, number: int) -> None:
        with options.autocast():
            loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        update(model, optimizer, scaler)

    steps, logits = {}, {}
    for name in settings.bert:
        model = _bert(name, options)
        with torch.no_grad(), options.autocast():
            logits[name] = model.eval()(input_ids=tokens[:1]).logits.float()
        steps[name] = partial(step, model.train(), build_optimizer(model, OptimizerConfig()))
    first = logits[settings.bert[0]]
    errors = {name: float((each - first).norm() / first.norm()) for name, each in logits.items()}
    if max(errors.values()) > 0.02:  # as in `training`
        raise ValueError(f"logits differ: {errors}")
    return {**race(steps, [None], options, backward=False, patience=1), "logit_errors": errors}


def _bert(name: str, options: Options) -> nn.Module:
    """transformers' BertForMaskedLM with the attention `name`; its initial weights are the same for each."""
    settings = options.settings
    kernels.register_transformers()
    from transformers import BertConfig, BertForMaskedLM  # not before: it hides the Hub's `kernels`

    config = BertConfig(
        vocab_size=settings.bert_vocabulary, hidden_size=settings.width, num_hidden_layers=settings.layers,
        num_attention_heads=settings.bert_heads, intermediate_size=4 * settings.width,
        max_position_embeddings=settings.bert_length, hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout, attn_implementation=name,
    )  # fmt: skip
    torch.manual_seed(0)
    return BertForMaskedLM(config).to(options.device)


# ---- long-range tasks ----------------------------------------------------------------------------------


def listops(rng: random.Random, length: int) -> tuple[list[int], int]:
    """(tokens, answer 0 to 9) of a nested list of operations that fills between a quarter and all of `length`."""
    while True:
        tokens, answer = _expression(rng, DEEPEST, length - 1)
        if length // 4 <= len(tokens) < length:
            return [FIRST, *tokens, *[FILL] * (length - 1 - len(tokens))], answer


def _expression(rng: random.Random, depth: int, room: int) -> tuple[list[int], int]:
    """A digit or, in a quarter of the cases and at the top, an operation; it may turn out longer than `room`."""
    if depth < DEEPEST and (depth == 0 or room < 1 or rng.random() < 0.75):
        digit = rng.randrange(10)
        return [digit], digit
    name = rng.choice(list(OPERATIONS))
    tokens, values = [10 + list(OPERATIONS).index(name)], []
    for _ in range(rng.randint(2, MOST_ARGUMENTS)):
        inner, value = _expression(rng, depth - 1, room - len(tokens))
        tokens += inner
        values.append(value)
    return [*tokens, CLOSE], OPERATIONS[name](values)


class Encoder:
    """Our model with attention that looks both ways, its optimizer, and steps on (tokens, answers)."""

    def __init__(self, name: str, length: int, vocabulary: int, options: Options) -> None:
        settings = options.settings
        config = GPTConfig(
            vocab_size=vocabulary, seq_len=length, n_layer=settings.task_layers, n_head=settings.task_heads,
            n_embd=settings.task_width,
        )  # fmt: skip
        self.options = options
        self.model = initial_model(config, both_ways(name, config, options), options.device)
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        self.scaler = torch.amp.GradScaler(options.device.type, enabled=False)

    def answers(self, tokens: Tensor) -> Tensor:
        """Logits (batch, 10), read at the first token."""
        with self.options.autocast():
            return self.model.logits(self.model.hidden(tokens)[:, :1])[:, 0, :10].float()

    def step(self, tokens: Tensor, answers: Tensor) -> None:
        F.cross_entropy(self.answers(tokens), answers).backward()
        update(self.model, self.optimizer, self.scaler)


def both_ways(name: str, config: GPTConfig, options: Options) -> AttentionFn:
    """The contender as our model takes an attention, but not causal."""
    if name == BASELINE:
        return lambda q, k, v, **_: standard_attention(*(x.to(v.dtype) for x in (q, k, v)))
    mask = {"block_mask": butterfly_mask(config.seq_len).to(options.device)} if name == SPARSE else {}
    how = {"device": options.device, "dtype": options.dtype, "head_dim": config.head_dim}
    _, attend = kernels.resolve_attention(name.partition("+")[0], **how, **mask)
    return lambda q, k, v, **_: attend(q, k, v, causal=False, **mask)


def time_task(length: int, vocabulary: int, options: Options) -> Sample:
    """A training step on random tokens with each attention; who runs out of memory is left out."""
    batch = max(1, options.settings.tokens // length)
    tokens = torch.randint(vocabulary, (batch, length), device=options.device)
    answers = torch.randint(10, (batch,), device=options.device)
    steps: dict[str, Callable[[None, int], None]] = {}
    for name in options.settings.tasks:
        try:
            encoder = Encoder(name, length, vocabulary, options)
            encoder.step(tokens, answers)
        except torch.OutOfMemoryError:
            options.say(f"  {name}: out of memory at {length} tokens")
            continue
        steps[name] = lambda inputs, number, encoder=encoder: encoder.step(tokens, answers)
    return {**race(steps, [None], options, backward=False, patience=1), "batch": batch}


class ListOps(IterableDataset):
    """Batches without end: tokens and answers, int64 (batch, length) and (batch,). A worker has a seed of its own."""

    def __init__(self, length: int, batch: int, seed: int) -> None:
        self.length, self.batch, self.seed = length, batch, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed}, {worker.id if worker else 0}")
        while True:
            tokens, answers = zip(*(listops(rng, self.length) for _ in range(self.batch)), strict=True)
            yield torch.tensor(tokens), torch.tensor(answers)


def train(name: str, seed: int, options: Options) -> Sample:
    """How many examples of ListOps are answered right after training, and by always giving the most frequent answer.

    Initial weights are the same, and the data those of the seed, for every contender.
    """
    settings, device, length = options.settings, options.device, options.settings.lengths[0]
    gc.collect()
    batch, schedule = max(1, settings.tokens // length), ScheduleConfig(Decay.linear)
    encoder, optimizer = Encoder(name, length, VOCABULARY, options), OptimizerConfig()
    loader = DataLoader(ListOps(length, batch, seed), batch_size=None, num_workers=settings.workers)
    batches = ((tokens.to(device), answers.to(device)) for tokens, answers in loader)
    for step, (tokens, answers) in zip(range(settings.steps), batches, strict=False):
        for group in encoder.optimizer.param_groups:
            group["lr"] = learning_rate(schedule, optimizer.lr, step, settings.steps)
        encoder.step(tokens, answers)
    right, every = 0, torch.zeros(10, dtype=torch.int64)
    with torch.no_grad():
        for _, (tokens, answers) in zip(range(0, settings.examples, batch), batches, strict=False):
            right += int((encoder.answers(tokens).argmax(-1) == answers).sum())
            every += answers.cpu().bincount(minlength=10)
    of = {"of": int(every.sum()), "most_frequent": int(every.max()), "steps": settings.steps}
    return {"right": right, **of}


# ---- the page ------------------------------------------------------------------------------------------


def draw(results: Results, path: Path, claim: str = "") -> bool:
    """A panel of step times for BERT and for each length of the tasks, and one of the answers that are right."""
    panels = []
    for kind, words in (("bert", "BERT-large"), ("listops", "ListOps"), ("path", "Path-X's length")):
        for sample in timed(results, kind=kind):
            rows = {name: {"": took(sample, name).median} for name in sample["ms"]}
            panel = plots.bars(f"{words}, {sample['length']} tokens", rows, across="ms a step")
            panels.append(plots.of("C15" if kind == "bert" else "C16", panel))
    rights = {name: _rights(pick(results, kind="accuracy"), name) for name in (BASELINE, OURS, SPARSE)}
    if any(rights.values()):
        percent = {n: {seed: 100 * share for seed, share in each.items()} for n, each in rights.items()}
        panel = plots.lines("ListOps after training", percent, across="seed", up="% of answers right")
        panels.append(plots.of("C16", panel))
    title = f"Attention that looks both ways, {results['device']}"
    return plots.draw(path, title, panels, columns=2, claim=claim)


def judge(results: Results) -> list[Verdict]:
    """C15 and C16."""
    found = Verdicts(results["device"])
    for sample in timed(results, kind="bert"):
        for name, words in (("eager", "eager attention"), ("sdpa", "PyTorch's SDPA")):
            if faster := gain(sample, name, IN_TRANSFORMERS):
                what = f"BERT-large, a step at {sample['length']}: {words} over flash"
                why = "the ratio only: the paper's is of a whole run, over Nvidia's MLPerf 1.1 code, fused"
                found.times("C15", what, 1.15, faster, None, why)
    for name, theirs in ((OURS, 2.4), (SPARSE, 2.8)):
        for sample in timed(results, kind="listops"):
            if faster := gain(sample, BASELINE, name):
                what = f"ListOps, a step at {sample['length']}: standard over {name}"
                why = "at least the paper's, a mean over five tasks of 1k to 4k with their own encoder"
                if name == OURS and (sdpa := gain(sample, "sdpa", name)):
                    why += f"; PyTorch's SDPA takes {sdpa.shown()} our time"
                found.times("C16", what, theirs, faster, faster.low >= theirs, why)
    _judge_accuracy(results, found)
    for sample in timed(results, kind="path"):
        faster = gain(sample, BASELINE, OURS)
        why = "the paper states accuracy alone, after training that takes days; this is a step at its length"
        what = f"Path-X's length, a step at {sample['length']}: standard over flash"
        if sdpa := gain(sample, "sdpa", OURS):
            why += f"; PyTorch's SDPA takes {sdpa.shown()} our time"
        found.add("C16", what, NOT_STATED, faster.shown() if faster else "standard does not fit", None, why)
    if found:
        why = "takes MIMIC-III and ECtHR; of long texts there is C code, by its loss, at C14"
        found += [
            Verdict("C16", "Path-X, answers right", "61.4 %", why="training takes days"),
            Verdict("C16", "long documents, micro-F1", "Table 5", why=why),
        ]
    return found


def _judge_accuracy(results: Results, found: Verdicts) -> None:
    """The paper's accuracies are of one run each. Ours are pairs, with the weights and the data of one seed."""
    samples = pick(results, kind="accuracy")
    right = {name: _rights(samples, name) for name in (BASELINE, OURS, SPARSE)}
    for name in (OURS, SPARSE):
        what = f"ListOps, answers right with standard and with {name}"
        theirs = _percent(*paper.LISTOPS_ACCURACY[name])
        seeds = sorted(right[BASELINE].keys() | right[name].keys())
        lacking = {who: [seed for seed in seeds if seed not in right[who]] for who in (BASELINE, name)}
        if len(seeds) < 2 or any(lacking.values()):
            missing = {who: ", ".join(map(str, its)) for who, its in lacking.items() if its}
            lacks = " and ".join(f"{who} lacks seed {its}" for who, its in missing.items())
            each = "; ".join(f"{who} {_by_seed(right[who])}" for who in (BASELINE, name))
            why = f"{lacks or 'fewer than two seeds'}; it is judged by pairs of equal seeds, two at least: {each}"
            found.append(Verdict("C16", what, theirs, why=why))
            continue
        pairs = [right[name][seed] - right[BASELINE][seed] for seed in seeds]
        apart = abs(statistics.mean(pairs))
        spread, noise = statistics.stdev(pairs), half_width(pairs)
        ours, standard = (statistics.mean(right[each].values()) for each in (name, BASELINE))
        guesses = {each["seed"]: each["most_frequent"] / each["of"] for each in samples}
        guessed = statistics.mean(guesses.values())
        shares = (right[each].items() for each in (BASELINE, name))
        learned = [sum(share > guesses[seed] + EQUAL for seed, share in each) for each in shares]
        passed: bool | None = apart + noise <= EQUAL
        why = (
            f"{100 * apart:.1f} points apart, give or take {100 * noise:.1f} (95 %, pairs of {len(seeds)} seeds), "
            f"after {samples[0]['steps']} steps; equal is within {100 * EQUAL:.0f}. "
            f"The most frequent answer alone is right in {100 * guessed:.1f} %, and more than that was learned "
            f"with {learned[0]} and {learned[1]} seeds"
        )
        if min(ours, standard) <= guessed + EQUAL:
            passed, nothing = None, "nothing to compare: no more than the most frequent answer was learned"
            why = f"{nothing}; {why}"
        elif not passed and apart - noise <= EQUAL:
            enough = math.ceil((1.96 * spread / EQUAL) ** 2)
            few = f"too few seeds to tell: pairs spread by {100 * spread:.1f} points, so it takes about {enough}"
            why = f"{few}, three runs each; {why}"
        found.add("C16", what, theirs, _percent(standard, ours), passed, why)


def _rights(samples: list[Sample], name: str) -> dict[int, float]:
    """The share of a contender's right answers, by seed."""
    return {each["seed"]: each["right"] / each["of"] for each in samples if each["contender"] == name}


def _by_seed(right: dict[int, float]) -> str:
    return ", ".join(f"{100 * share:.1f} % (seed {seed})" for seed, share in sorted(right.items())) or "none"


def _percent(standard: float, ours: float) -> str:
    return f"{100 * standard:.1f} and {100 * ours:.1f} %"
