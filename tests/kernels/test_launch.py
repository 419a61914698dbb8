"""What the interpreter skips of a launch: Triton's reading of the arguments, compilation, and the way around both.

About 15 s. In a process of its own, where Triton is told that an H100 is there and a launch is only noted down.
"""

import os
import subprocess
import sys

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget

launched, everything = [], []

def plainly(each):
    # What a launch says but for where tensors are, which differs from call to call.
    if hasattr(each, "block_shape"):
        return each.base.dtype, list(each.shape), list(each.strides), each.block_shape, repr(each.layout)
    return "pointer" if isinstance(each, torch.Tensor) or (isinstance(each, int) and each > 2**32) else each

class Launcher:
    def __init__(self, src, metadata): self.takes = len(src.fn.arg_names)
    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *arguments):
        assert len(arguments) == self.takes
        everything.append(list(map(plainly, arguments)))
        arguments = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        launched.append((self, (x, y, z), arguments[0], arguments[16:]))  # no kernel has more pointers

class Utils:
    def load_binary(self, *arguments): return object(), object(), 0, 0, 1024
    def get_device_properties(self, device): return {"max_shared_mem": 232448}

class Driver:
    utils, launcher_cls = Utils(), Launcher
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
from kernels.flash import api, hopper_launch, launch, masks, tiers, tiles

launch.architecture = lambda device: 90
KERNELS = launch.KERNELS.values()
slow = []
for kernel in KERNELS:
    kernel.run = lambda *arguments, run=kernel.run, **options: slow.append(run) or run(*arguments, **options)

def step(q, k, v, rules, tensors):
    out, lse, low = api.flash_forward(q, k, v, *tensors, *rules, True)
    api.flash_backward(out, lse, out, lse, low, q, k, v, *tensors[:2], *tensors[3:], *rules)

def packed(length, heads=4, kv_heads=4, batch=2, offset=0, dtype=torch.bfloat16):
    numbers = torch.randn(batch * length * 3 * heads * 64 + offset).to(dtype)
    qkv = numbers[offset:].view(batch, length, 3, heads, 64)
    q, k, v = (qkv[:, :, each].transpose(1, 2) for each in range(3))
    return q, k[:, :kv_heads], v[:, :kv_heads]

def compiled():
    return [len(kernel.device_caches[0][0]) for kernel in KERNELS]

plain, nothing = (True, 0.125, 0.0, -1, -1, 0.0, "auto"), (None,) * 8
for length in (256, 512, 1, 77):  # of one length class, and so of one tile
    step(*packed(length), plain, nothing)
assert compiled() == [1, 1, 1], "a new length of the class compiled again"
bounds, mask = torch.tensor([0, 100, 512], dtype=torch.int32), torch.ones(1, 1, 2, 2, dtype=torch.bool)
del launched[:]
for _ in range(2):
    documents = masks.document_bounds(bounds, 2, 256)
    blocks = masks.block_lists(mask, 256, 256, True, -1, -1)
assert launched[:2] == launched[2:] and launched[0] != launched[1]
slopes, lengths = torch.rand(4), torch.zeros(2, dtype=torch.int32)
features = (torch.tensor(3), slopes, slopes, *documents, lengths, *blocks)
step(*packed(256, kv_heads=1), (True, 0.125, 0.1, 30, -1, 5.0, "auto"), features)
assert compiled() == [2, 2, 2]

# What was launched once goes around Triton the next time, and comes to the same kernel and grid.
def alone(q, k, v): return q.contiguous(), k.contiguous(), v.contiguous()
cases = [
    (packed(256), plain, nothing),
    (packed(100, batch=1), plain, nothing),
    (alone(*packed(77)), plain, nothing),
    (packed(256, dtype=torch.float16), plain, nothing),
    (packed(256, kv_heads=2), plain, nothing),
    (packed(256), (False, *plain[1:]), nothing),
    (packed(256), (*plain[:3], 64, -1, 0.0, "auto"), nothing),
    (packed(256, kv_heads=1), (True, 0.125, 0.1, 30, -1, 5.0, "auto"), features),
    (packed(256), plain, (None, slopes.bfloat16(), slopes, *nothing[3:])),
    (packed(256), plain, (None, slopes, slopes.bfloat16(), *nothing[3:])),
    (packed(256), plain, (*nothing[:6], *blocks)),
    ([x[:, :, :, :48] for x in packed(256)], plain, nothing),
    ([x.new_zeros(1, 4, 64, 65)[..., :64] for x in packed(64)], plain, nothing),
]
def launches(case):
    del launched[:], slow[:]
    (q, k, v), rules, tensors = case
    step(q, k, v, rules, tensors)
    assert len(launched) == 3
    return launched[:]

chosen = []
for case in cases:
    launch._known.clear()
    chosen.append(launches(case))
    assert len(slow) == 3
launch._known.clear()
for repeat in range(2):
    for number, (case, want) in enumerate(zip(cases, chosen)):
        assert launches(case) == want, f"case {number}: another kernel, grid or number"
        assert not (repeat and slow), f"case {number}: Triton read the arguments again"
kernels = [[launcher for launcher, *_ in each] for each in chosen]
assert kernels[8] != kernels[9] and kernels[0] != kernels[2]

# Another tile than the table's is another launch, and is not remembered.
with tiles.forced(forward=tiles.Tile(32, 32, 4, 2)):
    assert launches(cases[0])[0] != chosen[0][0] and slow
assert launches(cases[0]) == chosen[0]

# A pointer that is no multiple of 16 bytes: never through the shortcut, and a kernel of its own.
step(*packed(256), plain, nothing)
del slow[:], launched[:]
for _ in range(2):
    step(*packed(256, offset=1), plain, nothing)
assert len(slow) == 6 and launched[0][0] is not kernels[0][0]

# The Hopper kernels, told that they serve: the second time the same kernels, grids, descriptors and numbers.
tiers.machine_lacks = lambda device: None
hopper_launch.processors = lambda device: 132
HOPPER = hopper_launch.hopper_forward_kernel, hopper_launch.hopper_backward_kernel
for kernel in HOPPER:
    kernel.run = lambda *arguments, run=kernel.run, **options: slow.append(run) or run(*arguments, **options)
hopper = [(packed(256), plain), (packed(256), (False, *plain[1:])), (alone(*packed(200, batch=1)), plain)]
first = []
for repeat in range(2):
    for number, ((q, k, v), rules) in enumerate(hopper):
        del launched[:], everything[:], slow[:]
        out, lse, low = api.flash_forward(q, k, v, *nothing, *rules, False)
        api.flash_backward(torch.randn_like(q), None, out, lse, None, q, k, v, *nothing[:7], *rules)
        seen = [each[:2] for each in launched], everything[:]
        assert len(launched) == 4 and bool(slow) != bool(repeat), (number, repeat, len(launched), len(slow))
        assert not repeat or seen == first[number], f"case {number}: another kernel, grid, descriptor or number"
        first.append(seen)
assert len({each[0][0][0] for each in first}) == 2, "causal and full are different kernels"
print("done")
"""


def test_launches_compile_once_and_the_shortcut_finds_the_same_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "done"
