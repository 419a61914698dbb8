"""Flash's Hopper kernels against the portable ones and PyTorch's: python race.py PART SEED END

PART: plain (head_dim 64 and 128), ours (the same without PyTorch's), wide (136 to 256), dims (others up to 128),
features, wide_features and wide_padding (136 to 256), wide_dropout (dropout, and ALiBi beside padding, where neither
was taken before), by_query (documents whose keys have offsets of their own, or with key padding), full (documents and
windows, and windows with padding), lengths (single features at the lengths that benchmarks features has not), untimed
(softcap and ALiBi with precise_delta, documents or padding, features at head_dim 32, 80 and 96, which `auto` did not
take before anyone had timed them), combined (features with each other and of other sizes). ../rows.py
reads the last two.
END: seconds since 1970 at which to stop.
Seed 0 first holds each kind to the accuracy gate and repeats it 20 times bit for bit. Then all take shuffled turns.
A point that hangs for 90 s or breaks the CUDA context ends the process with status 77: started again, it goes on
without that kind. Writes $JOB_OUT/PART.SEED.{json,txt}. With TRY=1 tiny, on a CPU.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, os.getcwd())
import torch
import triton
from race_points import TRY, Point, points

from kernels import get_attention
from kernels.flash.dispatch import machine_lacks
from reproduce import timing
from tests.kernels.accuracy import assert_as_accurate, run

PART, SEED, END = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
SHARE = sys.argv[4] if len(sys.argv) > 4 else ""  # "i/n": only compile this share
BROKEN = 77
COMPILERS = 14
OUT = Path(os.environ["JOB_OUT"])
DEVICE = torch.device("cpu" if TRY else "cuda")
DTYPE = torch.float16 if TRY else torch.bfloat16
HOPPER = "hopper" if machine_lacks(DEVICE) is None else "triton"
LIBRARIES = ("sdpa_flash", "sdpa_cudnn", "fa4")


class Inputs:
    """Features: padding (lengths from 1 on), near (0 to 20 less), dropout, sinks, precise (delta), window (of 512),
    documents (of 2 to 2048 tokens), own (the same, and the keys have offsets of their own) or same (which are the
    queries'), softcap, alibi; gemma (Gemma 2's softcap and window); and longer (twice as many keys as queries)."""

    def __init__(self, p: Point, shape: tuple[int, int, int] | None = None) -> None:
        batch, heads, kv_heads = shape or p.shape
        kv_len = 2 * p.length if "longer" in p.feature else p.length
        sizes = [(heads, p.length), (kv_heads, kv_len), (kv_heads, kv_len), (heads, p.length)]
        shapes = [(batch, *size, p.head_dim) for size in sizes]
        *self.qkv, self.d_out = (torch.randn(each, device=DEVICE, dtype=DTYPE) for each in shapes)
        self.qkv = [each.requires_grad_() for each in self.qkv]
        self.features: dict[str, object] = {}
        if "padding" in p.feature or "near" in p.feature:
            low = 1 if "padding" in p.feature else p.length - 20
            lengths = torch.randint(low, p.length + 1, (batch,), generator=torch.Generator().manual_seed(0))
            self.features["kv_lengths"] = lengths.to(DEVICE, torch.int32)
        if "dropout" in p.feature:
            self.features |= {"dropout_p": 0.1, "dropout_seed": 7}
        if "sinks" in p.feature:
            self.features["sinks"] = torch.linspace(-2, 3, heads, device=DEVICE)
        if "precise" in p.feature:
            self.features["precise_delta"] = True
        if "window" in p.feature:
            self.features["window"] = (512, 0 if p.causal else 512)
        if {"documents", "own", "same"} & set(p.feature.split("+")):
            tokens, generator = batch * p.length, torch.Generator().manual_seed(0)
            ends = torch.randint(2, 2049, (tokens,), generator=generator).cumsum(0)
            ends = [0, *ends[ends < tokens].tolist(), tokens]
            self.features["cu_seqlens"] = torch.tensor(ends, device=DEVICE, dtype=torch.int32)
            if "same" in p.feature:
                self.features["cu_seqlens_k"] = self.features["cu_seqlens"].clone()
            if "own" in p.feature:
                shares = torch.randint(2, 2049, (len(ends) - 1,), generator=generator).cumsum(0)
                keys = [0, *(shares * (batch * kv_len) // shares[-1]).tolist()]
                self.features["cu_seqlens_k"] = torch.tensor(keys, device=DEVICE, dtype=torch.int32)
        if "softcap" in p.feature:
            self.features["softcap"] = 30.0
        if "gemma" in p.feature:
            self.features |= {"softcap": 50.0, "window": (4096, 0)}
        if "alibi" in p.feature:
            self.features["alibi_slopes"] = 2.0 ** -torch.linspace(0.5, 8, heads, device=DEVICE)


def fa4_packed(inputs: Inputs, p: Point) -> torch.Tensor:
    """FlashAttention-4's own call for the documents of one row, whose keys may have offsets of their own."""
    of_queries = inputs.features["cu_seqlens"]
    of_keys = inputs.features.get("cu_seqlens_k", of_queries)
    function = get_attention("fa4").keywords["flash_attn_varlen_func"]
    q, k, v = (x[0].transpose(0, 1) for x in inputs.qkv)
    given = {"cu_seqlens_q": of_queries, "cu_seqlens_k": of_keys, "causal": p.causal}
    given |= {"max_seqlen_q": 2048, "max_seqlen_k": 2048 if of_keys is of_queries else k.shape[0]}
    return function(q, k, v, **given)[0].transpose(0, 1)[None]


Attend = Callable[[Inputs, Point], torch.Tensor]


def flash(tier: str, inputs: Inputs, p: Point, plain: bool = False) -> torch.Tensor:
    features = {} if plain else inputs.features
    return get_attention("flash")(*inputs.qkv, causal=p.causal, tier=tier, **features)


def documents_alone(tier: str, inputs: Inputs, p: Point) -> torch.Tensor:
    cu_seqlens = inputs.features["cu_seqlens"]
    return get_attention("flash")(*inputs.qkv, causal=p.causal, tier=tier, cu_seqlens=cu_seqlens)


def library(name: str, inputs: Inputs, p: Point) -> torch.Tensor:
    return get_attention(name)(*inputs.qkv, causal=p.causal, **inputs.features)


def fa4_itself(inputs: Inputs, p: Point) -> torch.Tensor:
    """By its own arguments for windows, softcap, sinks and padding; documents as registered, ALiBi refused."""
    names = {
        "window": "window_size",
        "softcap": "softcap",
        "sinks": "learnable_sink",
        "kv_lengths": "seqused_k",
    }
    rest = dict(inputs.features)
    function = "flash_attn_varlen_func" if "kv_lengths" in rest else "flash_attn_func"
    own = {names[name]: rest.pop(name) for name in names if name in rest}
    attend = get_attention("fa4")
    call = functools.partial(attend.keywords[function], **own)
    return attend(*inputs.qkv, causal=p.causal, flash_attn_func=call, **rest)


def contenders(p: Point) -> dict[str, Attend]:
    found: dict[str, Attend] = {"hopper": functools.partial(flash, HOPPER)}
    found["portable"] = functools.partial(flash, "triton")
    if PART in ("combined", "untimed"):
        return found
    if PART == "by_query":  # beside documents alone: what the keys' own bounds cost
        found["documents"] = functools.partial(documents_alone, HOPPER if p.causal else "triton")
        if p.kind == "row":
            found["fa4"] = fa4_packed
        return found
    if p.feature:
        if PART != "lengths":  # what the feature costs
            found["plain"] = functools.partial(flash, HOPPER, plain=True)
        # Under the causal mask FlashAttention-4 aligns the queries with the keys that are not padding: another task.
        padded = "padding" in p.feature or "near" in p.feature
        if PART in ("wide_padding", "wide_dropout", "lengths") and "dropout" in p.feature:
            found["sdpa_flash"] = functools.partial(library, "sdpa_flash")
        elif PART in ("wide_features", "wide_padding", "full", "lengths") and not (padded and p.causal):
            # The wrapper prepares documents slowly.
            of_row = p.kind == "row" and p.feature == "documents"
            found["fa4"] = fa4_packed if of_row else fa4_itself
    elif PART != "ours":
        found |= {name: functools.partial(library, name) for name in LIBRARIES}
    return found


def step(attend: Attend, inputs: Inputs, p: Point) -> Iterator[None]:
    out = attend(inputs, p)
    yield
    torch.autograd.grad(out, inputs.qkv, inputs.d_out)
    yield


def check(p: Point) -> str:
    """The accuracy gate on a small shape of the same kind, and 20 repeats of the full one; "" or what is wrong."""
    length = 4100 if p.length >= 4096 else 2100 if p.length >= 2048 else min(p.length, 1000)
    small = dataclasses.replace(p, length=length)
    attention = functools.partial(get_attention("flash"), tier=HOPPER, causal=p.causal)
    try:
        inputs = Inputs(small, (2, 2, 1 if p.kind == "grouped" else 2))
        got = run(attention, inputs.qkv, inputs.d_out, **inputs.features)
        exact = {name: each for name, each in inputs.features.items() if name != "precise_delta"}
        assert_as_accurate(got, inputs.qkv, inputs.d_out, causal=p.causal, **exact)
        inputs = Inputs(p)
        first = run(attention, inputs.qkv, inputs.d_out, **inputs.features)
        for _ in range(2 if TRY else 20):
            again = run(attention, inputs.qkv, inputs.d_out, **inputs.features)
            if unlike := [name for name in first if not torch.equal(again[name], first[name])]:
                return f"repeats differ in {unlike}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def able(p: Point, inputs: Inputs) -> tuple[dict[str, Attend], dict[str, str]]:
    """The contenders that run here, and why the others do not."""
    found, refused = {}, {}
    for name, attend in contenders(p).items():
        try:
            for _ in step(attend, inputs, p):
                pass
            found[name] = attend
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return found, refused


def race(p: Point) -> dict:
    batch, heads, _ = p.shape
    sets = [Inputs(p) for _ in range(timing.input_sets(8 * batch * heads * p.length * p.head_dim, DEVICE))]
    found, refused = able(p, sets[0])

    def call(attend: Attend, number: int) -> Iterator[None]:
        return step(attend, sets[number % len(sets)], p)

    calls = {name: functools.partial(call, attend) for name, attend in found.items()}
    how = {"seconds": 0.0, "rounds": (2, 2), "warmup": 0}
    if not TRY:
        how = {"seconds": 0.5, "rounds": (20, 50), "warmup": 2}
    timed = timing.time_alternating(calls, DEVICE, seed=SEED, **how)
    ms = {name: dict(zip(("forward", "backward"), each, strict=True)) for name, each in timed.ms.items()}
    used = {"heads_in_all": batch * heads, "features": sorted(sets[0].features.keys() - {"dropout_seed"})}
    return {**dataclasses.asdict(p), **used, "ms": ms, "late": timed.late, "refused": refused}


def report(document: dict) -> str:
    lines = [f"WRONG {where}: {why}" for where, why in document["wrong"].items()]
    lines += [
        "microseconds of hopper; median [quartiles] of its time over each other's in the same round",
        "",
    ]
    for s in document["samples"]:
        p = Point(**{field.name: s[field.name] for field in dataclasses.fields(Point)})
        lines.append(f"{p} {'LATE ' + str(s['late']) if s['late'] else ''}")
        for phase in ("forward", "backward"):
            if "hopper" not in s["ms"]:
                continue
            ours = s["ms"]["hopper"][phase]
            cells = [f"    {phase:9}{1e3 * statistics.median(ours):8.0f}"]
            for name, each in s["ms"].items():
                ratios = [a / b for a, b in zip(ours, each[phase], strict=True)]
                low, median, high = statistics.quantiles(ratios, n=4)
                if name != "hopper":
                    cells.append(f"{name} {median:.3f} [{low:.2f} {high:.2f}]")
            lines.append("  ".join(cells))
        lines += [f"    refused {name}: {why}" for name, why in s["refused"].items()]
    return "\n".join(lines) + "\n"


def compile_share(index: int, of: int) -> None:
    families: dict[tuple, list[Point]] = {}  # in the order of the race, which does not wait for all
    for p in points(PART):
        families.setdefault(family(p), []).append(p)
    for group in itertools.islice(families.values(), index, None, of):
        for p in group:
            if time.time() < END:
                able(p, Inputs(p))
                torch.cuda.empty_cache()


def family(p: Point) -> tuple:
    return (*p.family, p.kind == "grouped")


def compile_all() -> None:
    """Run every point once, in many processes, so that all that is compiled lies in Triton's cache."""
    end = time.time() + min(140, 0.35 * (END - time.time()))
    command = [sys.executable, __file__, PART, str(SEED), str(end)]
    sharing = [subprocess.Popen([*command, f"{i}/{COMPILERS}"]) for i in range(COMPILERS)]
    for each in sharing:
        try:
            each.wait(max(1, end + 30 - time.time()))
        except subprocess.TimeoutExpired:
            each.kill()
            print("a compiling process was too slow, or hangs", flush=True)


class Watch:
    """Ends the process if a point takes too long."""

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self.began, self.give_up = time.monotonic(), give_up
        threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        while time.monotonic() - self.began < 90:
            time.sleep(1)
        self.give_up("hangs")


def main() -> None:
    torch.manual_seed(SEED)
    if SHARE:
        return compile_share(*map(int, SHARE.split("/")))
    path = OUT / f"{PART}.{SEED}.json"
    document = {"torch": torch.__version__, "triton": triton.__version__, "part": PART, "seed": SEED}
    document |= {"hopper_lacks": machine_lacks(DEVICE), "wrong": {}, "broken": [], "samples": []}
    if path.exists():
        document = json.loads(path.read_text())
    elif not TRY:
        compile_all()
        document["gpu"] = torch.cuda.get_device_name()
    done = {tuple(s[field.name] for field in dataclasses.fields(Point)) for s in document["samples"]}
    left = [
        p for p in points(PART) if dataclasses.astuple(p) not in done and p.family not in document["broken"]
    ]
    at = left[0] if left else None

    def write() -> None:
        path.write_text(json.dumps(document))
        path.with_suffix(".txt").write_text(report(document))

    def give_up(why: str) -> None:
        print(f"BROKEN {at}: {why}", flush=True)
        document["broken"].append(at.family)
        document["wrong"][str(at)] = why
        write()
        os._exit(BROKEN)

    watch, checked = Watch(give_up), set()
    for at in left:
        if time.time() > END - 8:
            print("out of time", flush=True)
            break
        watch.began = time.monotonic()
        try:
            kind = (*family(at), at.length >= 2048, at.length >= 4096 and at.head_dim <= 64)
            if SEED == 0 and kind not in checked:
                checked.add(kind)
                if why := check(at):
                    document["wrong"][str(at)] = why
            document["samples"].append(race(at))
        except Exception as error:
            print(f"FAILED {at}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if DEVICE.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as error:
                give_up(f"broke the context: {str(error)[:200]}")
        write()
    watch.began = math.inf
    print(f"checked {len(checked)} kinds; {len(document['samples'])} of {len(points(PART))} points")
    print(report(document)[-4000:])


if __name__ == "__main__":
    main()
