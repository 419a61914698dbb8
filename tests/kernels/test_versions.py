"""Other releases of torch and triton than those we know: one line that says what to do. About 10 s."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
import triton
import yaml

import kernels
from kernels import AttentionError, layers, other_triton, versions
from kernels.flash import dispatch
from kernels.other_triton import pinned, report_with, unknown
from tests.conftest import INTERPRETED, ROOT
from training.config import ConfigError
from training.distributed import resolve_device

USUAL, LATEST = pinned("requirements.txt"), pinned("requirements-latest.txt")
ON_HOPPER = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}


def test_the_two_requirements_differ_in_their_pair_alone_and_versions_knows_both() -> None:
    def others(name: str) -> list[str]:
        lines = (ROOT / name).read_text().splitlines()
        return sorted(line for line in lines if not line.startswith(("#", "torch==", "triton==")))

    assert others("requirements.txt") == others("requirements-latest.txt")
    assert unknown(*LATEST, USUAL, LATEST) == []
    assert versions.VERIFIED.items() <= versions.PAIRS.items()
    assert {USUAL[1], LATEST[1]} <= {*versions.VERIFIED.values()}


def test_the_weekly_workflow_takes_every_pair_but_the_pinned_one() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
    assert workflow[True]["schedule"]  # YAML 1.1 reads "on" as true
    newest, *others = workflow["jobs"]["quick"]["strategy"]["matrix"]["requirements"]
    assert newest == "-r requirements-latest.txt"
    elsewhere = {USUAL[1], LATEST[1], versions.PAIRS["2.12.0"]}  # no run has 2.12 (docs/gpu.md)
    known = {f"torch=={torch}.0 triton=={triton}": triton for torch, triton in versions.PAIRS.items()}
    expected = {words for words, triton in known.items() if triton not in elsewhere}
    assert {next(words for words in known if words in each) for each in others} == expected
    assert len(others) == len(expected)
    looks = [
        step["run"] for step in workflow["jobs"]["eye"]["steps"] if "compile_report" in step.get("run", "")
    ]
    assert looks == ["python -m kernels.compile_report" + words for words in ("", " --with newest")]


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "reason"),
    [
        ("2.10.0", "3.6.0", r"it needs torch 2\.11 or newer, not 2\.10\.0 \(pip install -U torch\)"),
        (
            "2.13.0+cu130",
            "3.6.0",
            r"triton 3\.7\.1 or newer with torch 2\.13\.0\+cu130, not 3\.6\.0 \(pip install",
        ),
        ("2.12.0+cu130", "3.6.0", r"triton 3\.7\.0 or newer with .* \(pip install triton==3\.7\.0\)"),
        ("2.12.1", "3.6.0", r"triton 3\.7\.1 or newer with .* \(pip install triton==3\.7\.1\)"),
        ("9.1.0", "3.8.0", r"triton 3\.9\.0 or newer with torch 9\.1\.0, not 3\.8\.0"),
    ],
)
def test_a_pair_that_is_too_old_is_refused(monkeypatch, torch_version, triton_version, reason) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AttentionError, match=f"attention=flash cannot be used here: .*{reason}"):
        kernels.resolve_attention("flash", **ON_HOPPER)
    with pytest.raises(AttentionError, match=f"model.loss=fused needs .*{reason.removeprefix('it needs ')}"):
        layers.check_fused(torch.device("cuda"), "model.loss")


@INTERPRETED
def test_the_interpreter_with_a_numpy_that_is_too_new_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(numpy, "__version__", "2.3.5")
    assert versions.kernels_lack() is None
    monkeypatch.setattr(numpy, "__version__", "2.4.0")
    with pytest.raises(
        AttentionError, match=r"needs numpy before 2\.4 in .* triton 3\.6\.0, not 2\.4\.0 \(pip install"
    ):
        layers.check_fused(torch.device("cpu"), "model.block")
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    assert versions.kernels_lack() is None


@pytest.fixture
def hopper(monkeypatch) -> None:
    """dispatch, told that the GPU is a Hopper."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    remembered = dispatch.machine_lacks, dispatch.choose, versions.say_once
    for each in remembered:
        each.cache_clear()
    yield
    for each in remembered:
        each.cache_clear()


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "lacking", "remedy"),
    [
        ("2.11.0", "3.6.0", "triton 3.7.1 or 3.8.0 or 3.9.0, not 3.6.0", "triton==3.7.1 torch==2.13.*"),
        ("2.12.0", "3.7.0", "triton 3.7.1 or 3.8.0 or 3.9.0, not 3.7.0", "triton==3.7.1 torch==2.13.*"),
        (
            "2.12.1",
            "3.7.1",
            "a pair that is verified, not torch 2.12.1 and triton 3.7.1",
            "triton==3.7.1 torch==2.13.*",
        ),
        ("2.15.1", "3.9.1", "triton 3.7.1 or 3.8.0 or 3.9.0, not 3.9.1", "triton==3.9.0"),
    ],
)
def test_a_pair_that_is_not_verified_leaves_the_portable_kernels_and_says_so_once(
    hopper, monkeypatch, capsys, torch_version, triton_version, lacking, remedy
) -> None:
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(torch, "__version__", torch_version)
    assert versions.kernels_lack() is None
    assert [kernels.attention_tier("flash", **ON_HOPPER) for _ in range(2)] == ["triton", "triton"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tilegpt: the portable kernels run, since those for Hopper need {lacking}")
    assert line.endswith(f"(pip install {remedy})")
    with pytest.raises(AttentionError, match=rf"attention\.tier=hopper needs {lacking}"):
        kernels.resolve_attention("flash", tier="hopper", **ON_HOPPER)


@pytest.mark.parametrize(("torch_version", "triton_version"), versions.VERIFIED.items())
def test_a_verified_pair_runs_the_hopper_kernels(
    hopper, monkeypatch, capsys, torch_version, triton_version
) -> None:
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(torch, "__version__", f"{torch_version}.0+cu130")
    assert kernels.attention_tier("flash", **ON_HOPPER) == "hopper"
    assert versions.kernels_lack() is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "remedy"),
    [
        ("2.13.0+cpu", "3.9.0", "triton==3.7.1"),
        ("2.11.0", "3.9.0", "triton==3.7.1 torch==2.13.*"),
        ("2.16.0", "3.9.0", "triton==3.9.0 torch==2.15.*"),
        ("2.16.0", "3.10.0", "triton==3.9.0 torch==2.15.*"),
    ],
)
@pytest.mark.parametrize("hopper_first", [True, False])
def test_a_pair_that_is_not_known_is_named_once_and_runs_the_portable_kernels(
    hopper, monkeypatch, capsys, torch_version, triton_version, remedy, hopper_first
) -> None:
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(torch, "__version__", torch_version)
    tier = kernels.attention_tier("flash", **ON_HOPPER) if hopper_first else None
    assert [versions.kernels_lack() for _ in range(2)] == [None, None]
    assert (tier or kernels.attention_tier("flash", **ON_HOPPER)) == "triton"
    unknown = f"torch {torch_version} and triton {triton_version} are not known to work together"
    assert capsys.readouterr().err == f"tilegpt: {unknown}; the portable kernels run (pip install {remedy})\n"
    for name in "flash", "auto":
        with pytest.raises(AttentionError, match=rf"attention\.tier=hopper needs .*{re.escape(remedy)}\) "):
            kernels.resolve_attention(name, tier="hopper", **ON_HOPPER)
    assert capsys.readouterr().err == ""


def python(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with a folder of modules that stand in for the installed ones."""
    environment = {
        "PYTHONPATH": f"{folder}:{ROOT}",
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        **variables,
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120
    )


def stand_in(folder: Path, package: str, source: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(source)


def without_gluon(folder: Path) -> None:
    """The installed triton with all of its files but Gluon's, as links."""
    home, package = Path(triton.__file__).parent, folder / "triton"
    (package / "experimental").mkdir(parents=True)
    for files, into in ((home, package), (home / "experimental", package / "experimental")):
        for each in files.iterdir():
            if each.name not in ("experimental", "gluon", "__pycache__"):
                (into / each.name).symlink_to(each)


TRAIN = "train.py attention=flash data=python_source logger=none trainer.device=cpu hydra.run.dir={}/run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        TRAIN,
        "-m reproduce attention backends=flash --tiny --results {}/results",
        "-m benchmarks loss --tiny --results {}/results",
        "-m kernels.tune",
        "examples/fused_layers.py",
        "examples/ladder.py",
    ],
)
def test_a_triton_without_gluon_is_refused_in_a_line(command, tmp_path) -> None:
    """Triton's C extension imports it in the first launch of any kernel: that was a traceback."""
    without_gluon(tmp_path)
    done = python(*command.format(tmp_path).split(), folder=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "need" in line
    assert f" a triton with Gluon, which this triton {triton.__version__} is without" in line
    assert f"(pip install --force-reinstall triton=={triton.__version__}" in line


def test_auto_says_once_why_it_passes_our_kernels_over(hopper, monkeypatch, capsys) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    versions.say_once.cache_clear()
    assert [kernels.resolve_attention("auto", **ON_HOPPER)[0] for _ in range(2)] == ["sdpa", "sdpa"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "tilegpt: our kernels need triton 3.7.1 or newer with torch 2.13.0, not 3.6.0 (pip "
    )
    assert line.endswith("; attention=auto takes sdpa")


def test_what_needs_a_gpu_says_that_torch_is_built_without_cuda(monkeypatch, capsys) -> None:
    from kernels import tune
    from reproduce.__main__ import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    again = f"pip install --force-reinstall torch==={torch.__version__.partition('+')[0]}"
    remedy = f"for one with it: {again}, from PyPI, not an index of CPU builds"
    words = re.escape(f"torch {torch.__version__} is built without CUDA ({remedy})")
    with pytest.raises(SystemExit, match=rf"^kernels\.tune times kernels on a GPU: {words}"):
        tune.main([])
    assert main(["training"]) == 1
    assert re.search(rf"^error: training needs a CUDA device: {words}.*\n$", capsys.readouterr().err)


def test_a_cuda_runtime_older_than_torchs_own_is_told_once(monkeypatch, tmp_path, capsys) -> None:
    """The one that this process has loaded, as LD_LIBRARY_PATH may; it tells its version as CUDA's does."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "runtime.c").write_text("int cudaRuntimeGetVersion(int *to) { *to = 97020; return 0; }")
    made = str(tmp_path / "runtime.so")
    words = ["cc", "-shared", "-Wl,-soname,libcudart.so.97", "-o", made, str(tmp_path / "runtime.c")]
    subprocess.run(words, check=True)
    ctypes.CDLL(made)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    versions.say_once.cache_clear()
    for own in ("97.2", "97.1", "96.0", "97.4", "97.4"):  # as old, newer, not loaded, and older
        monkeypatch.setattr(torch.version, "cuda", own)
        assert versions.mismatched_libraries() is None
    release = torch.__version__.partition("+")[0]
    assert capsys.readouterr().err == (
        f"tilegpt: torch {torch.__version__} has loaded the CUDA runtime 97.2, older than its own "
        f"(pip install --force-reinstall torch=={release}, without LD_LIBRARY_PATH)\n"
    )
    monkeypatch.delattr(os, "RTLD_NOLOAD")  # as on Windows
    assert versions.mismatched_libraries() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "needed"), [("compile_report", "a triton with Gluon"), ("tune", "triton 3.")]
)
def test_a_command_says_which_triton_it_needs(tmp_path, command, needed) -> None:
    stand_in(tmp_path, "triton", "__version__ = '3.5.0'")
    done = python("-m", f"kernels.{command}", folder=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"needs {needed}" in line
    assert re.search(r"\(pip install (--force-reinstall )?triton==\S+\)$", line)


BROKEN = "libtriton.so: undefined symbol: PyNumber_Add"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "-m kernels.compile_report",
        "-m kernels.tune",
        "train.py attention=flash data=python_source logger=none trainer.device=cpu hydra.run.dir={}/run",
    ],
)
def test_a_triton_that_cannot_be_imported_is_named(command, tmp_path) -> None:
    stand_in(tmp_path, "triton", f"raise ImportError({BROKEN!r})")
    variables = {"TRITON_INTERPRET": "1"} if command.startswith("train") else {}
    done = python(*command.format(tmp_path).split(), folder=tmp_path, **variables)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert (
        f" needs triton, which cannot be imported: {BROKEN} (pip install --force-reinstall triton==" in line
    )


@pytest.mark.slow
def test_the_compile_report_runs_with_another_triton_where_none_is_installed(tmp_path) -> None:
    """Which pip takes from a folder here, and which tells that it is imported."""
    stand_in(tmp_path, "triton", "raise ModuleNotFoundError(name='triton')")
    with zipfile.ZipFile(tmp_path / "triton-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("triton/__init__.py", "print('this is 9.9.9')")
        about = "triton-9.9.9.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: triton\nVersion: 9.9.9\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    report = "-m", "kernels.compile_report", "--with", "triton==9.9.9"
    done = python(*report, folder=tmp_path, **pip)
    assert done.returncode == 1
    assert "this is 9.9.9" in done.stdout, done.stderr
    assert "needs a triton with Gluon" in done.stderr


def test_another_triton_must_be_a_release() -> None:
    with pytest.raises(SystemExit, match=r"^--with triton: it must be newest, or a release such as triton=="):
        report_with("triton", "kernels.compile_report", [])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "WARNING: experimental\nERROR: No matching distribution found for torch\n",
            "No matching .* for torch",
        ),
        ("", "it says nothing"),
    ],
)
def test_what_pip_says_of_a_package_that_it_does_not_find_is_a_line(monkeypatch, said, reason) -> None:
    pip = sys.executable, "-c", f"import sys; sys.exit({said.strip()!r})"
    monkeypatch.setattr(other_triton, "PIP", pip)
    with pytest.raises(SystemExit, match=f"^--with newest: pip finds no release of torch: {reason}$"):
        other_triton.newest("torch")


def test_releases_that_are_newer_than_those_we_know_are_named() -> None:
    (torch, triton), newer = LATEST, [f"{each}.1" for each in LATEST]
    assert unknown(torch, triton, USUAL, LATEST) == unknown(f"{torch}+cpu", "3.7.1", USUAL, LATEST) == []
    assert unknown(*newer, USUAL, LATEST) == [
        f"{package} {each}.1 is newer than the newest that we know, {each}"
        for package, each in zip(("torch", "triton"), LATEST, strict=True)
    ]


def test_pins_that_are_no_pair_of_versions_are_named() -> None:
    assert unknown(*LATEST, (USUAL[0], "9.9.9"), LATEST) == [
        f"torch {USUAL[0]} with triton 9.9.9 is pinned, which is no pair of versions.py"
    ]
    (line,) = unknown(*USUAL, USUAL, USUAL)
    assert line.startswith(f"requirements-latest.txt pins torch {USUAL[0]}, versions.py knows ")


@pytest.mark.parametrize("report", [0, 1, 2])
@pytest.mark.parametrize("newer", [False, True])
def test_a_release_that_we_do_not_know_ends_the_weekly_look_in_a_line_and_a_code(
    monkeypatch, capsys, newer, report
) -> None:
    releases = {"torch": LATEST[0], "triton": LATEST[1] + ".1" * newer}
    monkeypatch.setattr(other_triton, "newest", releases.get)
    monkeypatch.setattr(other_triton, "_run_with", lambda requirement, module, arguments: report)
    assert report_with("newest", "kernels.compile_report", []) == (report or newer)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == newer
    assert all(line.startswith(f"--with newest: triton {LATEST[1]}.1 is newer") for line in lines)


@pytest.mark.slow
def test_a_training_run_with_a_triton_that_is_too_old_ends_in_a_line(tmp_path) -> None:
    stand_in(tmp_path, "triton", "__version__ = '3.5.1'")
    settings = "attention=flash", "data=python_source", "logger=none", f"hydra.run.dir={tmp_path}/run"
    done = python("train.py", *settings, "trainer.device=cpu", folder=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: attention=flash cannot be used here: it needs triton ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "train.py logger=none hydra.run.dir={}",
        "sample.py {} once",
        "-m training.export {} folder",
        "-m reproduce attention --tiny",
        "-m benchmarks predict",
    ],
)
def test_torch_without_a_library_that_it_loads_ends_in_a_line(command, tmp_path) -> None:
    missing = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    stand_in(tmp_path, "torch", f"raise ImportError({missing!r})")
    done = python(*command.format(tmp_path / "run").split(), folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: a library of torch's cannot be loaded: {missing} (pip install")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
@pytest.mark.parametrize("command", ["compile_report", "tune", "hub folder"])
def test_a_torch_that_cannot_be_imported_ends_a_command_of_kernels_in_a_line(
    command, error, tmp_path
) -> None:
    stand_in(tmp_path, "torch", f"raise {error}('no such symbol\\nand more of it')")
    done = python("-m", *f"kernels.{command}".split(), folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: torch cannot be imported: no such symbol (pip install --force-rein")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_torch_without_cuda_is_named(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    why = r"not cpu.*: torch \S+ (is built without|finds no usable) CUDA.*"
    cpu = {"device": "cpu", "dtype": torch.bfloat16, "head_dim": 64}
    for name, tier, remedy in (
        ("flash", "auto", "attention=sdpa"),
        ("flash", "hopper", "attention=sdpa without attention.tier"),
        ("fa4", "auto", "attention=sdpa"),
    ):
        with pytest.raises(AttentionError, match=f"attention={name} cannot .*{why}; use {remedy}$"):
            kernels.resolve_attention(name, tier=tier, **cpu)
    with pytest.raises(AttentionError, match=f"model.block=fused needs .*{why}; use model.block=torch"):
        layers.check_fused(torch.device("cpu"), "model.block")
    with pytest.raises(ConfigError, match=r"trainer.device=cuda: torch \S+ .*; or use trainer.device=cpu"):
        resolve_device("cuda")


def test_a_driver_that_is_too_old_is_named_with_what_to_do(monkeypatch) -> None:
    def init() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
            "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    why = (
        r"The NVIDIA driver on .* is too old \(found version 11040\) \(install or update the NVIDIA driver\)"
    )
    with pytest.raises(
        ConfigError, match=rf"finds no usable CUDA driver: {why}; or use trainer\.device=cpu\.$"
    ):
        resolve_device("cuda")


def test_more_ranks_than_gpus_are_refused_by_all_of_a_host_with_the_number_that_works(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        "training.distributed.mismatched_libraries", lambda: None
    )  # a CUDA build looks for a driver
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"found: 2, for 8 ranks .*--nproc_per_node=2, in jobs .*gpus_per_node=8\.$"
    ):
        resolve_device("auto")


def test_another_cudnn_than_torch_was_built_with_is_named(monkeypatch) -> None:
    def version() -> int:
        raise RuntimeError(
            "cuDNN version incompatibility: PyTorch was compiled against (9, 26, 0). And so on."
        )

    from kernels import tune

    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    said = r"cuDNN version .* \(9, 26, 0\) \(pip install --force-reinstall torch==2\.13\.0, without LD_"
    with pytest.raises(ConfigError, match=f"^trainer.device=cuda: {said}"):
        resolve_device("cuda")
    with pytest.raises(SystemExit, match=rf"^kernels\.tune times kernels on a GPU: {said}"):
        tune.main([])


MOVED = """
from triton.backends.nvidia import driver

def __call__(self, launch, *arguments): ...
def make_tensordesc_arg(arg, metadata, cache, stream): ...
driver.{name} = {other}
import torch
from kernels import launch

class Pointer:
    dtype, shape = torch.float32, (16, 16)
    def get_device(self): return 0
    def data_ptr(self): return 64
    def stride(self): return 16, 1

class Kernel:
    def __getitem__(self, grid): return lambda *arguments, **options: print(*arguments[1:])

torch.cuda.current_device = lambda: 0
moved = (Pointer(),)
for number in 1, 2:
    launch.launch(moved, ("test",), lambda: (Kernel(), (1, 1, 1), (number,), {{}}), {moved}, lambda x: (x,))
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "other", "moved", "part"),
    [
        ("CudaLauncher.__call__", "__call__", "()", "launcher (CudaLauncher.__call__)"),
        (
            "make_tensordesc_arg",
            "make_tensordesc_arg",
            "moved",
            "encoding of TMA descriptors (make_tensordesc_arg",
        ),
    ],
)
def test_where_a_private_part_of_triton_has_moved_its_public_launch_serves(
    tmp_path, name, other, moved, part
) -> None:
    done = python("-c", MOVED.format(name=name, other=other, moved=moved), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["1", "2"]
    (line,) = done.stderr.splitlines()
    assert f"triton {triton.__version__} has changed its {part}" in line
    assert f"(pip install triton=={triton.__version__})" in line
