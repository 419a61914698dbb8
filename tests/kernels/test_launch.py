"""The parts of a launch that the interpreter skips: Triton's reading of arguments, compilation, our bypass of both.

About 10 s. The tests run in separate processes, where Triton is told that there is an H100 and launches are only
recorded.
"""

import os
import subprocess
import sys

import pytest

DRIVER = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

class Utils:
    def load_binary(self, *arguments): return object(), object(), 0, 0, 1024
    def get_device_properties(self, device): return {"max_shared_mem": 232448}

class Driver:
    utils = Utils()
    def get_current_device(self): return 0
    def get_current_stream(self, device): return max(device, 0)  # of the CPU, -1, as of device 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

# Nobody runs these kernels: Triton's IR of each will do, and what the stages behind it would note down. With them the
# portable ones took 43 s of processor time where nothing was in Triton's cache, and 6 s without.
def noted_only(self, module, metadata, *rest):
    metadata |= {"name": str(module).split("tt.func public @")[1].split("(")[0], "shared": 0, "tmem_size": None}
    metadata |= {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    return ""

CUDABackend.make_ptx = lambda *stage: ""
CUDABackend.make_cubin = lambda *stage: b""
slow = []

def count_slow(kernels):
    for kernel in kernels:
        kernel.run = lambda *arguments, run=kernel.run, **options: slow.append(run) or run(*arguments, **options)

def packed(length, heads=4, kv_heads=4, batch=2, offset=0, dtype=torch.bfloat16, head_dim=64):
    numbers = torch.randn(batch * length * 3 * heads * head_dim + offset).to(dtype)
    qkv = numbers[offset:].view(batch, length, 3, heads, head_dim)
    q, k, v = (qkv[:, :, each].transpose(1, 2) for each in range(3))
    return q, k[:, :kv_heads], v[:, :kv_heads]

def alone(q, k, v): return q.contiguous(), k.contiguous(), v.contiguous()
"""

PORTABLE = """
CUDABackend.make_ttgir = noted_only
CUDABackend.make_llir = lambda *stage: ""
launched, told = [], []

class Launcher:
    def __init__(self, src, metadata): self.takes = len(src.fn.arg_names)
    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *arguments):
        assert len(arguments) == self.takes
        if enter is not None: enter(launch_metadata)
        arguments = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        launched.append((self, (x, y, z), arguments[0], arguments[16:]))  # no kernel has more pointers

Driver.launcher_cls = Launcher
triton.runtime.driver.set_active(Driver())
from kernels import launch
from kernels.flash import masks, operators
from kernels.flash.call import Options, Tensors
from kernels.flash.portable import launch as portable_launch
from kernels.flash.portable import tiles

portable_launch.architecture = lambda device: 90
KERNELS = portable_launch.KERNELS.values()
count_slow(KERNELS)

def step(q, k, v, options, tensors):
    rest = (*tensors, *options._replace(precise_delta=True))
    out, lse, low = operators.flash_forward(q, k, v, *rest)
    operators.flash_backward(out, lse, out, lse, low, q, k, v, *rest)

def compiled():
    return [len(kernel.device_caches[0][0]) for kernel in KERNELS]

plain, nothing = Options(True, 0.125), Tensors()
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
features = Tensors(torch.tensor(3), slopes, slopes, *documents, lengths, *blocks)
step(*packed(256, kv_heads=1), Options(True, 0.125, 0.1, 30, -1, 5.0), features)
assert compiled() == [2, 2, 2]

# What was launched once goes around Triton the next time, and comes to the same kernel and grid.
cases = [
    (packed(256), plain, nothing),
    (packed(100, batch=1), plain, nothing),
    (alone(*packed(77)), plain, nothing),
    (packed(256, dtype=torch.float16), plain, nothing),
    (packed(256, kv_heads=2), plain, nothing),
    (packed(256), Options(False, 0.125), nothing),
    (packed(256), Options(True, 0.125, left=64), nothing),
    (packed(256, kv_heads=1), Options(True, 0.125, 0.1, 30, -1, 5.0), features),
    (packed(256), plain, Tensors(None, slopes.bfloat16(), slopes)),
    (packed(256), plain, Tensors(None, slopes, slopes.bfloat16())),
    (packed(256), plain, Tensors(*[None] * 6, *blocks)),
    ([x[:, :, :, :48] for x in packed(256)], plain, nothing),
    ([x.new_zeros(1, 4, 64, 65)[..., :64] for x in packed(64)], plain, nothing),
    # Each differs in one thing from one above: strides, the scale, the strides of the block lists.
    (alone(*packed(256)), plain, nothing),
    (packed(256), Options(True, 0.25), nothing),
    (packed(256), plain, Tensors(*[None] * 6, *[x.expand(2, 4, *x.shape[2:]).contiguous() for x in blocks])),
]
def launches(case):
    del launched[:], slow[:]
    (q, k, v), options, tensors = case
    step(q, k, v, options, tensors)
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

# Who wants to be told of launches is told of each, by Triton, and afterwards nobody is.
enter = triton.knobs.runtime.launch_enter_hook
tell = lambda metadata: told.append(metadata.get()["name"])
enter.add(tell)
for _ in range(2):
    assert launches(cases[0]) == chosen[0] and len(slow) == 3
assert told == ["forward_kernel", "dq_kernel", "dkdv_kernel"] * 2
enter.remove(tell)
assert launches(cases[0]) == chosen[0] and not slow and len(told) == 6

# Tensors of another device than the current one: launched there, each device's kernel on its own stream.
class Pointer:
    dtype = torch.float32
    def __init__(self, device): self.get_device = lambda: device
    def data_ptr(self): return 64

class Compiled:
    function, packed_metadata = "function", "metadata"
    def run(self, x, y, z, stream, *rest): ran.append((current[-1], "again", stream))

class Kernel:
    def __getitem__(self, grid): return lambda *arguments, **options: ran.append((current[-1], "first")) or Compiled()

class Device:
    def __init__(self, device): self.device = device
    def __enter__(self): current.append(self.device)
    def __exit__(self, *error): current.pop()

ran, current = [], [0]
torch.cuda.current_device, torch.cuda.device = lambda: current[-1], Device
for device in (0, 1, 1, 0):
    launch.launch((Pointer(device),), ("test",), lambda: (Kernel(), (1, 1, 1), (), {}))
assert ran == [(0, "first"), (1, "first"), (1, "again", 1), (0, "again", 0)] and current == [0]

# The loss's kernel too, which Triton compiles and launches on the device that it asks the driver for.
class Noted:
    def __init__(self, src, metadata): pass
    def __call__(self, x, y, z, stream, *rest): noted.append((current[-1], stream))

class Second(torch.Tensor):
    def get_device(self): return 1

def second(*shape, dtype=torch.float32): return torch.zeros(shape, dtype=dtype).as_subclass(Second)

from kernels.layers.softmax_gradient import Terms, softmax_gradient
noted, Driver.launcher_cls, Driver.get_current_device = [], Noted, lambda self: current[-1]
for _ in range(2):
    softmax_gradient(second(4, 64), second(4, dtype=torch.int64), second(4), 64, True, Terms())
assert noted == [(1, 1), (1, 1)] and current == [0]
print("done")
"""

HOPPER = """
# Triton's own launcher down to what it hands to its C part, which must be the same from an earlier launch.
import triton.backends.nvidia.driver as nvidia

CUDABackend.make_llir = noted_only
given, encoded = [], []
Utils.launch = staticmethod(lambda *arguments: given.append(arguments))
Utils.build_signature_metadata = staticmethod(tuple)
Utils.fill_tma_descriptor_tiled = staticmethod(lambda *what: encoded.append(what) or ("map", what))
nvidia.PyKernelArg = lambda **annotation: tuple(annotation.items())
Driver.launcher_cls = nvidia.CudaLauncher
triton.runtime.driver.set_active(Driver())
from kernels import launch
from kernels.flash.call import Options, Tensors
from kernels.flash.hopper import launch as hopper_launch

hopper_launch.sm_count = lambda device: 132
count_slow([hopper_launch.hopper_forward_kernel, hopper_launch.hopper_backward_kernel])
count_slow([hopper_launch.delta_kernel, hopper_launch.round_kernel])
count_slow([hopper_launch.dkdv_kernel, hopper_launch.dq_kernel, hopper_launch.clear_kernel])

def plainly(calls):
    # Addresses by the order in which they appear: they differ from call to call, but which are equal does not.
    # No size here is as large, and a heap can begin below 2**32.
    places = {}
    def plain(each):
        if isinstance(each, torch.Tensor): each = each.data_ptr()
        if isinstance(each, int) and each > 2**24: return "place", places.setdefault(each, len(places))
        return tuple(map(plain, each)) if isinstance(each, (tuple, list, torch.Size)) else each
    # Of the metadata and hooks of a launch nothing is left where no hook is.
    return [plain((*call[:8], *call[11:])) for call in calls]

def step(q, k, v, causal, scale=0.125, out=None, left=-1, documents=None, precise=False, dropout_p=0.0, **features):
    assert hopper_launch.fits_forward(q, k, v)
    out = torch.empty_like(q) if out is None else out
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    starts = ends = None if documents is None else torch.zeros(documents, dtype=torch.int32)
    options = Options(causal, scale, dropout_p, left, precise_delta=precise)
    asked = Tensors(document_starts=starts, document_ends=ends, **features), options
    low = torch.empty_like(out)
    hopper_launch.forward(q, k, v, out, low, lse, *asked)
    d_out, dq, dk, dv, delta = (torch.empty_like(x) for x in (q, q, k, v, lse))
    assert hopper_launch.fits_backward(q, k, v, out, d_out)
    hopper_launch.backward(d_out, None, out, low, lse, q, k, v, dq, dk, dv, delta, *asked)

cases = [
    (packed(256), True),
    (packed(256), False),
    (packed(2048), True),  # claims its tiles
    (alone(*packed(256)), True),
    (alone(*packed(200, batch=1)), True),
    (packed(256, heads=1, kv_heads=1), True),
    (packed(256, dtype=torch.float16), True),
    (packed(512, head_dim=128), True),  # out by TMA too
    (packed(512, head_dim=128, dtype=torch.float16), True),
    (packed(4096, batch=1), True),  # and with claimed tiles
    # Each differs in one thing from the first: the heads of keys, the scale, the keys' length, the output's strides.
    (packed(256, kv_heads=2), True),
    (packed(256), True, 0.25),
    ((packed(256)[0], *packed(384)[1:]), True),
    (packed(256), True, 0.125, torch.empty(2, 4, 256, 64, dtype=torch.bfloat16)),
    (packed(256), True, 0.125, None, 100),  # in a window
    (packed(256), True, 0.125, None, 101),
    (packed(256), True, 0.125, None, -1, (2, 256)),  # in documents
    (packed(256), True, 0.125, None, -1, None, True),  # with the rounding error of out
    (packed(256), True, {"kv_lengths": torch.zeros(2, dtype=torch.int32)}),
    (packed(256), True, {"sinks": torch.zeros(4)}),
    (packed(256), True, {"sinks": torch.zeros(4, dtype=torch.bfloat16)}),
    (packed(256), True, {"dropout_p": 0.1, "seed": torch.zeros((), dtype=torch.int64)}),
    (packed(256), True, {"dropout_p": 0.2, "seed": torch.zeros((), dtype=torch.int64)}),
    (packed(256, head_dim=40), True),
    (packed(256, head_dim=256), True),
    (packed(256, head_dim=256), False),
    (packed(256, head_dim=256), True, 0.125, None, 100),
    (packed(256, head_dim=256), True, 0.125, None, 101),
    (packed(256, head_dim=256), True, 0.125, None, -1, (2, 256)),
]
wanted = []
for repeat in range(3):
    for number, (tensors, *options) in enumerate(cases):
        if repeat == 2:  # at other addresses
            tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in tensors]
        del given[:], slow[:], encoded[:]
        if repeat == 0: launch._known.clear()
        features = options.pop() if isinstance(options[-1], dict) else {}
        step(*tensors, *options, **features)
        launches = 5 if "kv_lengths" in features else 4  # one sets dK and dV of padding to 0
        some = len(given), len(slow)
        assert some == (launches, 0 if repeat else launches), (repeat, number, *some)
        # Triton encodes 3, or with out 4, and 7, or 3, 4 and 4 at head_dim 256; again only what is at other
        # addresses, and the allocator may give those of before.
        wide = tensors[0].shape[3] > 128
        whole = (11,) if wide else (10, 11)
        some = whole if repeat == 0 else (0, 3, 4, 7, 8, *whole)
        assert len(encoded) in some, (repeat, number, len(encoded))
        wanted.append(plainly(given))
        pairs = ((x, y) for calls in zip(wanted[number], wanted[-1]) for x, y in zip(*calls))
        other = [pair for pair in pairs if pair[0] != pair[1]]
        assert not other, f"case {number}, repeat {repeat}: something else is launched: {other}"
    if repeat == 0:
        for tensors, *options in cases:
            features = options.pop() if isinstance(options[-1], dict) else {}
            step(*tensors, *options, **features)
assert len({str(each) for each in wanted}) == len(cases)

# At the addresses of before nothing is encoded, unless it lies there in another order; what is kept is bounded.
q, k, v = (x.contiguous() for x in cases[0][0])
inside = k.view(2, 256, 4, 64).transpose(1, 2)
out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

def encodes(q, k):
    del encoded[:]
    hopper_launch.forward(q, k, v, out, out, lse, Tensors(), Options(True, 0.125))
    return len(encoded)

launch._encoded.clear()  # these tensors may lie where freed ones did
assert [encodes(q, each) for each in (k, k, inside, inside, inside, k)] == [4, 0, 4, 4, 0, 0]
of_k = [list(call[-1][9:18]) for call in given[-6:]]
assert of_k[0] == of_k[1] == of_k[5] != of_k[2] == of_k[3] == of_k[4]
launch._encoded.clear()
launch.LIMIT = 3
many = [torch.empty_like(q) for _ in range(5)]
assert [encodes(each, k) for each in (*many, many[-1], many[0])] == [4, 4, 4, 4, 4, 0, 4]
print("done")
"""


def said(program: str, **variables: str) -> str:
    """What the program prints when none of its assertions has failed."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | variables
    done = subprocess.run(
        [sys.executable, "-c", DRIVER + program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_launches_compile_once_and_the_shortcut_finds_the_same_kernels(tmp_path) -> None:
    # With a separate cache: another process would take these kernels for real ones.
    assert said(PORTABLE, TRITON_CACHE_DIR=str(tmp_path)) == "done"


@pytest.mark.slow
def test_a_repeated_hopper_launch_passes_triton_the_same_arguments(tmp_path) -> None:
    import triton

    from kernels.versions import OLDEST_GLUON, numbers_of

    if numbers_of(triton.__version__) < OLDEST_GLUON:
        pytest.skip(f"the Hopper kernels do not compile with triton {triton.__version__}")
    assert said(HOPPER, TRITON_CACHE_DIR=str(tmp_path)) == "done"
