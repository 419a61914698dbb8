"""The offline compile gate: it accepts a shipped tile and rejects a bad one. About 10 s."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import triton

from kernels.versions import OLDEST_GLUON, numbers_of

needs_gluon = pytest.mark.skipif(
    numbers_of(triton.__version__) < OLDEST_GLUON, reason="the Hopper kernels do not compile with this triton"
)


# Each line of its input is a program to run; each line of its output has that program's `result` and what it printed.
CHILD = """
import contextlib, io, json, sys
from kernels import compile_report
for line in sys.stdin:
    said, scope = io.StringIO(), {}
    with contextlib.redirect_stdout(said):
        exec(json.loads(line), scope)
    print(json.dumps([scope.get("result"), said.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def child() -> Iterator[subprocess.Popen[str]]:
    """One process for all tests, since importing PyTorch and Triton took 2 s of processor time in each; without the
    interpreter that the tests switch on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", CHILD], text=True, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


def answered(child: subprocess.Popen[str], program: str) -> tuple[int | None, str]:
    child.stdin.write(json.dumps(program) + "\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    assert answer, "the program raised"
    return json.loads(answer)


@pytest.fixture
def report(child) -> Callable[..., tuple[int, str]]:
    """The compile report's exit code and what it prints."""

    def report(*arguments: str, kernel: str = "forward") -> tuple[int, str]:
        command = ["--kernel", kernel, *arguments]
        return answered(child, f"from kernels.compile_report import main; result = main({command})")

    return report


@pytest.fixture
def printed(child) -> Callable[[str], list[list[str]]]:
    """The words of each line that a program prints."""
    return lambda program: [line.split() for line in answered(child, program)[1].splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "instruction"), [("90", "wgmma"), ("gfx942", "mfma")])
def test_shipped_tiles_pass(report, gpu: str, instruction: str) -> None:
    """Causal, full, and with dropout, whose PTX AMD's compiler would refuse."""
    code, said = report("--arch", gpu, "--head-dim", "64")
    assert code == 0, said
    assert said.count(instruction) == said.count(" ok\n") >= 3
    assert "\n0 of " in said


SELECTED = """
from kernels.compile_report import form, FUNCTIONS, GPUS
from kernels.compile_jobs import distinct, once, shipped
from kernels.features import FEATURES
from kernels.flash.dispatch import NO_FORM

def has(jobs):
    values = {(job.architecture, job.kernel, *value) for job in jobs for value in form(job)}
    return values | {(job.architecture, job.kernel, word) for job in jobs for word in job.feature.split()}

jobs = shipped(list(GPUS.values()), [64, 128, 256])
forms = distinct(jobs, form)
selected = once(forms, [64, 128, 256])
print({form(job) for job in jobs} == set(forms.values()), len(forms) == len(set(forms.values())) < len(jobs))
print(has(selected) == has(forms), len(selected) < 0.15 * len(forms))
plain = {job for job in forms if not (job.tile or job.feature) and job.head_dim in (64, 128, 256)}
print(plain <= set(selected), len(set(selected)) == len(selected))

# Without the forms: every kernel; the portable ones on every GPU; the Hopper ones with all that they can do.
taken = {forms[job] for job in selected}
words = [(job, [*job.feature.split(), ""]) for job in jobs if form(job) in taken]  # some are one kernel
found = {(job.architecture, job.kernel, word) for job, each in words for word in each}
print({kernel for _, kernel, _ in found} == FUNCTIONS.keys())
portable = {(gpu, kernel, "dropout_p") for gpu in GPUS.values() for kernel in ("forward", "dq", "dkdv")}
portable |= {(gpu, "dkdv", "gqa") for gpu in GPUS.values()}
passes = {"forward": ("hopper_forward",), "backward": ("hopper_backward", "hopper_dkdv", "hopper_dq")}
able = {(which, name) for name, feature in FEATURES.items() for which in feature.hopper}
able -= {(which, name) for which, names in NO_FORM.items() for name in names}
hopper = {(90, kernel, name) for which, name in able for kernel in passes[which]}
print(portable <= found)
for _, *missing in sorted(hopper - found):
    print(*missing)
"""


@pytest.mark.slow
@needs_gluon  # what is the same kernel twice is a Hopper one
def test_what_is_left_out_is_the_same_kernel_or_has_its_features_and_values_elsewhere(printed) -> None:
    """And is a portable kernel's, has a feature, or a head_dim whose tiles are filled up."""
    refused = [["hopper_dkdv", "block_mask"], ["hopper_dq", "block_mask"]]  # above head_dim 128
    # Its dQ is that of full documents, selected at a head_dim whose features are compiled one at a time.
    unnamed = [["hopper_dq", "cu_seqlens_k"]]
    assert printed(SELECTED) == 3 * [["True", "True"]] + 2 * [["True"]] + refused + unnamed


OTHER_LENGTHS = """
from kernels import compile_jobs
from kernels.compile_report import form
compiled = {form(job) for job in compile_jobs.shipped([90], [64, 128, 256])}
compile_jobs.LENGTHS = 128, 1000, 2047, 4096
compile_jobs.APART |= {str(apart): apart for apart in (-192, -128, -64, -1, 63, 128)}
others = [job for job in compile_jobs.shipped([90], [64, 128, 256]) if job.kernel.startswith("hopper")]
print(len(others))
for job in others:
    if form(job) not in compiled:
        print(job)
"""


@pytest.mark.slow
@needs_gluon
def test_no_lengths_make_a_form_of_the_hopper_kernels_that_is_not_compiled(printed) -> None:
    count, *missing = printed(OTHER_LENGTHS)
    assert int(count[0]) > 2000
    assert missing == []


HOPPER = """
from kernels.compile_jobs import GELU
from kernels.compile_report import Job, compile_job
head_dims = dict(hopper_forward=128, hopper_backward=128, hopper_dkdv=256, hopper_dq=256)
for kernel, head_dim in (head_dims | dict.fromkeys(GELU, 128)).items():
    job = Job(90, kernel, head_dim, True, None)
    report = compile_job(job)
    print(kernel, report.async_loads, *report.problems(job))
"""


@pytest.mark.slow
@needs_gluon
def test_the_hopper_kernels_keep_to_their_budgets(printed) -> None:
    """One form of each; .ci/run compiles many."""
    names = ("hopper_forward", "hopper_backward", "hopper_dkdv", "hopper_dq")
    assert printed(HOPPER) == [[name, "TMA"] for name in (*names, "gelu_product", "gelu_product_backward")]


STORED = """
from kernels.compile_report import Job, compile_kernel
for length in 256, 1024, 2048:
    ptx = compile_kernel(Job(90, "hopper_forward", 128, True, None, length=length))[0].asm["ptx"]
    for behind in ptx.split("cp.async.bulk.wait_group.read")[1:]:
        lines = [line for line in behind.splitlines() if "bar.sync" in line or "arrive.expect_tx" in line]
        if any("arrive.expect_tx" in line for line in lines):
            print(length, "barrier" if "bar.sync" in lines[0] else "arrival")
"""


@pytest.mark.slow
@needs_gluon
def test_a_slot_is_released_when_every_warp_has_waited_for_its_part_of_a_store(printed) -> None:
    """At head_dim 128 two warps store a half each; the emulator has one warp for both."""
    found = printed(STORED)
    assert all(
        [length for length, _ in found].count(each) >= 2 for each in ("256", "1024", "2048")
    )  # a consumer each
    assert {first for _, first in found} == {"barrier"}


SPLIT = """
import re
from kernels import compile_report
from kernels.history.flash2 import SPLIT_KEYS, SPLIT_QUERIES
constants = compile_report._constants
for way in SPLIT_QUERIES, *SPLIT_KEYS:
    slices = way.tile.warps if way.split_keys else 1
    compile_report._constants = lambda job: constants(job) | {"SLICES": slices}
    compiled, _ = compile_report.compile_kernel(compile_report.Job(90, "flash2_forward", 64, False, way.tile))
    print(*re.findall(r"warpsPerCTA = \\[([^]]*)\\], instrShape", compiled.asm["ttgir"]))
compile_report._constants = constants
"""


@pytest.mark.slow
def test_two_warps_have_their_own_queries_or_their_own_slices_of_keys(printed) -> None:
    """Of a product (queries, keys) the first axis, of (slices, queries, keys) too."""
    assert printed(SPLIT) == [["2,", "1"]] + 3 * [["2,", "1,", "1"]]


HISTORY = """
from kernels.compile_report import HISTORY, Job, compile_kernel, report_of
for name, (_, tiles, _) in HISTORY.items():
    job = Job(90, name, 64, True, tiles[64])
    compiled, log = compile_kernel(job)
    report, ttgir = report_of(job, compiled, log), compiled.asm["ttgir"]
    print(name, report.tensor_cores, ttgir.count("ttg.barrier") + ttgir.count("gpu.barrier"), *report.problems(job))
"""


@pytest.mark.slow
def test_predecessors_of_flash_use_tensor_cores_and_read_back_stores_only_after_a_barrier(printed) -> None:
    """Triton does not order a load after another thread's store, and its interpreter has only one thread."""
    reads_back = ("flash1_forward", "flash1_backward", "two_pass_backward")
    reads_nothing_back = ("flash2_forward", "flash2_backward", "two_pass_forward")
    want = [[name, "wgmma", "1"] for name in reads_back] + [
        [name, "wgmma", "0"] for name in reads_nothing_back
    ]
    assert sorted(printed(HISTORY)) == sorted(want)


STORED_P = """
from kernels.compile_jobs import storing
from kernels.compile_report import compile_kernel, report_of
for job in storing(90):
    compiled, log = compile_kernel(job)
    dots = compiled.asm["ttir"].count("tt.dot ")
    print(job.kernel, job.length, dots, *report_of(job, compiled, log).problems(job))
"""


@pytest.mark.slow
def test_what_stores_the_probabilities_computes_no_scores_in_the_backward(printed) -> None:
    """Four products in whole rows; else dP is computed for dQ too. The forward in tiles computes the scores twice."""
    want = [
        ("forward", "128", "2"),
        ("forward", "512", "3"),
        ("backward", "128", "4"),
        ("backward", "512", "5"),
    ]
    assert printed(STORED_P) == [[f"stored_p_{each}", *rest] for each, *rest in want]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        # Too many accumulators for four warps.
        pytest.param(
            ["--arch", "80", "--head-dim", "128", "--tile", "128", "64", "4", "3"],
            "bytes spilled",
            marks=pytest.mark.slow,
        ),
        # Sixteen queries are too few for a warpgroup's instruction, one stage too few to load ahead.
        pytest.param(
            ["--arch", "90", "--head-dim", "64", "--tile", "16", "64", "4", "1"],
            "tensor cores: mma.sync, not wgmma",
            marks=pytest.mark.slow,
        ),
        (["--arch", "80", "--head-dim", "64", "--tile", "64", "64", "4", "1"], "no asynchronous loads"),
    ],
)
def test_a_tile_that_compiles_badly_is_refused(report, arguments: list[str], problem: str) -> None:
    code, said = report(*arguments)
    assert code == 1, said
    assert problem in said


BUDGETS = """
from kernels import compile_report as c
job, version = c.Job(90, "dkdv", 256, True, None), c.triton.__version__
report = c.Report(255, 60, 0, "wgmma", "cp.async", ())
print(version, *report.problems(job))
c.triton.__version__ = "3.9.0"
print(*report.problems(job))
print("3.9.0", *c.replace(report, spill_bytes=77).problems(job))
print("3.9.0", *report.problems(c.replace(job, head_dim=128)))
c.triton.__version__ = version
print(*c.outcome(c.Job(90, "forward", 64, True, c.Tile(48, 64, 4, 2)))[1])
"""


def test_a_release_may_spill_more_and_what_does_not_compile_is_told_without_a_traceback(printed) -> None:
    pinned, allowed, more, other, broken = (" ".join(words) for words in printed(BUDGETS))
    assert pinned.endswith(" 60 bytes spilled") or pinned == "3.9.0"
    assert allowed == ""
    assert more == "3.9.0 77 bytes spilled"
    assert other == "3.9.0 60 bytes spilled"
    assert broken.startswith("does not compile: ")


UNKNOWN = """
from kernels.compile_report import BUDGETS, FORMS, FUNCTIONS
names = [name for release in BUDGETS["triton"].values() for name in release]
print(len(names))
for name in names:
    gpu, kernel, head_dim, *feature = name.split()
    if kernel not in FUNCTIONS or not set(feature) <= FORMS.keys():
        print(name)
"""


def test_every_budget_is_of_a_kernel_and_a_feature_that_are_called_so(printed) -> None:
    """A feature was renamed once, and with other releases its kernels failed the report."""
    count, *unknown = printed(UNKNOWN)
    assert int(count[0]) > 0
    assert unknown == []


PRODUCTS = """
from kernels.compile_report import Job, Tile, compile_kernel
for kernel, tile in ("forward", Tile(64, 64, 4, 3)), ("dq", Tile(64, 64, 4, 3)), ("dkdv", Tile(32, 64, 4, 2)):
    ptx = compile_kernel(Job(90, kernel, 64, True, tile, feature="dropout_p"))[0].asm["ptx"]
    print(kernel, ptx.count("mul.wide.u32"), ptx.count("mul.hi"))
"""


@pytest.mark.slow
def test_the_elements_in_a_threads_registers_share_their_philox_calls(printed) -> None:
    """Eight elements share a call in S, four in its transpose. Each of the two loops has twelve products per call."""
    products = printed(PRODUCTS)
    assert len(products) == 3
    for _, wide, high in products:  # a thread has 32 elements in S and 16 in the transpose: four calls a loop
        # plus products for addresses, and those moved out of the loops
        assert 2 * 4 * 12 <= int(wide) < 2 * 5 * 12, products
        assert high == "0"


MASKS = """
import contextlib, io, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.flash import masks

triton.knobs.nvidia.dump_ptxas_log = True
triton.knobs.compilation.always_compile = True  # a cached kernel would have no log
for kernel in masks.documents_kernel, masks.block_lists_kernel:
    signature, constants = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "*i32" if name[0].isupper() else "i32"
        if name == "Mask": signature[name] = "*u8"
        if name.isupper(): signature[name], constants[index,] = "constexpr", getattr(masks, name)
    for architecture in 80, 90:
        log, target = io.StringIO(), GPUTarget("cuda", architecture, 32)
        with contextlib.redirect_stdout(log):
            triton.compile(ASTSource(kernel, signature, constants, {}), target=target)
        print(kernel.__name__, *re.findall(r"(\\d+) bytes spill stores", log.getvalue()))
"""


def test_the_mask_preparation_kernels_compile_without_spills(printed) -> None:
    """The interpreter checks neither types nor registers."""
    names = ["documents_kernel", "block_lists_kernel"]
    assert printed(MASKS) == [[name, "0"] for name in names for _ in range(2)]


BESIDE = """
import contextlib, io, itertools, re
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.flash.call import Options
from kernels.flash.hopper import launch
from kernels.flash.hopper.backward_schedule import BLOCK_M, KEYS
from kernels.flash.hopper.descriptors import tile_width

triton.knobs.nvidia.dump_ptxas_log = True
triton.knobs.compilation.always_compile = True  # a cached kernel would have no log
launch.OVERLAPPED = {"launch_pdl": True}
TABLES = {"DocumentStart", "KeyStart", "KeyEnd", "RowStart", "RowEnd"}
OPTIONAL = {"OutLow", "Lse", "DLse", "KeyBlocks", "Lengths", "KvLengths", *TABLES}
# Alone; a window beside padding; and bounds by query, where padding is in those of queries.
for dtype, form in itertools.product((torch.float16, torch.bfloat16), ("", "window", "tables")):
    left, options = 100 if form == "window" else None, Options(not form, 1.0)
    for head_dim in HEAD_DIMS:
        x, block_m = torch.empty(2, 3, 1024, head_dim, dtype=dtype, device="meta"), BLOCK_M[tile_width(head_dim)]
        for prepared in (
            launch._prepare_delta(x, x, 0, block_m, KEYS.value, True),
            launch._prepare_round(x, 1024, None, options, left),
            *([launch._prepare_clear(x, x, left, block_m)] if form else []),
        ):
            kernel, _, numbers, compiled = prepared
            present = {"": set(), "window": {"Lengths", "KvLengths"}, "tables": TABLES}[form]
            ints = {"Turns", *present, *({"KvLengths"} if kernel is launch.clear_kernel else ())}
            pointers = len(kernel.arg_names) - len(numbers)
            signature, constants, attributes = {}, {}, {}
            for index, name in enumerate(kernel.arg_names):
                small = "*fp16" if dtype is torch.float16 else "*bf16"
                given = index < pointers or numbers[index - pointers] is not None
                absent = name in OPTIONAL - ints or not given
                if name.isupper() and name not in ("DQ", "DK", "DV") or absent:
                    value = None if absent else numbers[index - pointers]
                    signature[name], constants[index,] = "constexpr", getattr(value, "value", value)
                elif index < pointers:
                    floats = "*fp32" if name in ("Delta", "Sum") else small
                    signature[name] = "*i32" if name in ints else floats
                    attributes[index,] = [["tt.divisibility", 16]]
                else:
                    signature[name] = "fp32" if name == "scale" else "i32"
            log, target = io.StringIO(), GPUTarget("cuda", 90, 32)
            with contextlib.redirect_stdout(log):
                triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=compiled)
            print(kernel.__name__, *re.findall(r"(\\d+) bytes spill stores", log.getvalue()))
"""


@pytest.mark.parametrize("head_dims", [(48, 128), pytest.param((64, 80), marks=pytest.mark.slow)], ids=str)
def test_the_passes_beside_the_hopper_backward_compile_without_spills(printed, head_dims) -> None:
    """With the options of their launches: 8 warps in float16 spill 64 B in the first."""
    said = printed(f"HEAD_DIMS = {head_dims}\n{BESIDE}")
    plain = ["delta_kernel", "round_kernel"]
    with_bounds = [*plain, "clear_kernel"]
    assert said == [[name, "0"] for name in 2 * (2 * plain + 4 * with_bounds)]


def test_the_interpreter_is_refused() -> None:
    command = [sys.executable, "-m", "kernels.compile_report"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "unset it" in done.stderr


REFUSED = """
import contextlib, io
from kernels.compile_report import main
for words in ["--wit", "newest"], ["--with", "triton"], ["--with="], ["--feature", ""], ["--help"]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            main([*words, "--kernel", "flash1_forward", "--arch", "80", "--head-dim", "64"])
    except SystemExit as refusal:
        print(refusal, "".join(said.getvalue().split("compile_report: error:")[-1].split()))
"""


def test_no_word_is_dropped_or_taken_for_another(child) -> None:
    """--wit newest once compiled with the installed Triton, and so did --with for those who call main()."""
    short, not_a_release, empty, no_feature, help_ = answered(child, REFUSED)[1].splitlines()
    assert short == "2 unrecognizedarguments:--witnewest"
    assert not_a_release.startswith("--with triton: it must be newest, or a release such as triton==")
    assert empty.startswith("--with : it must be newest, or a release such as triton==")
    assert no_feature.startswith("2 argument--feature:invalidchoice:''")
    assert "--feature{alibi_slopes," in help_


UNKNOWN_PAIR = """
import torch
from kernels.compile_report import main
own = torch.__version__
for torch.__version__ in own, "9.1.0":
    result = main(["--kernel", "flash1_forward", "--arch", "80", "--head-dim", "64"])
torch.__version__ = own
"""


def test_a_pair_that_is_not_known_is_named_in_the_last_line(child) -> None:
    code, said = answered(child, UNKNOWN_PAIR)
    known, unknown = (line for line in said.splitlines() if "must not ship" in line)
    assert (code, known.rpartition(" ")[2]) == (0, "s")
    assert unknown.endswith(f" s; torch 9.1.0 and triton {triton.__version__} are not known to work together")


TOO_OLD = """
import triton
from kernels.compile_report import main
own, triton.__version__ = triton.__version__, "3.6.0"
try:
    main(["--arch", "90", "--head-dim", "64", "--kernel", "decode", "hopper_forward"])
    for gpu in "90", "80":
        try:
            main(["--arch", gpu, "--kernel", "hopper_forward"])
        except SystemExit as refusal:
            print(refusal)
finally:
    triton.__version__ = own
"""


def test_a_triton_that_is_too_old_for_the_hopper_kernels_is_named(child) -> None:
    first, *_, hopper, ampere = answered(child, TOO_OLD)[1].splitlines()
    why = "the Hopper kernels are left out: they need triton 3.7 or newer, not 3.6.0"
    assert re.fullmatch(rf"triton 3\.6\.0, \d kernels; {why}", first)
    assert hopper == f"kernels.compile_report: {why}"
    assert ampere.startswith("kernels.compile_report: no kernel is of all that")


IDLE = """
from kernels.compile_report import Job, compile_kernel, idle_barriers
ttgir = compile_kernel(Job(90, "hopper_backward", 64, True, None))[0].asm["ttgir"]
given = ttgir[ttgir.index("ttg.warp_specialize(") :].split(")")[0]
print(idle_barriers(ttgir), *(idle_barriers(ttgir.replace(f", {name},", ",", 1)) for name in given.split(", ")[1:-1]))
"""


@pytest.mark.slow
@needs_gluon
def test_a_barrier_that_is_passed_to_no_warp_is_detected(printed) -> None:
    """Each operand of warp_specialize is left out once; 10 of them are barriers."""
    ((none, *found),) = printed(IDLE)
    assert none == "0"
    assert found.count("1") == 10
    assert set(found) == {"0", "1"}
