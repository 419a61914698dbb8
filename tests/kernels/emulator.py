"""Runs the Gluon kernels for Hopper on a CPU, their own source as Python, in the least favourable order of events.

Triton's interpreter does not know Gluon. Here every warp that `gl.warp_specialize` starts is a thread, one of which
runs at a time, and whenever one waits or touches shared memory a seeded choice says who goes on. What is asynchronous
on the GPU happens late or early by that choice too: a TMA load or store, and a wgmma, which reads its operands at
some moment between its issue and its wait. So a missing wait, a wrong phase or a stage released too early shows as a
wrong number, an arrival too many as an error, and a deadlock as `Deadlock`, with where each warp stands.

Shared memory begins as NaN. What a warp stored is visible to TMA and wgmma (the asynchronous proxy) only after its
`fence_async_shared`. Not emulated: layouts, registers, order within a warpgroup, and caches.
"""

import math
import random
import re
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from kernels.philox import philox, philox_mask

DTYPES = {gl.float32: torch.float32, gl.float16: torch.float16, gl.bfloat16: torch.bfloat16}
DTYPES |= {gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64}
DTYPES |= {gl.uint32: torch.int64}  # which has all its values
NOTHING = SimpleNamespace(layout=None)
# By seed, how often what is asynchronous happens although a warp could go on: with the second, almost only when none
# can. A consumer then outruns a load whose wait is missing, which the first alone did not show in 180 steps.
HASTE = (0.3, 0.02, 0.8)


class Deadlock(Exception):
    """No warp can go on, and nothing asynchronous is under way."""


def emulate(kernel: JITFunction, grid: tuple[int, ...], arguments: tuple[object, ...], seed: int = 0) -> int:
    """Run every program of a Gluon kernel. arguments: the kernel's, tensors and descriptors on the CPU.

    Returns the bytes of global memory that its loads and stores ask for; without those of atomics.
    """
    machine = _Machine(seed)
    machine.run(kernel, grid[0], arguments)
    return machine.moved


class Scalar(int):
    """An int32 of the kernel: division truncates, as on the GPU, and comparisons give numbers."""

    def to(self, dtype: object) -> "Scalar":
        return self


class Float(float):
    """A float32 that was loaded."""

    def to(self, dtype: object) -> "Float":
        return self


def _operation(name: str) -> Callable[[int, object], object]:
    plain = getattr(int, name)

    def operate(self: int, other: object) -> object:
        if not isinstance(other, int):
            return NotImplemented
        if "div" in name or "mod" in name:
            left, right = (int(other), int(self)) if name.startswith("__r") else (int(self), int(other))
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return Scalar(quotient if "div" in name else left - quotient * right)
        return Scalar(plain(self, int(other)))

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Scalar, f"__{_name}__", _operation(f"__{_name}__"))
    setattr(Scalar, f"__r{_name}__", _operation(f"__r{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Scalar, f"__{_name}__", _operation(f"__{_name}__"))
Scalar.__hash__ = int.__hash__


class Registers(torch.Tensor):
    """A tensor in the registers of a warp or warpgroup."""

    type = NOTHING

    def to(self, dtype: object, bitcast: bool = False) -> "Registers":
        wanted = DTYPES[dtype] if not isinstance(dtype, torch.dtype) else dtype
        return self.contiguous().view(wanted) if bitcast else super().to(wanted)

    def split(self) -> tuple["Registers", "Registers"]:
        return self[..., 0], self[..., 1]


class Pointer(NamedTuple):
    memory: torch.Tensor  # flat
    offset: object

    def __add__(self, other: object) -> "Pointer":
        return Pointer(self.memory, self.offset + other)

    def __sub__(self, other: object) -> "Pointer":
        return Pointer(self.memory, self.offset - other)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


class Barrier:
    """An mbarrier: phases of `count` arrivals and the bytes that they announce."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self) -> None:
        assert self.left > 0, "an arrival too many in this phase of an mbarrier"
        self.left -= 1
        self.settle()

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count


class Barriers(list):
    def index(self, each: int) -> Barrier:
        return self[each]


class Shared:
    """A tile of shared memory: as the warps see it, and as TMA and wgmma do."""

    def __init__(self, machine: "_Machine", seen: torch.Tensor, fenced: torch.Tensor) -> None:
        self.machine, self.seen, self.fenced = machine, seen, fenced
        self.shape, self.dtype = list(seen.shape), seen.dtype

    def _view(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Shared":
        return Shared(self.machine, change(self.seen), change(self.fenced))

    def index(self, each: int) -> "Shared":
        assert 0 <= each < self.shape[0], f"index {each} of {self.shape}"
        return self._view(lambda x: x[each])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return self._view(lambda x: x.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> "Shared":
        return self._view(lambda x: x.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._view(lambda x: x.permute(order))

    def load(self, layout: object = None) -> Registers:
        self.machine.turn()
        return self.seen.clone().as_subclass(Registers)

    def store(self, value: torch.Tensor) -> None:
        self.machine.turn()
        value = value.as_subclass(torch.Tensor).to(self.dtype)
        assert value.shape == self.seen.shape
        self.seen.copy_(value)
        self.machine.warp.unfenced.append((self.fenced, value.clone()))


class Descriptor:
    """A TMA descriptor: tiles of `block` elements, zero beyond the end."""

    def __init__(self, described: object) -> None:
        self.tensor, self.block = described.base, list(described.block_shape)
        self.dtype, self.layout = self.tensor.dtype, None
        size = math.prod(self.block) * self.tensor.element_size()
        self.block_type = SimpleNamespace(shape=self.block, nbytes=size)

    def _inside(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        ends = [
            max(0, min(size, first + length) - first)
            for first, length, size in zip(at, self.block, self.tensor.shape, strict=True)
        ]
        assert min(at) >= 0
        return tuple(slice(a, a + end) for a, end in zip(at, ends, strict=True)), tuple(map(slice, ends))

    def bytes_at(self, at: list[int]) -> int:
        outside, _ = self._inside(at)
        return self.tensor[outside].nbytes

    def read(self, at: list[int]) -> torch.Tensor:
        outside, inside = self._inside(at)
        tile = torch.zeros(self.block, dtype=self.dtype)
        tile[inside] = self.tensor[outside]
        return tile

    def write(self, at: list[int], tile: torch.Tensor, add: bool) -> None:
        outside, inside = self._inside(at)
        self.tensor[outside] = tile[inside] + (self.tensor[outside] if add else 0)


class Product:
    """A wgmma under way; `value` once it has run."""

    type = NOTHING

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.run, self.value = run, None


class Warp(threading.Thread):
    """A warp or warpgroup of a program."""

    def __init__(self, machine: "_Machine", program: "Program", body: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.machine, self.program, self.body = machine, program, body
        self.may_go = threading.Lock()  # not a Semaphore, which is written in Python
        self.may_go.acquire()
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for, self.error, self.finished = "start", None, False
        self.unfenced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.products: list[Product] = []  # in order of issue
        self.stores: list[list] = []  # TMA stores: [read, write] or, once read, [write]

    def run(self) -> None:
        self.may_go.acquire()
        try:
            if not self.machine.over:
                self.body()
                assert not self.products, "a wgmma was never waited for"
                assert all(len(each) == 1 for each in self.stores), "a TMA store reads memory that has ended"
        except BaseException as error:  # handed to the thread that asked
            self.error = error
        self.finished = True
        self.machine.baton.release()


class Program(NamedTuple):
    number: int
    meeting: list  # warps at the named barrier


class _Machine:
    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.haste = HASTE[seed % 3]
        self.baton = threading.Semaphore(0)
        self.over, self.warp, self.warps = False, None, []
        self.moved = 0
        self.loads: list[Callable[[], None]] = []

    def run(self, kernel: JITFunction, programs: int, arguments: tuple[object, ...]) -> None:
        functions = _Emulated(self, programs).function(kernel)
        values = [_argument(x) for x in arguments]
        for number in range(programs):
            program = Program(number, [])
            self.warps.append(Warp(self, program, lambda: functions(*values)))
            self.warps[-1].start()
        try:
            while any(not warp.finished for warp in self.warps):
                self._one_event()
            self._drain()
        finally:
            self.over = True
            for warp in self.warps:
                warp.may_go.release()

    def _one_event(self) -> None:
        able = [warp for warp in self.warps if not warp.finished and warp.ready()]
        late: list[Callable[[], None]] = [lambda each=each: self._land(each) for each in self.loads]
        late += [lambda w=warp: self.multiply(w) for warp in self.warps if warp.products]
        late += [lambda w=warp: self.advance_store(w) for warp in self.warps if warp.stores]
        if not able and not late:
            stand = "\n".join(
                f"program {w.program.number} {w.name}: {w.waits_for}" for w in self.warps if not w.finished
            )
            raise Deadlock(stand)
        if late and (not able or self.choice.random() < self.haste):
            self.choice.choice(late)()
            return
        self.warp = self.choice.choice(able)
        self.warp.may_go.release()
        self.baton.acquire()
        if self.warp.error:
            raise self.warp.error

    def _drain(self) -> None:
        for warp in self.warps:
            while warp.stores:
                self.advance_store(warp)

    def _land(self, load: Callable[[], None]) -> None:
        self.loads.remove(load)
        load()

    def multiply(self, warp: Warp) -> None:
        product = warp.products.pop(0)
        product.value = product.run().as_subclass(Registers)

    def advance_store(self, warp: Warp) -> None:
        """They are read in order, as a wait for all but the last few counts them, and written in any."""
        unread = [each for each in warp.stores if len(each) == 2]
        stages = self.choice.choice(unread[:1] + [each for each in warp.stores if len(each) == 1])
        stages.pop(0)()
        if not stages:
            warp.stores.remove(stages)

    def turn(self, ready: Callable[[], bool] = lambda: True, what: str = "its turn") -> None:
        """Let others go on, until this warp is chosen and may."""
        warp = self.warp
        warp.ready, warp.waits_for = ready, what
        self.baton.release()
        warp.may_go.acquire()
        if self.over:
            raise SystemExit


def _argument(x: object) -> object:
    if isinstance(x, torch.Tensor):
        elements = x.untyped_storage().nbytes() // x.element_size()
        return Pointer(x.detach().as_strided((elements,), (1,), 0), Scalar(x.storage_offset()))
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return _constant(x)


def _constant(x: object) -> object:
    x = getattr(x, "value", x) if isinstance(x, gl.constexpr) else x
    if is_dataclass(x) and not isinstance(x, type):
        return SimpleNamespace(**{f.name: _constant(getattr(x, f.name)) for f in fields(x)})
    return Scalar(x) if type(x) is int else x


class _Emulated:
    """The kernel's functions with this machine's primitives in place of Gluon's."""

    def __init__(self, machine: _Machine, programs: int) -> None:
        self.machine, self.programs, self.known = machine, programs, {}

    def function(self, jit: JITFunction) -> Callable:
        plain = jit.fn
        if plain not in self.known:
            space: dict[str, object] = {}
            self.known[plain] = FunctionType(plain.__code__, space, plain.__name__, plain.__defaults__)
            used = {name: x for name, x in plain.__globals__.items() if name in plain.__code__.co_names}
            space |= {name: self._name(name, x) for name, x in used.items()}
            space |= {"range": lambda *bounds: map(Scalar, range(*bounds)), "gl": self.language()}
        return self.known[plain]

    def _name(self, name: str, x: object) -> object:
        if hasattr(self, f"on_{name}"):
            return getattr(self, f"on_{name}")
        if name in ("mbarrier", "tma"):
            return getattr(self, name)()
        return self.function(x) if isinstance(x, JITFunction) else _constant(x)

    # Gluon's primitives, and those functions of the kernels that are inline assembly.

    def mbarrier(self) -> SimpleNamespace:
        def expect(barrier: Barrier, size: int, pred: object = True) -> None:
            if pred:
                barrier.bytes += size
                barrier.arrive()

        def arrive(barrier: Barrier) -> None:
            self.machine.turn()
            barrier.arrive()

        def wait(barrier: Barrier, phase: int) -> None:
            self.machine.turn(lambda: barrier.phase & 1 != phase, f"phase {phase} of {vars(barrier)}")

        def init(barrier: Barrier, count: int) -> None:
            barrier.init(count)

        return SimpleNamespace(expect=expect, arrive=arrive, wait=wait, init=init)

    def tma(self) -> SimpleNamespace:
        def store_wait(pending: int) -> None:  # until shared memory has been read
            stores = self.machine.warp.stores
            self.machine.turn(lambda: sum(len(each) == 2 for each in stores) <= pending, "TMA stores")

        return SimpleNamespace(store_wait=store_wait)

    def on_tma_load(self, desc: Descriptor, at: list[int], barrier: Barrier, tile: Shared) -> None:
        def land() -> None:
            value = desc.read(at).view(tile.seen.shape)
            tile.seen.copy_(value)
            tile.fenced.copy_(value)
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        # From now on until it lands, the tile is anybody's guess.
        tile.seen.fill_(float("nan"))
        tile.fenced.fill_(float("nan"))
        self.machine.loads.append(land)
        self.machine.moved += desc.bytes_at(at)

    def _store(self, desc: Descriptor, at: list[int], tile: Shared, add: bool) -> None:
        stages: list[Callable[[], None]] = []
        self.machine.moved += desc.bytes_at(at) * (2 if add else 1)

        def read() -> None:
            value = tile.fenced.clone().view(desc.block)
            stages[-1] = lambda: desc.write(at, value, add)

        stages += [read, lambda: None]
        self.machine.warp.stores.append(stages)

    def on_tma_store(self, desc: Descriptor, at: list[int], tile: Shared) -> None:
        self._store(desc, at, tile, False)

    def on_tma_add(self, desc: Descriptor, at: list[int], tile: Shared) -> None:
        self._store(desc, at, tile, True)

    def on_fence_async_shared(self) -> None:
        for memory, value in self.machine.warp.unfenced:
            memory.copy_(value)
        self.machine.warp.unfenced.clear()

    def on_warpgroup_mma(
        self, a: object, b: Shared, acc: object, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        a_fixed = a.clone() if isinstance(a, torch.Tensor) else None

        def run() -> torch.Tensor:
            left = a_fixed if a_fixed is not None else a.fenced
            result = left.as_subclass(torch.Tensor).float() @ b.fenced.float()
            start = acc.value if isinstance(acc, Product) else acc
            return result + start.as_subclass(torch.Tensor) if use_acc else result

        assert is_async
        assert a_fixed is None or a_fixed.dtype == b.dtype
        self.machine.turn()
        product = Product(run)
        self.machine.warp.products.append(product)
        return product

    def on_warpgroup_mma_wait(self, outstanding: int, deps: list[object]) -> object:
        warp = self.machine.warp
        while len(warp.products) > outstanding:
            self.machine.multiply(warp)
        self.machine.turn()
        values = [x.value if isinstance(x, Product) and x not in warp.products else x for x in deps]
        return values[0] if len(values) == 1 else values

    def on_make_barriers(self, count: int, arrivals: int) -> Barriers:
        barriers = Barriers(Barrier() for _ in range(count))
        for each in barriers:
            each.init(arrivals)
        return barriers

    def on_sync_consumers(self) -> None:
        meeting = self.machine.warp.program.meeting
        number = len(meeting)
        meeting.append(self.machine.warp)
        pair = number // 2 * 2 + 2
        self.machine.turn(lambda: len(meeting) >= pair, "the other warpgroup")

    def on_acquire_turn(self, counter: Pointer, turn: int) -> None:
        memory, at = counter
        self.machine.turn(lambda: int(memory[at]) == turn, f"turn {turn} of counter {at}, now {memory[at]}")

    def on_release_turn(self, counter: Pointer, turn: int) -> None:
        stores = self.machine.warp.stores
        self.machine.turn(lambda: not stores, "additions")
        counter.memory[counter.offset] = int(turn)

    def on_issue_claim(self, counter: Pointer) -> Scalar:
        self.machine.turn()
        index = int(counter.memory[counter.offset])
        counter.memory[counter.offset] = index + 1
        return Scalar(index)

    def on_opaque(self, number: Scalar) -> Scalar:
        return number

    def on_reinterpret(self, memory: Shared, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        size = math.prod(shape)
        return memory._view(lambda x: x.reshape(-1).view(dtype)[:size].view(shape))

    def on_halves_of(self, tile: Shared, layout: object) -> Shared:  # their swizzled columns are not emulated
        rows, columns = tile.shape[2:]
        return tile._view(lambda x: x.view(rows, 2, columns // 2).permute(1, 0, 2)[:, None, None])

    def on_unstack(self, x: Registers) -> tuple[Registers, ...]:
        return x.clone().unbind(-1)  # += is in place here, and a value of its own on a GPU

    def on_pack(self, p: Registers, dtype: torch.dtype) -> Registers:
        return p.to(dtype).to(torch.int32, bitcast=True)

    def on_unpack(self, packed: Registers, dtype: torch.dtype, layout: object) -> Registers:
        return packed.to(dtype, bitcast=True)

    def on_pack_positive(self, p: Registers, dtype: torch.dtype) -> Registers:
        return p.clamp(min=0).to(dtype).to(torch.int32, bitcast=True)

    def on_is_kept(
        self, first_row: int, rows: Registers, first_key: int, keys: Registers, draw: object, drop: object
    ) -> torch.Tensor:
        rows, keys = first_row + rows.long(), first_key + keys.long()
        shape = draw.batch + 1, draw.head + 1, int(rows.max()) + 1, int(keys.max()) + 1
        seed = torch.tensor(int(draw.seed))
        return philox_mask(seed, int(drop.DROP_BELOW), *map(int, shape))[-1, -1][rows, keys]

    def on_philox(self, *words: object) -> tuple[Registers, ...]:
        return philox(*words)

    def language(self) -> SimpleNamespace:
        names = {name: _nothing for name in dir(gl) if name.endswith("Layout")}
        names |= {name: getattr(gl, name) for name in dir(gl) if isinstance(getattr(gl, name), gl.dtype)}
        own = {name[3:]: getattr(self, name) for name in dir(self) if name.startswith("gl_")}
        return SimpleNamespace(**names, **own)

    def gl_constexpr(self, x: object) -> object:
        return x

    def gl_static_range(self, *bounds: int) -> Iterator[Scalar]:
        return map(Scalar, range(*bounds))

    def gl_num_warps(self) -> int:
        return 4

    def gl_num_programs(self, axis: int) -> Scalar:
        return Scalar(self.programs)

    def gl_program_id(self, axis: int) -> Scalar:
        return Scalar(self.machine.warp.program.number)

    def gl_barrier(self) -> None:
        self.machine.turn()

    def gl_allocate_shared_memory(self, dtype: object, shape: list[int], layout: object) -> Shared:
        kind = DTYPES.get(dtype, dtype)
        fill = float("nan") if kind.is_floating_point else -77
        return Shared(self.machine, *(torch.full([*map(int, shape)], fill, dtype=kind) for _ in range(2)))

    def gl_inline_asm_elementwise(
        self, assembly: str, constraints: str, values: list, *rest: object
    ) -> object:
        if "griddepcontrol" in assembly:  # the kernel before has ended, and the next one waits
            return None
        if ".f32" in assembly:
            return _computed(assembly, constraints.count("="), values)
        assert "shfl" in assembly or "mov.b32 $0, $1" in assembly, assembly
        return values[0]

    def gl_zeros(self, shape: list[int], dtype: object, layout: object = None) -> Registers:
        return torch.zeros(shape, dtype=DTYPES[dtype]).as_subclass(Registers)

    def gl_full(self, shape: list[int], value: float, dtype: object, layout: object = None) -> Registers:
        return torch.full(shape, value, dtype=DTYPES[dtype]).as_subclass(Registers)

    def gl_arange(self, start: int, end: int, layout: object = None) -> Registers:
        return torch.arange(start, end, dtype=torch.int32).as_subclass(Registers)

    def gl_convert_layout(self, x: object, layout: object, assert_trivial: bool = False) -> object:
        return x

    def gl_where(self, condition: object, x: object, y: object) -> object:
        if not isinstance(condition, torch.Tensor):
            return x if condition else y
        return torch.where(condition, x, y)

    def gl_maximum(self, x: object, y: object) -> object:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            return torch.maximum(*map(torch.as_tensor, (x, y))).as_subclass(Registers)
        return type(x)(max(x, y)) if type(x) is Scalar else max(x, y)

    def gl_minimum(self, x: object, y: object) -> object:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            return torch.minimum(*map(torch.as_tensor, (x, y))).as_subclass(Registers)
        return min(x, y)

    def gl_cdiv(self, x: Scalar, y: int) -> Scalar:
        return (Scalar(x) + (y - 1)) // y

    def gl_exp2(self, x: Registers) -> Registers:
        return torch.exp2(x)

    def gl_log2(self, x: Registers) -> Registers:
        return torch.log2(x)

    def gl_fma(self, x: object, y: object, z: object) -> object:
        return x * y + z

    def gl_abs(self, x: Registers) -> Registers:
        return x.abs()

    def gl_max(self, x: Registers, axis: int) -> object:
        best = x.amax(axis)
        return best if best.ndim else Scalar(int(best))

    def gl_sum(self, x: Registers, axis: int) -> Registers:
        return x.sum(axis)

    def gl_zeros_like(self, x: Registers) -> Registers:
        return torch.zeros_like(x)

    def gl_join(self, x: Registers, y: Registers) -> Registers:
        return torch.stack([x, y], -1)

    def gl_load(self, pointer: Pointer, mask: object = None, other: object = None) -> object:
        self.machine.turn()
        memory, at = pointer
        if not isinstance(at, torch.Tensor):
            number = memory[at] if mask is None or mask else other
            self.machine.moved += memory.itemsize if mask is None or mask else 0
            return Float(number) if memory.dtype.is_floating_point else Scalar(int(number))
        if mask is None:
            self.machine.moved += memory.itemsize * at.numel()
            return memory[at].as_subclass(Registers)
        mask = mask.broadcast_to(at.shape)
        self.machine.moved += memory.itemsize * int(mask.sum())
        found = torch.full(at.shape, other, dtype=memory.dtype)
        found[mask] = memory[at[mask].long()]
        return found.as_subclass(Registers)

    def gl_store(self, pointer: Pointer, value: Registers, mask: object = None) -> None:
        self.machine.turn()
        memory, at = pointer
        if not isinstance(at, torch.Tensor):
            memory[at] = value
            self.machine.moved += memory.itemsize
            return
        mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.broadcast_to(at.shape)
        self.machine.moved += memory.itemsize * int(mask.sum())
        memory[at[mask].long()] = value.as_subclass(torch.Tensor)[mask].to(memory.dtype)

    def gl_warp_specialize(self, parts: list[tuple[Callable, tuple]], warps: list, registers: list) -> None:
        machine, program = self.machine, self.machine.warp.program
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        others = [Warp(machine, program, lambda f=f, a=a: f(*a)) for f, a in parts[1:]]
        for (f, _), warp in zip(parts[1:], others, strict=True):
            warp.name = f.__name__
            machine.warps.append(warp)
            warp.start()
        function, values = parts[0]
        machine.warp.name = function.__name__
        function(*values)


INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "mul": torch.mul, "neg": torch.neg, "ex2": torch.exp2, "rcp": torch.reciprocal,
    "fma": lambda x, y, z: x * y + z, "tanh": torch.tanh,
}  # fmt: skip


def _computed(assembly: str, outputs: int, values: list[Registers]) -> object:
    """The first `outputs` operands, which float32 instructions compute from the others."""
    known = {f"${number}": value for number, value in enumerate(values, outputs)}
    for name, operands in re.findall(r"\b(\w+)(?:\.\w+)*\.f32 ([^;]+);", assembly):
        to, *read = operands.split(", ")
        for x in read:
            if x.startswith("0f"):
                (known[x],) = struct.unpack(">f", bytes.fromhex(x[2:]))
        known[to] = INSTRUCTIONS[name](*(known[x] for x in read))
    found = tuple(known[f"${number}"] for number in range(outputs))
    return found if outputs > 1 else found[0]


def _nothing(*_: object, **__: object) -> None:
    return None


_nothing.get_default_for = _nothing
