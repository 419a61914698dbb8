"""Load the model of a run, write it as a Hugging Face checkpoint, and read that back.

    python examples/huggingface.py runs/NAME/checkpoints/step-00002400 FOLDER

In a checkout `tilegpt` is the folder beside this file; elsewhere `pip install . transformers` brings what it needs.
"""

import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from tilegpt.kernels import get_attention
from tilegpt.model import GPT, GPTConfig, from_huggingface, to_huggingface

if len(sys.argv) != 3:
    sys.exit("usage: python examples/huggingface.py runs/NAME/checkpoints/step-00002400 FOLDER")
checkpoint, folder = map(Path, sys.argv[1:])
shape = yaml.safe_load((checkpoint.parents[1] / "config.yaml").read_text())["model"]
del shape["loss"], shape["block"]  # what computed its layers
attention = get_attention("sdpa")
model = GPT(GPTConfig(**shape), attention)
model.load_state_dict(load_file(checkpoint / "weights.safetensors"))

to_huggingface(model).save_pretrained(folder)
same = from_huggingface(folder, attention)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
print(f"{same.num_parameters():,} parameters in {folder}")
