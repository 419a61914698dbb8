"""HellaSwag during training: how often the right one of four endings is the likeliest.

Zellers et al. 2019, arXiv 1905.07830. Texts, tokens and scores are those of lm-evaluation-harness, whose acc_norm of
the exported model is the same number: an ending's log-likelihood after its context, divided by its characters.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import tiktoken
import torch
from torch.nn import functional as F

from model.gpt import GPT

from .config import Config, ConfigError
from .distributed import World
from .files import replace_file

FILE = "hellaswag_val.jsonl"  # the validation split, 10,042 questions
COMMIT = "a29ff8e9a04bba4bd6588223785ce105328adc57"
URL = f"https://raw.githubusercontent.com/rowanz/hellaswag/{COMMIT}/data/{FILE}"
GIT_BLOB = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # of the file, in that commit
TIMEOUT = 30


class Ending(NamedTuple):
    tokens: list[int]  # of the context and the ending
    scored: int  # how many of these, the last ones, are the ending's
    characters: int


class Question(NamedTuple):
    endings: list[Ending]
    right: int


def load(config: Config, tokenizer: tiktoken.Encoding, ranks: World) -> list[Question]:
    """The questions of trainer.hellaswag_file, or else of the file that is downloaded once into data.cache_dir.

    Raises ConfigError for a file that is neither there nor reachable, or not in the released format, and for a
    model.seq_len that is too short for an ending.
    """
    path = Path(config.trainer.hellaswag_file or Path(config.data.cache_dir) / FILE)
    for turn in (True, False):  # rank 0 first: then the others find what it has downloaded
        if ranks.is_main is turn and not path.exists():
            if config.trainer.hellaswag_file:
                raise ConfigError(f"trainer.hellaswag_file={path} does not exist.")
            _download(path)
        ranks.share(None)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        questions = [_question(json.loads(line), tokenizer) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of HellaSwag's ({type(error).__name__}: {error}).") from None
    if not questions:
        raise ConfigError(f"{path} has no questions.")
    longest = max(ending.scored for each in questions for ending in each.endings)
    if longest > config.model.seq_len:
        raise ConfigError(
            f"trainer.hellaswag: its longest ending has {longest} tokens, more than model.seq_len="
            f"{config.model.seq_len}; use a longer one, or data.tokenizer=gpt2."
        )
    return questions


def _download(path: Path) -> None:
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT) as answer:
            content = answer.read()
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"trainer.hellaswag: {URL} cannot be downloaded ({error}); download it elsewhere, and name it with "
            "trainer.hellaswag_file."
        ) from None
    if hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != GIT_BLOB:
        raise ConfigError(f"trainer.hellaswag: what {URL} sent is not the released file; try again.")
    replace_file(path, content.decode())


def _question(row: dict, tokenizer: tiktoken.Encoding) -> Question:
    context = _plain(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    before = tokenizer.encode_ordinary(context)
    endings = []
    for text in map(_plain, row["endings"]):
        tokens = tokenizer.encode_ordinary(f"{context} {text}")
        endings.append(Ending(tokens, len(tokens) - len(before), len(text)))
    right = int(row["label"])
    if len(endings) != 4 or not all(each.characters for each in endings) or not 0 <= right < 4:
        raise ValueError(f"label {right} of {len(endings)} endings, not 0 to 3 of four that have a text")
    return Question(endings, right)


def _plain(text: str) -> str:
    """Without the markup of the web pages that some texts come from."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def batches(questions: list[Question], sequences: int, world: World) -> list[list[Question]]:
    """This rank's part of the questions, `sequences` endings at a time, in as many batches as on the other ranks."""
    size = max(1, sequences // 4)
    mine = sorted(questions, key=lambda each: len(each.endings[0].tokens))[world.rank :: world.size]
    most = math.ceil(len(questions) / world.size)
    return [mine[start : start + size] for start in range(0, most, size)]


@torch.no_grad()
def accuracy(
    model: GPT,
    batches: Iterable[list[Question]],
    world: World,
    autocast: Callable[[], AbstractContextManager],
) -> float:
    """The share of all ranks' questions that are answered right.

    Uses no random numbers and touches no training state.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.int64, device=world.device)  # right answers, questions
    for several in batches:
        if not several:  # another rank's last batch has one question, and this rank's none
            continue
        endings = [ending for each in several for ending in each.endings]
        with autocast():
            likelihoods = _log_likelihoods(model, endings, world.device)
        scores = likelihoods / torch.tensor([each.characters for each in endings], device=world.device)
        answers = torch.tensor([each.right for each in several], device=world.device)
        totals[0] += (scores.view(len(several), -1).argmax(1) == answers).sum()
        totals[1] += len(several)
    model.train()
    right, asked = world.totals(totals)
    return right / asked


def _log_likelihoods(model: GPT, endings: list[Ending], device: torch.device) -> torch.Tensor:
    """Log-likelihoods of endings after their contexts, float32 (endings,); too long a context loses its beginning."""
    kept = [ending.tokens[-model.config.seq_len - 1 :] for ending in endings]
    length = max(map(len, kept)) - 1
    inputs = torch.zeros(len(kept), length, dtype=torch.int64)
    targets = torch.full_like(inputs, -1)
    for row, (tokens, ending) in enumerate(zip(kept, endings, strict=True)):
        inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        end = len(tokens) - 1
        targets[row, end - ending.scored : end] = torch.tensor(tokens[-ending.scored :])
    inputs, targets = inputs.to(device), targets.to(device)
    scored = targets != -1
    logits = model.logits(model.hidden(inputs)[scored]).float()
    losses = torch.zeros(targets.shape, device=device)
    losses[scored] = F.cross_entropy(logits, targets[scored], reduction="none")
    return -losses.sum(1)
