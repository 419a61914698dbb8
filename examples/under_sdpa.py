"""Our kernels in a model that calls torch's scaled_dot_product_attention, which stays as it is.

    python examples/under_sdpa.py

It needs a CUDA device and torch 2.11 or later. flash then runs wherever torch would have run its own flash backend.
In a checkout `tilegpt` is the folder beside this file; elsewhere `pip install .` brings it.
"""

import sys

import tilegpt.kernels
import torch
from tilegpt.kernels.versions import kernels_lack
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available():
    sys.exit("no CUDA device, where torch has a flash backend to replace; examples/train.py runs on a CPU")
if missing := kernels_lack():
    sys.exit(f"our kernels need {missing}")
q, k, v = torch.randn(3, 4, 12, 1024, 64, device="cuda", dtype=torch.bfloat16)
theirs = scaled_dot_product_attention(q, k, v, is_causal=True)

tilegpt.kernels.register()
torch.nn.attention.activate_flash_attention_impl("tilegpt")
ours = scaled_dot_product_attention(q, k, v, is_causal=True)
print(f"largest difference {(ours - theirs).abs().max().item():.4f}")
