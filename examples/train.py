"""Train a small GPT-2 on the source code of your Python and let it write: text, tokens, batches, model, sampling.

    python examples/train.py

Seconds on a CPU. In a checkout `tilegpt` is the folder beside this file; elsewhere `pip install ".[data]"` brings it.
"""

import torch
from tilegpt.data.corpora import make_corpus
from tilegpt.data.loader import Batches
from tilegpt.data.prepare import prepare
from tilegpt.kernels import packed_form, resolve_attention
from tilegpt.model import GPT, GPTConfig
from tilegpt.model.generate import generate

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

text = make_corpus("python_source", limit_documents=100)
corpus = prepare(text, "bytes", "tokens", workers=1)  # more processes need `if __name__ == "__main__":`
batches = Batches(corpus.train, seq_len=64, sequences_per_batch=8, seed=0)

name, attention = resolve_attention("auto", device=device, dtype=torch.float32, head_dim=32)
config = GPTConfig(vocab_size=corpus.n_vocab, seq_len=64, n_layer=2, n_head=2, n_embd=64)
model = GPT(config, attention, packed=packed_form(attention)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(50):
    inputs, targets = (torch.from_numpy(array).to(device) for array in batches.batch(step))
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

tokenizer = corpus.tokenizer()
prompt = torch.tensor([tokenizer.encode("def ")], device=device)
print(f"attention={name}, loss {loss.item():.2f}")
print(tokenizer.decode(generate(model, prompt, 60)[0].tolist()))
