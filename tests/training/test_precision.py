"""What torch.compile keeps on disk is kept apart by precision: PyTorch itself does so from 2.13 on only."""

import torch

from training import precision


def test_the_tag_of_compiled_code_names_the_dtype_and_keeps_the_users(monkeypatch):
    tags = []

    def backend(graph, inputs):
        tags.append(torch.compiler.config.cache_key_tag)
        return graph.forward

    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    monkeypatch.setattr(precision, "_USERS_TAG", "mine ")
    for dtype in (torch.bfloat16, torch.float16):
        torch.compiler.reset()
        precision.compiled(torch.nn.Linear(1, 1), dtype, backend)(torch.ones(1))
    assert tags == ["mine torch.bfloat16", "mine torch.float16"]
