"""Evaluation over a split or its beginning: exp of the token-weighted mean NLL, and bits per byte."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import tiktoken
import torch

from data.loader import TokenSplit

from .distributed import World


@dataclass(frozen=True)
class Evaluation:
    # Mean negative log-likelihood in nats over every predicted token.
    loss: float
    # Tokens predicted: all but the first.
    tokens: int
    # UTF-8 bytes of their text. End-of-text tokens add none, although predicting them adds to the loss.
    text_bytes: int

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers, as perplexity is not."""
        return self.loss * self.tokens / (math.log(2) * self.text_bytes)

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, bits per byte {self.bits_per_byte:.3f}"
        )

    def metrics(self) -> dict[str, float]:
        return {
            "val/loss": self.loss,
            "val/perplexity": self.perplexity,
            "val/bits_per_byte": self.bits_per_byte,
        }


def beginning(split: TokenSplit, tokens: int, tokenizer: tiktoken.Encoding) -> TokenSplit:
    """A view of the first part of a split, in which `tokens` tokens are predicted; all of it, if it has no more."""
    if tokens >= split.tokens - 1:
        return split
    part = copy.copy(split)
    part.tokens = tokens + 1
    text = [token for token in part.read(0, part.tokens).tolist() if token != tokenizer.eot_token]
    part.utf8_bytes = len(tokenizer.decode_bytes(text))
    return part


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    text_bytes: int,
    world: World,
    autocast: Callable[[], AbstractContextManager],
) -> Evaluation:
    """Mean NLL of `model` over this rank's (inputs, targets) batches, summed over ranks; targets of -1 are ignored.

    Uses no random numbers and touches no training state.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)  # nats, tokens
    for inputs, targets in batches:
        with autocast():
            loss = model(inputs, targets)
        tokens = (targets != -1).sum()
        totals += torch.stack([loss.double() * tokens, tokens.double()])
    nats, tokens = world.totals(totals)
    model.train()
    return Evaluation(nats / tokens, int(tokens), text_bytes)
