"""This package as a kernel of the Hugging Face Hub, loadable by its library `kernels` without an installation.

    python -m kernels.hub FOLDER [--repo OWNER/NAME]      # write the repository; `hf upload` publishes it
    tilegpt = get_local_kernel(Path(FOLDER))              # of that library, or get_kernel(OWNER/NAME, version=1)
    out = tilegpt.flash_attention(q, k, v)

The library takes `build/torch-BACKEND/`, a package with a metadata.json. Its kernel-builder would make the same from
build.toml and torch-ext/; since nothing is compiled ahead of time, a build is a copy. Every version of the content
has an id of its own, so that several can share a process.
"""

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

NAME, VERSION, LICENSE = "tilegpt", 1, "MIT"
BACKENDS = ("cuda",)  # gfx942 compiles, but never ran
SUFFIXES = (".py", ".json", ".toml")
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.hub", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to write; a new or an empty one")
    parser.add_argument(
        "--repo", default=f"OWNER/{NAME}", metavar="OWNER/NAME", help="where it is to be published"
    )
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=("cuda", "cpu", "rocm"))
    args = parser.parse_args()
    folder = Path(args.folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        sys.exit(f"error: {folder} is not an empty folder: name a new one")
    try:
        write(folder, args.repo, args.backends)
    except OSError as error:
        sys.exit(f"error: {folder} cannot be written ({error.strerror})")
    print(
        f"{folder}: for get_local_kernel; publish it by `hf upload {args.repo} {folder} --repo-type kernel`"
    )


def write(folder: Path, repo: str, backends: tuple[str, ...]) -> None:
    """Write the repository."""
    files = sorted(path for path in HERE.rglob("*") if path.suffix in SUFFIXES and path != Path(__file__))
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:7]
    for package in (folder / "torch-ext" / NAME, *(folder / "build" / f"torch-{each}" for each in backends)):
        for path in files:
            to = package / path.relative_to(HERE)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    for backend in backends:
        metadata = {
            "name": NAME, "id": f"_{NAME}_{backend}_{content}", "version": VERSION, "license": LICENSE,
            "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (folder / "build" / f"torch-{backend}" / "metadata.json").write_text(json.dumps(metadata, indent=2))
    extensions = json.dumps([suffix[1:] for suffix in SUFFIXES])
    (folder / "build.toml").write_text(
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\nedition = 5\nlicense = "{LICENSE}"\n'
        f'backends = {json.dumps(list(backends))}\n\n[general.hub]\nrepo-id = "{repo}"\n\n'
        f"[torch-noarch]\npyext = {extensions}\n"
    )
    (folder / "README.md").write_text(
        f"---\nlibrary_name: kernels\nlicense: {LICENSE.lower()}\n---\n\nFlash attention in Triton, and on Hopper in "
        f"Gluon, of q, k and v (batch, heads, length, head_dim).\n\n    from kernels import get_kernel\n"
        f"    {NAME} = get_kernel({repo!r}, version={VERSION}, trust_remote_code=[{repo!r}])\n"
        f"    out = {NAME}.flash_attention(q, k, v)\n"
    )


if __name__ == "__main__":
    main()
