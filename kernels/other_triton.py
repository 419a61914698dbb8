"""The compile report with a Triton that is not installed here, and what is newer than the releases that we know.

python -m kernels.compile_report --with triton==3.9.0     # pip downloads it (200 MB) into a temporary folder
python -m kernels.compile_report --with newest            # once a week: fails for a release that we do not know, too
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .versions import PAIRS, VERIFIED, numbers_of

ROOT = Path(__file__).parents[1]
REPORT = f"{__package__}.compile_report"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
WITH = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
WITH.add_argument(
    "--with",
    dest="requirement",
    metavar="triton==X",
    help="a release of Triton for pip to download, or newest: then releases that versions.py does not know fail",
)


def report_of_another(arguments: list[str] | None = None) -> int | None:
    """The exit code of the report with the Triton that --with names; None where the arguments have no --with."""
    chosen, others = WITH.parse_known_args(arguments)
    return None if chosen.requirement is None else report_with(chosen.requirement, REPORT, others)


def report_with(requirement: str, module: str, arguments: list[str]) -> int:
    """Run the module with the Triton of a requirement, "triton==3.9.0" or "newest"; its exit code.

    For "newest" it is at least 1, and stderr ends with a line about it, if `unknown` finds anything.
    """
    if requirement != "newest":
        return _run_with(requirement, module, arguments)
    torch, triton = newest("torch"), newest("triton")
    print(f"newest: torch {torch}, triton {triton}", flush=True)
    found = unknown(torch, triton, *map(pinned, ("requirements.txt", "requirements-latest.txt")))
    if triton not in VERIFIED.values():
        print("the Hopper kernels are not verified with it: run `pytest -m gpu` on a Hopper GPU", flush=True)
    code = _run_with(f"triton=={triton}", module, arguments)
    if found:
        print(f"--with newest: {'; '.join(found)} (docs/gpu.md says what to do)", file=sys.stderr)
    return code or bool(found)


def _run_with(requirement: str, module: str, arguments: list[str]) -> int:
    if not re.fullmatch(r"triton==[\w.+]+", requirement):
        sys.exit(
            f"--with {requirement}: it must be newest, or a release such as triton=={[*PAIRS.values()][-1]}"
        )
    with tempfile.TemporaryDirectory() as folder:
        install = [*PIP, "install", "--quiet", "--no-deps", "--target", folder, requirement]
        if subprocess.run(install).returncode:
            sys.exit(f"--with {requirement}: pip could not install it (see above)")
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode


def newest(package: str) -> str:
    """The newest release of a package that pip finds."""
    found = subprocess.run([*PIP, "index", "versions", package], capture_output=True, text=True)
    release = re.match(rf"{package} \((\S+)\)", found.stdout)
    if release is None:
        reason = found.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: ") or "it says nothing"
        sys.exit(f"--with newest: pip finds no release of {package}: {reason}")
    return release[1]


def pinned(name: str) -> tuple[str, str]:
    """The releases of torch and triton that a file of requirements of this checkout pins."""
    if not (ROOT / name).is_file():
        sys.exit(f"--with newest: it compares with {name}, which only a checkout has")
    pins = dict(re.findall(r"^(torch|triton)==([^;\s]+)", (ROOT / name).read_text(), re.MULTILINE))
    return pins["torch"], pins["triton"]


def unknown(torch: str, triton: str, usual: tuple[str, str], latest: tuple[str, str]) -> list[str]:
    """Newer releases than versions.py and requirements-latest.txt know, and pins that are not a pair of versions.py.

    Args:
        usual, latest: what requirements.txt and requirements-latest.txt pin.
    """
    pairs = [(numbers_of(each), own) for each, own in PAIRS.items()]
    found = [
        f"torch {each} with triton {own} is pinned, which is no pair of versions.py"
        for each, own in (usual, latest)
        if (numbers_of(each), own) not in pairs
    ]
    if numbers_of(latest[0]) != pairs[-1][0]:
        found.append(f"requirements-latest.txt pins torch {latest[0]}, versions.py knows {[*PAIRS][-1]}")
    for package, release, known in zip(("torch", "triton"), (torch, triton), latest, strict=True):
        if _whole(release) > _whole(known):
            found.append(f"{package} {release} is newer than the newest that we know, {known}")
    return found


def _whole(release: str) -> tuple[int, ...]:
    """All numbers of a release: (2, 15, 1) of "2.15.1+cpu"."""
    return tuple(map(int, re.findall(r"\d+", release.partition("+")[0])))
