"""What torchrun told this process, readable before torch is loaded."""

import os


def launched() -> bool:
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def is_main_rank() -> bool:
    """Whether this process writes files and prints; always true without torchrun."""
    return not launched() or os.environ["RANK"] == "0"
