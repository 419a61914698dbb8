"""A rank's part of each sequence: what a model computes of it is that part of what it computes of the whole."""

import pytest
import torch

from model.config import GPTConfig
from model.gpt import document_offsets
from model.modern import build_gpt
from model.part import Part, compute_part, compute_whole
from tests.model.test_fused import LAYERS
from tests.model.test_gpt import TINY, some_tokens

PART = Part(chunks=(1, 2), total=4)
MODERN = {"rope": True, "qk_norm": True, "n_kv_head": 1, "rmsnorm": True, "mlp": "swiglu"}


def values_and_keys(q, k, v, **options):
    """Attention that sees no other token, so that parts need no other rank; of keys it tells the rotation."""
    return q + (v + k).repeat_interleave(q.shape[1] // v.shape[1], 1)


@pytest.mark.parametrize(("switches", "layers"), [({}, None), ({}, LAYERS), (MODERN, None)])
def test_a_part_has_its_hidden_states_loss_and_gradients(switches, layers):
    tokens, targets = some_tokens(2, 16), some_tokens(2, 16).roll(1, 1)
    part, whole = (build_gpt(GPTConfig(**TINY | switches), values_and_keys, layers=layers) for _ in range(2))
    compute_part(part, PART)
    torch.testing.assert_close(part.hidden(tokens), PART.of(whole.hidden(tokens), 1))
    mine = torch.full_like(targets, -1)  # the other tokens' losses do not count
    mine[:, 4:12] = targets[:, 4:12]
    losses = part(tokens, PART.of(targets, 1)), whole(tokens, mine)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(part.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    compute_whole(part)
    torch.testing.assert_close(part.hidden(tokens), whole.hidden(tokens))


def test_attention_is_told_the_documents_of_the_whole_sequences():
    told = []

    def attention(q, k, v, *, cu_seqlens, **options):
        told.append(cu_seqlens)
        return v

    tokens = some_tokens(2, 16)
    model = build_gpt(GPTConfig(**TINY | {"document_end": 3}), attention)
    compute_part(model, PART)
    model(tokens)
    assert told
    assert all(each.equal(document_offsets(tokens, 3)) for each in told)
