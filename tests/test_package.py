"""What pip installs, and examples/ that use it."""

import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import kernels
import model
from tests.conftest import ROOT

LEAVES = ("model", "kernels", "data")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_wheel_contains_every_package_of_model_kernels_and_data():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [path.parent for leaf in LEAVES for path in (ROOT / leaf).rglob("__init__.py")]
    names = {".".join(("tilegpt", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert set(setuptools["packages"]) == names
    assert setuptools["package-dir"] == {f"tilegpt.{leaf}": leaf for leaf in LEAVES}
    # Without py.typed a type checker treats all they define as Any. setuptools adds the markers to a wheel by itself.
    assert all((ROOT / leaf / "py.typed").is_file() for leaf in LEAVES)


BUILD = """
import sys, tarfile
from pathlib import Path
from setuptools import build_meta
out = sys.argv[1]
with tarfile.open(f"{out}/{build_meta.build_sdist(out)}") as archive:
    archive.extractall(out, filter="data")
(unpacked,) = (each for each in Path(out).iterdir() if each.is_dir())
import os
os.chdir(unpacked)
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist as pip would build it."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in LEAVES:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "cache"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    built = subprocess.run([sys.executable, "-c", BUILD, out], cwd=checkout, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_contains_what_runs_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"tilegpt/{leaf}/py.typed" for leaf in LEAVES} < names
    assert {
        "tilegpt/kernels/compile_budgets.toml",
        "tilegpt/kernels/flash/portable/measured/sm_90.json",
    } < names
    strays = [
        name
        for name in names
        if not re.match(r"tilegpt/(model|kernels|data)/|tilegpt-[\d.]+dist-info/", name)
    ]
    assert not strays
    assert not [name for name in names if re.search("benchmark|test_|LOG", name)]


def closure(*requirements: str) -> set[str]:
    """The distributions that pip installs for `requirements`."""
    found, left = set(), list(map(Requirement, requirements))
    while left:
        wanted = left.pop()
        for extra in {"", *wanted.extras}:
            if (wanted.name, extra) not in found:
                found.add((wanted.name, extra))
                needed = map(Requirement, distribution(wanted.name).requires or [])
                left += [
                    each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in found}


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Callable[..., Run]:
    """Python in a fresh environment with the wheel and what some requirements install; it runs in another folder."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True)
    links = tmp_path / "links"
    links.mkdir()
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "links.pth").write_text(str(links))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        isolated = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        command = [python, "-W", "ignore", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=isolated, capture_output=True, text=True)

    def installed_with(*requirements: str) -> Run:
        for package in closure(*requirements):  # instead of installing a second copy of 700 MB or more
            files = distribution(package)
            for top in {Path(str(file)).parts[0] for file in files.files} - {"..", "__pycache__"}:
                (links / top).is_symlink() or (links / top).symlink_to(files.locate_file(top))
        return run

    return installed_with


USE = """
import importlib.util
import torch
from tilegpt.kernels import resolve_attention
from tilegpt.model import GPT, GPTConfig

for absent in "numpy", "datasets", "tiktoken", "hydra", "wandb":
    assert importlib.util.find_spec(absent) is None, absent
name, attention = resolve_attention("auto", device="cpu", dtype=torch.float32, head_dim=16)
model = GPT(GPTConfig(vocab_size=64, seq_len=16, n_layer=1, n_head=2, n_embd=32), attention)
tokens = torch.randint(64, (2, 17))
model(tokens[:, :-1], tokens[:, 1:]).backward()
trained = all(each.grad is not None for each in model.parameters())
print(name, trained, importlib.util.find_spec("tilegpt.kernels").origin)
"""


def test_kernels_and_model_run_from_the_wheel_with_torch_and_triton_alone(installed, tmp_path):
    """Compiling a kernel for a GPU shows that triton is enough; data and the interpreter say what they need."""
    python = installed("torch", "triton")
    used = python("-c", USE)
    assert used.returncode == 0, used.stderr
    name, trained, origin = used.stdout.split()
    assert (name, trained) == ("sdpa", "True")
    assert Path(origin).is_relative_to(tmp_path / "environment")
    kernel = ["--kernel", "flash1_forward", "--arch", "80", "--head-dim", "64"]
    report = python("-m", "tilegpt.kernels.compile_report", *kernel)
    assert "0 of 1 must not ship" in report.stdout, report.stderr

    interpreter = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'; from tilegpt.kernels.layers.mlp import mlp"
    )
    assert python("-c", interpreter).stderr.endswith(
        "Error: TRITON_INTERPRET=1 needs NumPy (pip install numpy)\n"
    )
    lacking = r"not installed: numpy, tiktoken, .*\(pip install numpy tiktoken [a-z ]+\)\n"
    imported = python("-c", "import tilegpt.data.corpora")
    assert re.search(rf"\nModuleNotFoundError: {lacking}$", imported.stderr)
    inspected = python("-m", "tilegpt.data.inspect", "tokens")
    assert (inspected.returncode, inspected.stdout) == (1, "")
    assert re.fullmatch(f"error: {lacking}", inspected.stderr)


PREPARE = """
import importlib.util
import datasets, zstandard
from tilegpt.data.corpora import make_corpus
from tilegpt.data.prepare import prepare

for absent in "torch", "triton", "hydra", "wandb":
    assert importlib.util.find_spec(absent) is None, absent
corpus = prepare(make_corpus("text_files", files="*.txt", separator="/"), "bytes", "tokens", val_fraction=0.25)
print(corpus.directory)
"""


def test_data_prepares_and_inspects_a_corpus_from_the_wheel_with_its_extra(installed, tmp_path):
    python = installed(*PROJECT["optional-dependencies"]["data"])
    (tmp_path / "text.txt").write_text("once/upon/a/time")
    prepared = python("-c", PREPARE)
    assert prepared.returncode == 0, prepared.stderr
    inspected = python("-m", "tilegpt.data.inspect", prepared.stdout.strip())
    assert inspected.returncode == 0, inspected.stderr
    assert re.search(r"^tokenizer +bytes, 257 tokens", inspected.stdout, re.MULTILINE)
    assert "validation document 0: " in inspected.stdout
    tuned = python("-m", "tilegpt.kernels.tune")
    assert (tuned.returncode, tuned.stderr) == (1, "error: not installed: torch (pip install torch)\n")


def test_the_package_takes_what_a_checkout_is_tested_with():
    """Each line of requirements.txt, but for the tests' own, is in pyproject.toml; torch's pair in a wider range."""
    lines = (ROOT / "requirements.txt").read_text().partition("# tests")[0].splitlines()
    ranges = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    offered = {each.name: each.specifier for each in map(Requirement, ranges)}
    for ours in (Requirement(line) for line in lines if not line.startswith("#")):
        assert ours.name in offered
        theirs = offered[ours.name]
        pinned = [each.version for each in ours.specifier if each.operator == "=="]
        assert theirs == ours.specifier or (pinned and theirs.contains(pinned[0])), ours


def test_lazily_imported_names_are_in_all_and_dir():
    assert set(model.__all__) == {"GPTConfig", *model._HOME} <= set(dir(model))
    assert {*kernels._HOME} < {*kernels.__all__} <= {*dir(kernels)}


HASTEN = f"""
import os, runpy
if os.environ.get("TRITON_INTERPRET") == "1":
    runpy.run_path({str(ROOT / "tests" / "interpreter.py")!r})["hasten"]()
"""


@pytest.fixture
def python(tmp_path, user_environment) -> Run:
    """Run Python in an empty directory; `site` is on its path."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HASTEN)  # which Python imports when it begins
    others = filter(None, [os.environ.get("PYTHONPATH")])  # it may hold another torch
    paths = os.pathsep.join([str(tmp_path / "site"), *others])

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = user_environment | {"PYTHONPATH": paths} | variables
        command = [sys.executable, *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment
        )

    return run


@pytest.fixture
def beside(tmp_path, python) -> Run:
    """`python` with the package installed: a folder `tilegpt` without __init__.py, as the wheel makes."""
    (tmp_path / "site" / "tilegpt").mkdir()
    for leaf in LEAVES:
        (tmp_path / "site" / "tilegpt" / leaf).symlink_to(ROOT / leaf)
    return python


@pytest.fixture
def example(tmp_path, beside):
    """Run a copy of a file of examples/ beside the installed package."""

    def run(name: str, *arguments: str, launcher: tuple[str, ...] = (), **variables: str) -> str:
        shutil.copy(ROOT / "examples" / name, tmp_path)
        done = beside(*launcher, str(tmp_path / name), *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_examples_of_a_checkout_have_its_packages():
    """Python looks first in a script's folder, so this serves whether or not some tilegpt is installed."""
    folder = ROOT / "examples" / "tilegpt"
    assert {each.name: each.resolve() for each in folder.iterdir()} == {leaf: ROOT / leaf for leaf in LEAVES}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "said", "variables"),
    [
        ("huggingface.py", "usage: python examples/huggingface.py runs/NAME/checkpoints/", {}),
        ("ring_attention.py", "run by torchrun: torchrun --standalone ", {}),
        ("under_sdpa.py", "no CUDA device, ", {"CUDA_VISIBLE_DEVICES": ""}),
        (
            "fused_layers.py",
            "GPT-2 with our kernels needs a CUDA device, not cpu (TRITON_INTERPRET=1, ",
            {"CUDA_VISIBLE_DEVICES": ""},
        ),
    ],
)
def test_an_example_that_lacks_something_says_so_in_a_line(python, name, said, variables):
    """In a checkout, where tilegpt is not installed."""
    ended = python(str(ROOT / "examples" / name), **variables)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(said)
    assert ended.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.py", "fused_layers.py", "ladder.py"])
def test_an_example_runs_in_a_checkout(python, name):
    interpreted = name == "fused_layers.py" and not torch.cuda.is_available()
    variables = {"TRITON_INTERPRET": "1"} if interpreted else {}
    ended = python(str(ROOT / "examples" / name), **variables)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"loss \d|FlashAttention-2 +\d", ended.stdout)


def test_the_training_example_learns_and_writes(example):
    printed = example("train.py")
    assert "def " in printed
    assert float(re.search(r"loss (\S+)", printed)[1]) < 4.0  # 5.5 for guessing among 256 bytes


@pytest.mark.slow
def test_the_hugging_face_example_converts_the_model_of_a_run(example, command_line, tiny, tmp_path):
    pytest.importorskip("transformers")
    ran = command_line("train.py", *tiny, "trainer.steps=1", "hydra.run.dir=runs/NAME")
    assert ran.returncode == 0, ran.stderr
    assert "parameters in folder" in example(
        "huggingface.py", "runs/NAME/checkpoints/step-00000001", "folder"
    )
    assert (tmp_path / "folder" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_fused_layers_example_trains(example):
    variables = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    printed = example("fused_layers.py", **variables)
    assert 6.5 < float(re.search(r"loss ([\d.]+)", printed)[1]) < 7.5  # ln 1000 = 6.9


@pytest.mark.slow
def test_the_ring_example_computes_on_two_ranks_what_one_does(example):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    variables = {} if torch.cuda.device_count() > 1 else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = example("ring_attention.py", launcher=launcher, **variables)
    differences = re.findall(r"rank \d of 2: 64 of 128 tokens, largest difference (\S+)", printed)
    assert len(differences) == 2
    assert max(map(float, differences)) < 0.02


@pytest.mark.slow
def test_the_ladder_checks_seven_rungs_and_draws_them(example, tmp_path):
    printed = example("ladder.py", "picture.svg", TRITON_INTERPRET="1")
    errors = re.findall(r"^\S.*? +(\d\.\de-\d\d) ", printed, re.MULTILINE)
    assert len(errors) == 7
    assert max(map(float, errors)) < 2e-3
    assert "\nHopper kernels    not run: " in printed
    assert (tmp_path / "picture.svg").is_file()


@pytest.mark.gpu
def test_the_example_under_sdpa_runs_our_kernels(example):
    assert float(re.search(r"difference (\S+)", example("under_sdpa.py"))[1]) < 0.05


PAGE = (ROOT / "kernels" / "README.md").read_text()
LIKE_NAIVE = """
import torch
from attention.flash.api import flash_attention
from tilegpt.kernels.naive import naive_attention

inputs = [torch.randn(1, heads, 70, 16, requires_grad=True) for heads in (2, 1, 1)]
for features in {}, {"causal": False, "cu_seqlens": torch.tensor([0, 30, 70], dtype=torch.int32)}:
    out, want = (each(*inputs, **features) for each in (flash_attention, naive_attention))
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    gradients = (torch.autograd.grad(each.square().sum(), inputs) for each in (out, want))
    for of_flash, of_naive in zip(*gradients, strict=True):
        torch.testing.assert_close(of_flash, of_naive, atol=1e-4, rtol=1e-4)
"""


def block(language: str) -> str:
    """The only one of the kernels' page."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return code


@pytest.fixture
def script(tmp_path, user_environment) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run code in Triton's interpreter, the package installed. As a file, which finds the package beside it, it is
    forked with torch imported (tests/warm.py): that took most of these tests' time."""
    (tmp_path / "tilegpt").mkdir()
    for leaf in LEAVES:
        (tmp_path / "tilegpt" / leaf).symlink_to(ROOT / leaf)
    environment = user_environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(code: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "script.py"
        file.write_text(HASTEN + code)
        return subprocess.run(
            [sys.executable, file], capture_output=True, text=True, timeout=240, env=environment
        )

    return run


def test_the_code_of_the_kernels_page_runs(script):
    on_a_cpu = {'"cuda"': '"cpu"', "bfloat16": "float16", "3, 4, 16, 1024": "3, 1, 2, 70"}
    code = block("python")
    for theirs, small in on_a_cpu.items():
        assert code.count(theirs) == 1
        code = code.replace(theirs, small)
    done = script(code)
    assert (done.returncode, done.stdout) == (0, "triton\n"), done.stderr


LESS = ("hopper", "decode.py", "ragged.py", "sharding.py", "under_sdpa.py")


@pytest.mark.parametrize("without", [pytest.param((), marks=pytest.mark.slow), LESS], ids=["", "less"])
def test_attention_copied_as_the_kernels_page_says_computes_what_naive_does(script, tmp_path, without):
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    subprocess.run(["bash", "-ec", block("bash")], cwd=tmp_path, check=True)
    for name in without:
        path = tmp_path / "attention" / "flash" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = script(LIKE_NAIVE)
    assert done.returncode == 0, done.stderr


def test_the_kernels_page_has_the_signature():
    parameters = inspect.signature(kernels.flash_attention).parameters.values()
    plain = [each.replace(annotation=each.empty) for each in parameters if each.name != "_packed"]
    assert f"flash_attention{inspect.Signature(plain)}" in " ".join(PAGE.split())
