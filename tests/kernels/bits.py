"""Whether results are the same bit for bit: when repeated, and by any number of programs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch


def assert_equal(got: Mapping | tuple, want: Mapping | tuple) -> None:
    """By name, or in their order."""
    if isinstance(want, tuple):
        got, want = dict(enumerate(got)), dict(enumerate(want))
    for name, x in want.items():
        assert torch.equal(got[name], x), name


def assert_repeats(
    function: Callable, *arguments: object, times: int = 250, **options: object
) -> Mapping | tuple:
    """What the function returns; that it returns it again each time."""
    first = function(*arguments, **options)
    for _ in range(times):
        assert_equal(function(*arguments, **options), first)
    return first


@contextmanager
def programs_of_hopper(number: int) -> Iterator[None]:
    """So many, as if the GPU had as many multiprocessors; what was launched before is not remembered."""
    from kernels import launch
    from kernels.flash.hopper import launch as hopper

    with mock.patch.object(hopper, "sm_count", return_value=number), mock.patch.object(launch, "_known", {}):
        yield
