"""Kernels one after another on an emulated stream, with programmatic dependent launch, in the least favourable order.

As on the GPU: a program starts when there is room for it; a kernel begins when all before it have ended, or if it is
launched dependently, once each program of the kernel before has let it start or has ended. Its wait is for the end
of the kernel before. Here mostly the last kernel that can go on does: so what does not wait is too early, and to
access global memory before every earlier kernel has ended is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.kernels.emulator import DTYPES, Deadlock, Pointer, Scalar, Warp, _argument, _Emulated, _Machine


class Call(NamedTuple):
    """A launch: a kernel in Gluon or Triton, its grid and arguments, and whether it is dependent."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]
    dependent: bool


class Block(NamedTuple):
    """A program of a launched kernel."""

    number: int
    meeting: list  # warps at the named barrier
    grid: "Grid"


@dataclass
class Grid:
    """A launched kernel."""

    call: Call
    before: list["Grid"]
    body: Callable[[], None]
    waiting: list[int]  # programs that have not started
    warps: list[Warp] = field(default_factory=list)
    let_start: set[int] = field(default_factory=set)  # programs that let the next kernel start

    @property
    def running(self) -> set[int]:
        return {warp.program.number for warp in self.warps if not warp.finished}

    @property
    def complete(self) -> bool:
        return not (self.waiting or self.running or any(warp.stores for warp in self.warps))

    @property
    def may_begin(self) -> bool:
        if not self.call.dependent:
            return all(grid.complete for grid in self.before)
        return not self.before or not (
            self.before[-1].waiting or self.before[-1].running - self.before[-1].let_start
        )

    def can_go_on(self) -> bool:
        ready = any(not warp.finished and warp.ready() for warp in self.warps)
        return ready or any(warp.products or warp.stores for warp in self.warps)


class Stream(_Machine):
    """room: how many programs it holds at a time. deaf: kernels and functions whose wait for the kernel before is
    left out."""

    def __init__(self, seed: int = 0, room: int = 4, deaf: Sequence[str] = ()) -> None:
        super().__init__(seed)
        self.room, self.deaf = room, deaf
        self.grids: list[Grid] = []

    def run_all(self, calls: Sequence[Call]) -> None:
        for call in calls:
            function = _Kernel(self, call).function(call.kernel)
            values = [_argument(x) for x in call.arguments]
            numbers = list(range(call.grid[0] * call.grid[1] * call.grid[2]))
            self.grids.append(
                Grid(call, self.grids[:], lambda function=function, values=values: function(*values), numbers)
            )
        try:
            while not all(grid.complete for grid in self.grids):
                self._start_programs()
                self._go_on()
        finally:
            self.over = True
            for grid in self.grids:
                for warp in grid.warps:
                    warp.may_go.release()

    def _start_programs(self) -> None:
        for grid in self.grids:
            while (
                grid.waiting and grid.may_begin and sum(len(each.running) for each in self.grids) < self.room
            ):
                number = self.choice.choice(grid.waiting)
                grid.waiting.remove(number)
                grid.warps.append(Warp(self, Block(number, [], grid), grid.body))
                grid.warps[-1].name = grid.call.kernel.fn.__name__
                grid.warps[-1].start()

    def _go_on(self) -> None:
        able = [grid for grid in self.grids if grid.can_go_on()]
        if not able and not self.loads:
            self.warps = [warp for grid in self.grids for warp in grid.warps]
            self._one_event()  # raises Deadlock, with where they stand
            raise Deadlock("programs for which there is no room")
        grid = (able or self.grids)[-1]  # if only loads are under way, any
        if able and self.choice.random() < 0.1:
            grid = self.choice.choice(able)
        self.warps = grid.warps  # to which `gl_warp_specialize` adds
        self._one_event()


class _Kernel(_Emulated):
    """A kernel's functions, in Gluon or Triton, with this stream's primitives."""

    def __init__(self, stream: Stream, call: Call) -> None:
        super().__init__(stream, call.grid[0])
        self.stream, self.grid = stream, call.grid

    def _name(self, name: str, x: object) -> object:
        return self.language() if name == "tl" else super()._name(name, x)

    def _in_time(self) -> None:
        block, name = self.machine.warp.program, self.machine.warp.name
        early = [grid for grid in block.grid.before if not grid.complete]
        assert not early, f"{name} accesses memory before {early[0].call.kernel.fn.__name__} has ended"

    def on_await_previous(self) -> None:
        warp = self.machine.warp
        before = warp.program.grid.before
        if before and warp.name not in self.stream.deaf:
            self.machine.turn(lambda: before[-1].complete, "the kernel before")

    def on_let_next_start(self) -> None:
        self.machine.turn()
        self.machine.warp.program.grid.let_start.add(self.machine.warp.program.number)

    on_gdc_wait, on_gdc_launch_dependents = on_await_previous, on_let_next_start

    def on_tma_load(self, *arguments: Any) -> None:
        self._in_time()
        super().on_tma_load(*arguments)

    def _store(self, *arguments: Any) -> None:
        self._in_time()
        super()._store(*arguments)

    def on_acquire_turn(self, counter: Pointer, turn: int) -> None:
        self._in_time()
        super().on_acquire_turn(counter, turn)

    def on_issue_claim(self, counter: Pointer) -> Scalar:
        self._in_time()
        return super().on_issue_claim(counter)

    def gl_load(self, *arguments: Any, **named: Any) -> object:
        self._in_time()
        return super().gl_load(*arguments, **named)

    def gl_store(self, *arguments: Any, **named: Any) -> None:
        self._in_time()
        super().gl_store(*arguments, **named)

    def gl_program_id(self, axis: int) -> Scalar:
        number, (x, y, _) = self.machine.warp.program.number, self.grid
        return Scalar((number % x, number // x % y, number // (x * y))[axis])

    def gl_num_programs(self, axis: int) -> Scalar:
        return Scalar(self.grid[axis])

    def gl_zeros(self, shape: list[int], dtype: object, layout: object = None) -> Any:
        known = {kind: name for name, kind in DTYPES.items()}  # Triton's kernels name a tensor's dtype
        return super().gl_zeros(shape, known.get(dtype, dtype), layout)
