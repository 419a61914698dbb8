"""Python processes that begin with torch imported: `install` makes subprocess fork them from a server.

Of the 2.3 s of processor time of a small run, 2 s were imports of libraries, and the tests begin some 200 processes,
ranks of torchrun among them. The server has imported other people's libraries, and nothing of ours. Its fork runs the
script or module as a new Python would: with arguments, environment, directory, files, signals and exit status of its
own. What does not begin with torch, or not like that (`python -c`), is started as ever; with COLD=1, everything is.
"""

import atexit
import functools
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import resource
import runpy
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

ROOT = str(Path(__file__).parents[1])
LIBRARIES = ("hydra", "numpy", "safetensors.torch", "torch._dynamo", "torch.distributed.checkpoint",
             "torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.tensor")  # fmt: skip
PACKAGES = ("benchmarks", "reproduce", "torch", "training")  # whose modules, run with -m, begin with torch
SERVERS = "TESTS_WARM_SERVERS"  # the folder of the servers' sockets
# Read by Python or a library when it begins: a process in which they differ from the server's is started as ever.
AT_START = ("LANG", "LC_", "LD_", "OMP_", "PYTHON")


def install(servers: str) -> None:
    """Have every Popen of this process ask the servers in that folder, where it can."""
    execute, poll, wait = (
        getattr(subprocess.Popen, name) for name in ("_execute_child", "_internal_poll", "_try_wait")
    )
    subprocess.Popen._execute_child = _or_forked(execute, servers)

    def poll_or_ask(self: subprocess.Popen, *rest: Any, **named: Any) -> int | None:
        if not hasattr(self, "keeper"):
            return poll(self, *rest, **named)
        if self.returncode is None and _ready(self.keeper):
            self._handle_exitstatus(_number(self.keeper))
        return self.returncode

    def wait_or_ask(self: subprocess.Popen, flags: int) -> tuple[int, int]:
        if not hasattr(self, "keeper"):
            return wait(self, flags)
        return (self.pid, _number(self.keeper)) if not flags or _ready(self.keeper) else (0, 0)

    subprocess.Popen._internal_poll, subprocess.Popen._try_wait = poll_or_ask, wait_or_ask


def _or_forked(execute: Callable[..., None], servers: str) -> Callable[..., None]:
    """Popen._execute_child, or a request to a server: a description in a file, and the child's standard files."""

    @functools.wraps(execute)
    def execute_or_ask(self: subprocess.Popen, args: Any, *rest: Any) -> None:
        executable, preexec, _, pass_fds, cwd, env, _, _, shell, *pipes = rest
        environment = dict(os.environ if env is None else env)
        plain = not (executable or preexec or pass_fds or shell) and not isinstance(args, (str, os.PathLike))
        command = [os.fspath(word) for word in args] if plain else []
        if not _is_warm(command, environment):
            return execute(self, args, *rest)
        request = {
            "command": command,
            "environment": environment,
            "folder": os.path.join(os.getcwd(), cwd or ""),
            "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
            "parent": os.getpid(),
        }
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.flush()
            standard = (pipes[0], pipes[3], pipes[5])
            files = [theirs if theirs >= 0 else ours for ours, theirs in enumerate(standard)]
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(f"{servers}/{environment.get('TRITON_INTERPRET', '0')}")
            socket.send_fds(connection, [b"!"], [*files, file.fileno()])
            self.keeper = connection.detach()
            self.pid = _number(self.keeper)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])

    return execute_or_ask


def _is_warm(command: list[str], environment: dict[str, str]) -> bool:
    if len(command) < 2 or command[0] != sys.executable or "COLD" in environment:
        return False
    if environment.get("PYTHONPATH") not in (None, ROOT):  # it may hide a library
        return False
    words = command[2:] if command[1:2] == ["-u"] else command[1:]
    if not (words[0].endswith(".py") or (words[0] == "-m" and words[1].split(".")[0] in PACKAGES)):
        return False

    def at_start(variables: Any) -> dict[str, str]:
        named = {name: variables[name] for name in variables if name.startswith(AT_START)}
        return {name: each for name, each in named.items() if name not in ("PYTHONPATH", "PYTHONUNBUFFERED")}

    return at_start(environment) == at_start(os.environ)


def _ready(keeper: int) -> bool:
    return bool(select.select([keeper], [], [], 0)[0])


def _number(keeper: int) -> int:
    """A process id, or a status as of os.waitpid."""
    received = os.read(keeper, 8)
    assert len(received) == 8, "the server of warm processes is gone"
    return int.from_bytes(received, "big", signed=True)


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process id, of the ranks that it has started here: to /proc they are the children of a server."""
    found = Path(os.environ[SERVERS]).glob(f"{launcher}.*") if SERVERS in os.environ else ()
    return {int(file.suffix[1:]): int(file.read_text()) for file in found}


class Servers:
    """One for each value of TRITON_INTERPRET, which Triton reads when imported. They import at a first request."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="warm")
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, self.folder, interpret],
                stdin=subprocess.PIPE,
                env=environment | ({"TRITON_INTERPRET": "1"} if interpret == "1" else {}),
                start_new_session=True,
            )
            for interpret in ("0", "1")
        ]
        while len(list(Path(self.folder).glob("?"))) < len(self._processes):
            time.sleep(0.01)

    def end(self) -> None:
        for each in self._processes:
            each.stdin.close()
            each.wait()
        shutil.rmtree(self.folder)


def serve(folder: str, name: str) -> dict[str, Any]:
    """Answer until standard input ends. Returns only in a fork: what it shall run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{name}.new")
    listener.listen(64)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")
    imported = False
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not imported:
            for library in LIBRARIES:
                importlib.import_module(library)
            gc.collect()
            gc.freeze()
            imported = True
        if os.fork() == 0:
            listener.close()
            return keep(connection)
        connection.close()
        while _reaped():
            pass
    os._exit(0)


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def keep(connection: socket.socket) -> dict[str, Any]:
    """Fork what was asked for, and tell its id and how it ended. Returns in that fork: the request."""
    _, files, _, _ = socket.recv_fds(connection, 1, 4)
    child = os.fork()
    if child:
        for each in (0, 1, 2, *files):
            os.close(each)
        connection.sendall(child.to_bytes(8, "big"))
        status = os.waitpid(child, 0)[1]
        try:
            connection.sendall(status.to_bytes(8, "big", signed=True))
        finally:
            os._exit(0)  # also where nobody asks any longer
    connection.close()
    os.setsid()
    for standard, each in enumerate(files[:3]):
        os.dup2(each, standard)
        os.close(each)
    with open(files[3], "rb") as file:
        file.seek(0)
        return json.loads(file.read())


def become(
    command: list[str], environment: dict[str, str], folder: str, file_size: list[int], parent: int
) -> list[str]:
    """Make this process what a new Python of that command would be; returns the words that name the program."""
    if "RANK" in environment:
        Path(sys.argv[1], f"{parent}.{environment['RANK']}").write_text(str(os.getpid()))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_FSIZE, file_size)
    words = command[1:]
    unbuffered = words[0] == "-u" or bool(environment.get("PYTHONUNBUFFERED"))
    words = words[1:] if words[0] == "-u" else words
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(sys.stdout, os.isatty(1), unbuffered)
    sys.stderr = sys.__stderr__ = _stream(sys.stderr, True, unbuffered)
    multiprocessing.process.ORIGINAL_DIR = folder  # where a worker looks for this program
    sys.orig_argv = command
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    first = folder if module else str(Path(words[0]).resolve().parent)
    sys.path[:1] = [first, *([ROOT] if "PYTHONPATH" in environment else [])]  # in place of this file's folder
    return words


def _stream(old: TextIO, by_line: bool, unbuffered: bool) -> TextIO:
    """Anew, for its file may be of another kind."""
    binary = open(old.fileno(), "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        binary, old.encoding, old.errors, line_buffering=by_line, write_through=unbuffered
    )


def run(words: list[str]) -> None:
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def end(status: int) -> None:
    """Without the last look at all that the server has imported, which takes 1.2 s; registered first, called last."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    install(sys.argv[1])
    words = become(**serve(*sys.argv[1:]))
    status = 0
    at_end = atexit.register(lambda: end(status))
    try:
        run(words)
    except SystemExit as error:  # any other code is a message
        status = (error.code or 0) & 0xFF if isinstance(error.code, int | None) else 1
        raise
    except KeyboardInterrupt:  # a signal will end it
        atexit.unregister(at_end)
        gc.unfreeze()  # or triton 3.9 tells at the end, in thirty lines, what was not freed
        raise
    except BaseException:
        status = 1
        raise
