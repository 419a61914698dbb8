"""Access to the Hugging Face Hub: timeouts, its cache, and the error messages when it cannot be reached.

The Hub's clients would retry for minutes; their timeouts are shortened here.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from . import DataError
from .files import NO_ROOM, sha256_of, unwritable, written_whole

COMMIT = re.compile("[0-9a-f]{40}")
TIMEOUT_SECONDS = 5
GOES_ON = " (the same command continues from what is done)"


def limit_timeouts() -> None:
    """Let no request to the Hub wait longer than our limit for an answer, unless the user has set a timeout.

    huggingface_hub waits 60 s for the headers of a file in each of its last six tries: six minutes without an answer.
    """
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["request"]
    if _limit_timeouts_of not in hooks:
        hooks.append(_limit_timeouts_of)


def _limit_timeouts_of(request: Any) -> None:
    longest = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", TIMEOUT_SECONDS))
    timeouts = request.extensions["timeout"]
    for phase in ("connect", "read"):
        timeouts[phase] = min(timeouts[phase] or longest, longest)


def limit_retries() -> None:
    """Make a stream give up a refused connection after 25 s and a silent one after a minute (both measured).

    These times are of huggingface_hub's own six tries with 23 s of pauses; `datasets` would repeat them up to 20
    times, for nine minutes where connections are refused. Finished work is kept when this gives up.
    """
    import datasets

    limit_timeouts()
    for kind in ("READ", "OPEN"):
        setattr(datasets.config, f"STREAMING_{kind}_MAX_RETRIES", 1)
        setattr(datasets.config, f"STREAMING_{kind}_RETRY_INTERVAL", 0)


def require_reachable(what: str, remedy: str = "") -> None:
    """Fail within seconds if the Hub cannot be reached; its clients would retry for half a minute or more."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise offline(what)
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except Exception as error:  # the HTTP library behind it is an implementation detail of huggingface_hub
        raise DataError(
            f"cannot fetch {what}: no answer from {constants.ENDPOINT} ({type(error).__name__}): check the network, "
            f"or name a mirror in HF_ENDPOINT; to use what is already in the Hub cache, set HF_HUB_OFFLINE=1{remedy}"
        ) from None


def offline(what: str) -> DataError:
    return DataError(
        f"cannot fetch {what}: not in the Hub cache {cache()}, and HF_HUB_OFFLINE is set: unset it, or set HF_HOME "
        "to a cache that has it"
    )


def another_commit(repo: str, commit: str, kept: str) -> DataError:
    from huggingface_hub import constants

    remedy = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "try again"
    return DataError(
        f"cannot fetch {repo} at {commit}: the Hub did not return it, and `datasets` has only a copy of {kept}: "
        f"{remedy}, or use that copy with data.revision={kept}"
    )


def arrived_damaged(what: str) -> DataError:
    return DataError(
        f"{what} was damaged in the download (its sha256 is not the one the Hub states) and has been removed: "
        "run the same command to download it again"
    )


def is_damaged(path: Path) -> bool:
    """Whether a large file of the cache differs from its name, the sha256 that the Hub states for it."""
    blob = path.resolve()
    return bool(re.fullmatch("[0-9a-f]{64}", blob.name)) and sha256_of(blob) != blob.name


def remove_unfinished(repo: str) -> None:
    """Remove what killed downloads left: each download starts over, in a file with a random name of its own.

    A download in progress, for another corpus say, holds the lock of its file, so what it has so far stays.
    """
    folder = repo_cache(repo)
    for path in folder.glob("blobs/*.incomplete"):
        lock = cache() / ".locks" / folder.name / f"{path.name.split('.')[0]}.lock"
        with suppress(OSError), FileLock(lock, timeout=0):  # held, or the cache is another user's
            path.unlink()


def remove(path: Path) -> None:
    path.resolve().unlink()
    path.unlink()


def refused(what: str, error: BaseException, remedy: str = "") -> DataError:
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__:  # itself it says nothing
        error = error.__cause__
    if isinstance(error, OSError) and _is_of_the_cache(error):
        return unwritable(cache(), error, "HF_HOME")
    message = " ".join(str(error).split())
    return DataError(f"{what} cannot be read: {type(error).__name__}: {message}{remedy}")


def _is_of_the_cache(error: OSError) -> bool:
    """Whether there is no room, or a file of the Hub cache may not be written; not one of a folder as data.repo.

    Only what a full disk raises names no file. A file that is missing would be missing elsewhere too.
    """
    in_cache = Path(str(error.filename)).is_relative_to(cache().parent)
    return error.errno in NO_ROOM or (in_cache and not isinstance(error, FileNotFoundError))


def failed(what: str, error: BaseException, remedy: str = "") -> DataError:
    """Return the error for a failure that the network may have caused."""
    from huggingface_hub import constants

    try:
        if not os.path.isdir(what) and not constants.HF_HUB_OFFLINE:
            require_reachable(what, remedy)
    except DataError as unreachable:
        return unreachable
    if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):  # as `datasets` raises without a copy
        return offline(what)
    return refused(what, error, remedy)


def cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_cache(repo: str) -> Path:
    return cache() / f"datasets--{repo.replace('/', '--')}"


def remember_commit(repo: str, revision: str | None, commit: str) -> None:
    """Record the commit of a branch or tag (None: main), where huggingface_hub does, for work without the Hub."""
    from huggingface_hub import constants

    noted = repo_cache(repo) / "refs" / (revision or "main")
    if revision == commit or constants.HF_HUB_OFFLINE:
        return
    with suppress(OSError, DataError):  # the cache may be another user's
        noted.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(noted, noted.parent) as file:
            file.write(commit.encode())


def remembered_commit(repo: str, revision: str | None) -> str:
    """Return the commit noted for a branch or tag; of main, where there is no note, the newest in the cache.

    Raises DataError when there is none.
    """
    noted = repo_cache(repo) / "refs" / (revision or "main")
    if noted.is_file():
        return noted.read_text()
    snapshots = sorted(repo_cache(repo).glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    if revision or not snapshots:
        raise offline(f"{repo} at {revision or 'any commit'}")
    return snapshots[-1].name
