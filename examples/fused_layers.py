"""GPT-2 with all of our kernels: attention, the blocks' other layers, the token embedding, the head with its loss.

    python examples/fused_layers.py

It needs a CUDA device; with TRITON_INTERPRET=1 and NumPy it runs on a CPU, in seconds. In a checkout `tilegpt` is
the folder beside this file; elsewhere `pip install .` brings it.
"""

import sys

import torch
from tilegpt.kernels import get_attention, packed_form
from tilegpt.kernels.layers import lacking
from tilegpt.model import FusedGPT, FusedLayers, GPTConfig

if missing := lacking("cuda" if torch.cuda.is_available() else "cpu"):
    sys.exit(f"GPT-2 with our kernels needs {missing}")

from tilegpt.kernels.layers.dropout import dropout
from tilegpt.kernels.layers.embedding import embedding
from tilegpt.kernels.layers.linear_add_norm import dropout_add_norm
from tilegpt.kernels.layers.linear_cross_entropy import linear_cross_entropy
from tilegpt.kernels.layers.linear_gelu import linear_gelu
from tilegpt.kernels.layers.mlp import mlp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
flash = get_attention("flash")
layers = FusedLayers(linear_gelu, dropout_add_norm, embedding, dropout, mlp=mlp)
config = GPTConfig(vocab_size=1000, seq_len=32, n_layer=1, n_head=1, n_embd=64, dropout=0.1)
model = FusedGPT(config, flash, layers, packed=packed_form(flash), loss=linear_cross_entropy).to(device)

tokens = torch.randint(config.vocab_size, (1, 33), device=device)
loss = model(tokens[:, :-1], tokens[:, 1:], dropout_seed=torch.tensor(0, device=device))
loss.backward()
print(
    f"loss {loss.item():.2f}, largest gradient {max(p.grad.abs().max().item() for p in model.parameters()):.3f}"
)
