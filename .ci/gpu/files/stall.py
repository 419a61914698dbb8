"""Can a thread copy from a device whose other streams wait? What a rescue meets (training/parallel/rescue.py).

A kernel of two seconds stands for the collective that waits for a lost rank. Streams wait for it, as those of DDP's
futures do, one a bucket; the main thread queues launches behind it, and another thread copies. It says how long that
thread took: far below two seconds, or as long as the kernel. $JOB_OUT/stall.json has all cases.
"""

import itertools
import json
import os
import threading
import time
from pathlib import Path

import torch

SECONDS = 2.0


def cycles_a_second() -> float:
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(500_000_000)
    torch.cuda.synchronize()
    return 5e8 / (time.perf_counter() - began)


def case(rate: float, waiting: int, launches: int, reads: str, priority: int) -> dict[str, float]:
    """waiting: streams. reads: how the main thread then reads a number from the device, as when it logs."""
    small, large = torch.zeros((), device="cuda"), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    large.cpu()
    torch.cuda.synchronize()
    found: dict[str, float] = {}

    def copy() -> None:
        time.sleep(0.3)
        began = time.perf_counter()
        with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
            large[:8].cpu()
            found["small copy"] = time.perf_counter() - began
            large.cpu()
            found["large copy"] = time.perf_counter() - began

    began = time.perf_counter()
    torch.cuda._sleep(int(rate * SECONDS))
    stalled = torch.cuda.Event()
    stalled.record()
    for _ in range(waiting):
        other = torch.cuda.Stream()
        other.wait_event(stalled)
        torch.cuda.current_stream().wait_event(other.record_event())
    thread = threading.Thread(target=copy)
    thread.start()
    for _ in range(launches):
        small.add_(1)
    found["launching"] = time.perf_counter() - began
    if reads:
        getattr(small, reads)()  # item copies into pinned memory, tolist into pageable
    thread.join()
    torch.cuda.synchronize()
    return {name: round(seconds, 4) for name, seconds in found.items()}


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a GPU")
        return
    rate, cases = cycles_a_second(), []
    print(f"{'waiting':>8}{'launches':>9}{'reads':>8}{'priority':>9}  seconds of 2")
    for where in itertools.product((0, 14, 40), (100, 900, 3000), ("", "item", "tolist"), (0, -1)):
        found = case(rate, *where)
        cases.append([*where, found])
        print(f"{where[0]:8}{where[1]:9}{where[2]:>8}{where[3]:9}  {found}", flush=True)
        Path(os.environ["JOB_OUT"], "stall.json").write_text(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
