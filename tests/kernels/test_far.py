"""Kernels on tensors whose elements are so far apart that 32-bit offsets overflow, in the interpreter. About 4 s.

They run in a process of their own, which a wrong address would crash.
"""

import os
import subprocess
import sys

import pytest

FAR = """
import mmap, torch
from kernels import get_attention
from kernels.flash import operators
from kernels.flash.call import Options, Tensors

def far(shape, strides, dtype):
    # Zeros. Only what is touched takes memory, in pages of 4 KB: the rest is not even promised (MAP_NORESERVE).
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    memory = mmap.mmap(-1, (last + 1) * dtype.itemsize, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

def far_like(x, *strides): return far(x.shape, strides, x.dtype).copy_(x)
"""

BLOCKS = """
from kernels.flash import masks
from kernels.flash.portable.masks import BLOCK_MASK_SIZE

def same(got, want): return all(map(torch.equal, got, want))

# A mask whose heads, blocks of queries or blocks of keys lie far apart.
mask = torch.rand(1, 3, 3, 3) > 0.5
lists = masks.block_lists(mask, 384, 384, False, -1, -1)
for strides in ((1, 1_200_000_000, 3, 1), (1, 3, 1_200_000_000, 1), (1, 3, 1, 1_200_000_000)):
    assert same(masks.block_lists(far_like(mask, *strides), 384, 384, False, -1, -1), lists)

# The lists of the third head begin behind 2^31 numbers: as its kernel writes them, here of the first queries of many,
blocks = 2**28
of_queries = far((3, 1 + 4), (blocks * (1 + 4), 1), torch.int32)
of_keys = far((3, 4, 2), (4 * (1 + 2 * blocks), 1 + 2 * blocks, 1 + blocks), torch.int32)  # counts, and places
row = torch.tensor([True, False, False, True]).view(torch.uint8)
numbers = (0, 0, 0, 1, blocks, 4, 0, masks.ANY, masks.ANY, masks.CHUNK)
masks.block_lists_kernel[1, 3, 1](row, of_queries, of_keys, *numbers)
assert of_queries[:, :3].tolist() == [[2, 0, 3]] * 3
assert of_keys[:, :, 1].tolist() == [[0, 0, 0, 1]] * 3

# and as attention reads them.
q, k, v = torch.randn(3, 1, 3, 300, 16).unbind()
def results(lists):
    rest = (*Tensors(key_blocks=lists[0], query_blocks=lists[1]), *Options(True, 0.25))
    out, lse, low = operators.flash_forward(q, k, v, *rest)
    return out, lse, *operators.flash_backward(v, None, out, lse, low, q, k, v, *rest)
assert same(results([far_like(x, 1, 1_200_000_000, x.shape[3], 1) for x in lists]), results(lists))
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
operators.empty_like = lambda x: far(x.shape, x.stride(), x.dtype)
got = results(apart)
assert [x.stride(2) for x in got] == [TOKEN, 1, TOKEN, TOKEN, TOKEN]
assert all(map(torch.equal, got, want))
"""


@pytest.mark.slow
def test_offsets_between_tokens_and_into_block_masks_and_lists_may_exceed_32_bits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAR + BLOCKS + TOKENS],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
