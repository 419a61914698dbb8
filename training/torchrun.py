"""torchrun's environment variables, and errors that its ranks print once; without importing torch."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE = 5.0  # seconds that a rank gives the first of its host to refuse the same


def launched() -> bool:
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def is_main_rank() -> bool:
    """Whether this process writes files and prints; always true without torchrun."""
    return not launched() or os.environ["RANK"] == "0"


@contextmanager
def said_once() -> Iterator[None]:
    """Context: if the ranks of a host exit with an error line, mostly the same one, only the first rank prints it.

    When that rank has exited, torchrun ends the others. One that is not ended in a while has a line of its own. Every
    rank's line is in torchrun's summary, which comes last and is longer.
    """
    try:
        yield
    except SystemExit as stopped:
        if isinstance(stopped.code, str) and launched():
            tell(stopped.code)
            if os.environ["LOCAL_RANK"] != "0":
                time.sleep(PATIENCE)
        raise


def tell(line: str) -> None:
    """Write the line as the record of an exception, which torchrun shows as the cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"timestamp": str(int(time.time())), "py_callstack": line}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": line, "extraInfo": more}}, file)
