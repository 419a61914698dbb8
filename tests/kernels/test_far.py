"""Kernels on what lies so far apart that 32 bits do not count it, in the interpreter. About 10 s.

In processes of their own, which a wrong address would end.
"""

import os
import subprocess
import sys

FAR = """
import mmap, torch
from kernels import get_attention
from kernels.flash import api

def far(shape, strides, dtype):
    # Zeros. Only what is touched takes memory, in pages of 4 KB: the rest is not even promised (MAP_NORESERVE).
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    memory = mmap.mmap(-1, (last + 1) * dtype.itemsize, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

def far_like(x, *strides): return far(x.shape, strides, x.dtype).copy_(x)
"""

TOKENS = """
near = [torch.randn(1, 1, 100, 16).half() for _ in range(4)]
TOKEN = 35_000_000  # the interpreter's smallest tile has 64 rows

def results(tensors):
    q, k, v, d_out = tensors
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = get_attention("flash")(*leaves, return_lse=True)
    return [out, lse, *torch.autograd.grad(out, leaves, d_out)]

want = results(near)
apart = [far_like(x.detach(), 1, 1, TOKEN, 1) for x in near]
api.empty_like = lambda x: far(x.shape, x.stride(), x.dtype)
got = results(apart)
assert [x.stride(2) for x in got] == [TOKEN, 1, TOKEN, TOKEN, TOKEN]
assert all(map(torch.equal, got, want))
print("done")
"""


def said(program: str) -> str:
    """What the program prints when none of its assertions has failed."""
    done = subprocess.run(
        [sys.executable, "-c", FAR + program],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return done.stdout.strip()


def test_tokens_may_lie_far_apart() -> None:
    assert said(TOKENS) == "done"
