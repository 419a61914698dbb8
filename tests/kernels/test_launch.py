"""What the interpreter skips of a launch: Triton's own reading of the arguments, and compilation from it. About 10 s.

In a process of its own, where Triton is told that an H100 is there and every launch stops once compiled.
"""

import os
import subprocess
import sys

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
from kernels.flash import api
from kernels.flash.backward import dkdv_kernel, dq_kernel
from kernels.flash.forward import forward_kernel

api._architecture = lambda device: 90
KERNELS = forward_kernel, dq_kernel, dkdv_kernel
for kernel in KERNELS:
    kernel.run = lambda *arguments, run=kernel.run, **options: run(*arguments, **{**options, "warmup": True})

def step(length, rules, tensors, kv_heads=4):
    qkv = torch.randn(2, length, 3, 4, 64, dtype=torch.bfloat16)
    q, k, v = (qkv[:, :, each].transpose(1, 2) for each in range(3))
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    out, lse, low = api.flash_forward(q, k, v, *tensors, *rules, True)
    api.flash_backward(out, lse, out, lse, low, q, k, v, *tensors[:2], *tensors[3:], *rules)

plain = (True, 0.125, 0.0, -1, -1, 0.0), (None,) * 8
for length in (256, 1024, 1, 77):
    step(length, *plain)
assert [len(kernel.device_caches[0][0]) for kernel in KERNELS] == [1, 1, 1], "a new length compiled again"
documents = torch.zeros(2, 256, dtype=torch.int32)
blocks = api._block_lists(torch.ones(1, 1, 2, 2, dtype=torch.bool), 256, 256, True, -1, -1)
slopes = torch.rand(4)
everything = (torch.tensor(3), slopes, slopes, documents, documents, documents[:, 0].contiguous(), *blocks)
step(256, (True, 0.125, 0.1, 30, -1, 5.0), everything, kv_heads=1)
print([len(kernel.device_caches[0][0]) for kernel in KERNELS])
"""


def test_launches_compile_and_lengths_do_not_compile_again() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "[2, 2, 2]"
