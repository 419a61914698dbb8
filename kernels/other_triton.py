"""The compile report with a Triton that is not installed here, and what is newer than the releases that we know.

python -m kernels.compile_report --with triton==3.9.0     # pip downloads it (200 MB) into a temporary folder
python -m kernels.compile_report --with newest            # once a week: names what is newer, and compiles with it
"""

import os
import re
import subprocess
import sys
import tempfile

from .versions import PAIRS, VERIFIED_TRITON, numbers_of

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def report_with(requirement: str, module: str, arguments: list[str]) -> int:
    """Run the module with the Triton of a requirement, "triton==3.9.0" or "newest"; its exit code."""
    if requirement == "newest":
        torch, triton = newest("torch"), newest("triton")
        print(compared(torch, triton), flush=True)
        requirement = f"triton=={triton}"
    if not re.fullmatch(r"triton==[\w.+]+", requirement):
        sys.exit(
            f"--with {requirement}: it must be newest, or a release such as triton=={VERIFIED_TRITON[-1]}"
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
        sys.exit(
            f"--with newest: pip finds no release of {package}: {found.stderr.strip().splitlines()[-1:]}"
        )
    return release[1]


def compared(torch: str, triton: str) -> str:
    """Whether versions.py knows the newest releases, a line for each of them."""
    lines = []
    pairs = list(PAIRS.items())[-1]
    for package, release, known in zip(("torch", "triton"), (torch, triton), pairs, strict=True):
        ahead = numbers_of(release) > numbers_of(known)
        lines.append(f"{package} {release}: {'newer than versions.py knows' if ahead else 'known'} ({known})")
    if triton not in VERIFIED_TRITON:
        lines.append("the Hopper kernels are not verified with it: run `pytest -m gpu` on a Hopper GPU")
    return "\n".join(lines)
