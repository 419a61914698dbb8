"""The real `datasets` and `huggingface_hub` clients against a local Hub, in subprocesses (27 CPU seconds)."""

import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data.openwebtext import OPENWEBTEXT, OPENWEBTEXT_COMMIT, OPENWEBTEXT_FILES
from tests.conftest import ROOT
from tests.data.hub_stub import HubStub

ROWS = 5
MIB = 1 << 20
STREAM = {"source": "hub", "repo": "owner/name", "streaming": True}
WHOLE = {"source": "hub", "repo": "owner/name"}
PART = {"source": "openwebtext", "limit_documents": 12}
CARD = b"""---
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
---
"""
SCRIPT = """
import json, os, resource, sys, time
import numpy
import data.files, data.hub, data.loader
from data import DataError
from data.corpora import make_corpus
from data.prepare import prepare

class Progress:
    def say(self, text):
        print(text)

    def advance(self, stage, done, total):
        assert 0 <= done <= total

# It maps files through torch, which takes a second to load.
data.loader.mapped = lambda path, dtype: numpy.memmap(path, dtype, mode="r")
# OpenWebText asks for 42 GB, which the tests do not write; the disk of /proc has no room all the same.
free_bytes = data.files.free_bytes
data.files.free_bytes = lambda path: 10**12 if free_bytes(path) else 0
if "HURRY" in os.environ:  # a twentieth of every wait for an answer, a hundredth of every pause between two tries
    data.hub.TIMEOUT_SECONDS /= 20
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds / 100)
if "FILE_BYTES" in os.environ:  # as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_BYTES"]),) * 2)
workers = int(os.environ.get("WORKERS", 1))
for arguments in map(json.loads, sys.argv[2:]):
    folder = sys.argv[1] + "-streamed" * arguments.get("streaming", False)  # or it would be found prepared
    try:
        source = make_corpus(**arguments)
        corpus = prepare(source, "bytes", folder, val_fraction=0.1, workers=workers, progress=Progress())
    except DataError as error:
        print(json.dumps({"refused": str(error)}))
        continue
    tokens = [corpus.train.read(0, 1 << 30), corpus.val.read(0, 1 << 30)]
    text = "".join(corpus.tokenizer().decode(part.tolist()) for part in tokens)
    documents = [document for document in text.split("<|endoftext|>") if document]
    print(json.dumps({"name": corpus.name, "documents": sorted(documents), "state": corpus.manifest.state}))
"""


def document(file: int, row: int) -> str:
    return f"document {file:02d} {row:02d} " + "of some length " * 20


def documents(files: range) -> list[str]:
    return [document(file, row) for file in files for row in range(ROWS)]


def parquet(file: int, **other_columns: list) -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table({"text": [document(file, row) for row in range(ROWS)], **other_columns})
    pyarrow.parquet.write_table(table, buffer, row_group_size=2)
    return buffer.getvalue()


@pytest.fixture
def hub():
    """OpenWebText in 80 tiny files, and owner/name with an older and a newer commit."""
    with HubStub() as stub:
        stub.add(
            OPENWEBTEXT, {name: parquet(i) for i, name in enumerate(OPENWEBTEXT_FILES)}, OPENWEBTEXT_COMMIT
        )
        stub.add("owner/name", {"README.md": CARD, "plain_text/train-0.parquet": parquet(0)})
        files = {f"plain_text/train-{i}.parquet": parquet(i) for i in range(3)}
        stub.add("owner/name", {"README.md": CARD, **files})
        yield stub


def start(hub: HubStub, home: Path, *arguments: object, **environment: str) -> subprocess.Popen:
    """Start Python in a subprocess whose Hub is `hub` and whose Hub cache is below `home`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        # `datasets` would import torch to stream, 2 s
        env={**clean, "USE_TORCH": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def python(hub: HubStub, home: Path, *arguments: object, **environment: str) -> str:
    """Return what it says in the end."""
    with start(hub, home, *arguments, **environment) as process:
        try:
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return said


def attempt(hub: HubStub, home: Path, *corpora: dict, **environment: str) -> tuple[list[dict], str]:
    """Prepare corpora below `home`, one after the other. Returns what became of each, and what was said."""
    said = python(hub, home, "-c", SCRIPT, home / "corpora", *map(json.dumps, corpora), **environment)
    ends = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(ends) == len(corpora)
    return ends, said


def prepared(hub: HubStub, home: Path, **arguments) -> dict:
    ((end,), _) = attempt(hub, home, arguments)
    assert "refused" not in end, end
    return end


def refused(hub: HubStub, home: Path, **arguments) -> str:
    ((end,), _) = attempt(hub, home, arguments)
    assert "\n" not in end["refused"]
    return end["refused"]


@pytest.mark.slow
def test_openwebtext_download_resumes_after_a_dropped_connection(hub: HubStub, tmp_path: Path):
    """The client receives blocks of 10 MiB: after a cut in the second, it asks for all that follows the first."""
    noise = [random.randbytes(21 * MIB // ROWS) for _ in range(ROWS)]
    hub.repos[OPENWEBTEXT][OPENWEBTEXT_COMMIT][OPENWEBTEXT_FILES[3]] = parquet(3, noise=noise)
    hub.cut[OPENWEBTEXT_FILES[3]] = 1
    (result,), said = attempt(hub, tmp_path, {"source": "openwebtext"})
    assert (result["name"], result["state"]) == ("openwebtext", OPENWEBTEXT_COMMIT)
    assert result["documents"] == documents(range(80))
    assert "24.2 GB" in said  # what the real files and tokens take is said first
    assert "18.1 GB" in said
    assert sorted(hub.fetched()) == list(OPENWEBTEXT_FILES)
    asked = [part for method, path, part in hub.log if method == "GET" and OPENWEBTEXT_FILES[3] in path]
    assert asked == ["", f"bytes={10 * MIB}-"]
    hub.down = True  # all is cached, so nothing is asked
    assert prepared(hub, tmp_path, source="openwebtext", limit_documents=7)["name"] == "openwebtext-first-7"


def test_a_subset_of_openwebtext_downloads_only_its_files(hub: HubStub, tmp_path: Path):
    parts = (
        {"limit_documents": 7},
        {"files": ["plain_text/train-0001[0-2]-*"]},
        {"files": ["plain_text/train-0001[0-2]-*", "train-99.parquet"]},
    )
    (first, some, none), _ = attempt(hub, tmp_path, *({"source": "openwebtext", **part} for part in parts))
    assert first["documents"] == documents(range(2))[:7]
    assert some["name"] == "openwebtext-3-files"
    assert some["documents"] == documents(range(10, 13))
    assert "data.files=train-99.parquet matches none" in none["refused"]
    fetched = hub.fetched()
    assert (fetched[:2], sorted(fetched[2:])) == (list(OPENWEBTEXT_FILES[:2]), list(OPENWEBTEXT_FILES[10:13]))


def test_a_damaged_download_is_named_removed_and_fetched_again(hub: HubStub, tmp_path: Path):
    hub.spoilt.add(OPENWEBTEXT_FILES[1])
    message = refused(hub, tmp_path, source="openwebtext", limit_documents=7)
    assert OPENWEBTEXT_FILES[1] in message
    assert "sha256" in message
    hub.spoilt.clear()
    hub.log.clear()
    assert len(prepared(hub, tmp_path, source="openwebtext", limit_documents=7)["documents"]) == 7
    assert hub.fetched() == [OPENWEBTEXT_FILES[1]]


@pytest.mark.slow
def test_a_hub_dataset_loads_at_main_at_a_commit_and_by_file(hub: HubStub, tmp_path: Path):
    old, new = hub.repos["owner/name"]
    at_old = [{**each, "revision": old} for each in (STREAM, WHOLE)]
    ends, _ = attempt(hub, tmp_path, STREAM, WHOLE, *at_old)
    assert [end["state"] for end in ends] == [new, new, old, old]
    assert [end["documents"] for end in ends] == [documents(range(3))] * 2 + [documents(range(1))] * 2
    hub.log.clear()
    one_file = {"files": ["plain_text/train-2.parquet"]}
    ends, _ = attempt(hub, tmp_path / "other", {**STREAM, **one_file}, {**WHOLE, **one_file})
    assert [end["documents"] for end in ends] == [documents(range(2, 3))] * 2
    assert hub.fetched() == ["plain_text/train-2.parquet"]


@pytest.mark.slow
def test_streaming_with_a_limit_survives_a_dropped_connection(hub: HubStub, tmp_path: Path):
    hub.cut["plain_text/train-0.parquet"] = 1
    result = prepared(hub, tmp_path, **STREAM, limit_documents=4)
    assert result["documents"] == documents(range(1))[:4]
    assert hub.fetched() == ["plain_text/train-0.parquet"]


@pytest.mark.slow
def test_streaming_and_repair_download_no_file_beyond_the_limit(hub: HubStub, tmp_path: Path):
    """Three files are enough text for two worker processes, which could start on all of them."""
    (result,), _ = attempt(hub, tmp_path, {**STREAM, "limit_documents": 4}, WORKERS="2")
    assert result["documents"] == documents(range(1))[:4]
    assert hub.fetched() == ["plain_text/train-0.parquet"]
    (shard,) = tmp_path.glob("corpora-streamed/*/val-00000.bin")
    whole = shard.read_bytes()
    shard.write_bytes(bytes(len(whole)))
    hub.log.clear()
    python(hub, tmp_path, "-m", "data.inspect", shard.parent, "--repair", shard.name)
    assert shard.read_bytes() == whole
    assert hub.fetched() == ["plain_text/train-0.parquet"]


@pytest.mark.slow
def test_a_damaged_dataset_file_is_refused_then_downloaded_again(hub: HubStub, tmp_path: Path):
    hub.cut["plain_text/train-0.parquet"] = 1
    hub.spoilt.add("plain_text/train-1.parquet")
    assert "owner/name/train-1.parquet was damaged in the download" in refused(hub, tmp_path, **WHOLE)
    hub.spoilt.clear()
    hub.log.clear()
    assert prepared(hub, tmp_path, **WHOLE)["documents"] == documents(range(3))
    assert hub.fetched() == ["plain_text/train-1.parquet"]


@pytest.mark.slow
def test_offline_reads_the_hub_cache_and_is_refused_without_one(hub: HubStub, tmp_path: Path):
    online = prepared(hub, tmp_path, **WHOLE)
    hub.down = True
    hub.log.clear()
    (cached,), _ = attempt(hub, tmp_path, {**WHOLE, "limit_documents": 7}, HF_HUB_OFFLINE="1")
    assert cached["documents"] == documents(range(3))[:7]
    assert cached["state"] == online["state"]
    ends, _ = attempt(hub, tmp_path / "empty", WHOLE, {"source": "openwebtext"}, HF_HUB_OFFLINE="1")
    for end in ends:
        assert ": not in the Hub cache" in end["refused"]
        assert "HF_HUB_OFFLINE is set" in end["refused"]
        assert "HF_HOME" in end["refused"]
    assert not [path for _, path, _ in hub.log if path.startswith(("/datasets", "/api/datasets"))]


@pytest.mark.slow
def test_offline_main_is_the_commit_that_main_was_when_online(hub: HubStub, tmp_path: Path):
    """Not the commit downloaded last. Streaming leaves no files in the Hub cache, yet its corpus is found offline."""
    older = [{**each, "revision": next(iter(hub.repos["owner/name"]))} for each in (STREAM, WHOLE)]
    online, _ = attempt(hub, tmp_path, STREAM, older[0], WHOLE, older[1])
    hub.down = True
    offline, _ = attempt(hub, tmp_path, STREAM, WHOLE, HF_HUB_OFFLINE="1")
    assert offline == [online[0], online[2]]


@pytest.mark.slow
def test_a_cached_copy_of_another_commit_is_never_used_in_its_place(hub: HubStub, tmp_path: Path):
    """`datasets` falls back to such a copy on any error, whatever the revision."""
    older, newer = ({**WHOLE, "revision": commit} for commit in hub.repos["owner/name"])
    both = (newer, {**newer, "streaming": True})
    prepared(hub, tmp_path, **older)
    hub.dead.add("README.md")
    online, _ = attempt(hub, tmp_path, *both, HURRY="1")
    (*offline, kept), _ = attempt(hub, tmp_path, *both, {**older, "limit_documents": 4}, HF_HUB_OFFLINE="1")
    for ends, remedy in ((online, "try again"), (offline, "unset HF_HUB_OFFLINE")):
        for end in ends:
            assert f"cannot fetch owner/name at {newer['revision']}" in end["refused"]
            assert f"{remedy}, or use that copy with data.revision={older['revision']}" in end["refused"]
    assert kept["documents"] == documents(range(1))[:4]
    hub.dead.clear()
    again, _ = attempt(hub, tmp_path, *both)
    assert [end["documents"] for end in again] == [documents(range(3))] * 2


@pytest.mark.slow
def test_a_folder_from_save_to_disk_is_read_if_files_name_arrow(hub: HubStub, tmp_path: Path):
    import datasets

    hub.down = True
    folder = str(tmp_path / "saved")
    datasets.Dataset.from_dict({"text": documents(range(2))}).save_to_disk(folder)
    saved = {"source": "hub", "repo": folder}
    (refusal, read), _ = attempt(hub, tmp_path, saved, {**saved, "files": "*.arrow"})
    assert "data.files='*.arrow'" in refusal["refused"]
    assert read["documents"] == documents(range(2))


def test_a_dead_network_fails_in_seconds_with_the_remedy(hub: HubStub, tmp_path: Path):
    hub.down = True
    start = time.perf_counter()
    ends, _ = attempt(hub, tmp_path, WHOLE, {"source": "openwebtext"})
    assert time.perf_counter() - start < 20
    for end in ends:
        assert hub.url in end["refused"]
        assert "HF_ENDPOINT" in end["refused"]
        assert "HF_HUB_OFFLINE=1" in end["refused"]


@pytest.mark.slow
def test_a_broken_openwebtext_download_fails_fast_and_resumes_later(hub: HubStub, tmp_path: Path):
    hub.dead.add(OPENWEBTEXT_FILES[2])
    start = time.perf_counter()
    message = refused(hub, tmp_path, source="openwebtext", limit_documents=12)
    assert time.perf_counter() - start < 20
    assert OPENWEBTEXT_FILES[2] in message
    assert "the same command continues" in message
    hub.dead.clear()
    hub.log.clear()
    result = prepared(hub, tmp_path, source="openwebtext", limit_documents=12)
    assert result["documents"] == documents(range(3))[:12]
    assert hub.fetched() == [OPENWEBTEXT_FILES[2]]


@pytest.mark.slow
def test_leftovers_of_a_killed_download_are_removed_active_ones_kept(hub: HubStub, tmp_path: Path):
    def unfinished() -> list[Path]:
        return list(tmp_path.glob("hf/hub/*/blobs/*.incomplete"))

    def prepare_another(file: int) -> None:
        prepared(hub, tmp_path, source="openwebtext", files=[OPENWEBTEXT_FILES[file]])

    hub.stalled.add(OPENWEBTEXT_FILES[0])
    with start(hub, tmp_path, "-c", SCRIPT, tmp_path / "corpora", json.dumps(PART)) as process:
        while not unfinished() and process.poll() is None:
            time.sleep(0.01)
        prepare_another(1)
        left = unfinished()
        process.kill()
    assert len(left) == 1
    assert unfinished() == left
    prepare_another(2)
    assert not unfinished()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "file", "how"),
    [
        (STREAM, "plain_text/train-0.parquet", "down"),
        (STREAM, "plain_text/train-2.parquet", "down"),
        (STREAM, "plain_text/train-2.parquet", "mute"),
        (WHOLE, "plain_text/train-0.parquet", "mute"),
        (PART, OPENWEBTEXT_FILES[2], "mute"),
    ],
)
def test_a_network_lost_during_download_is_refused_with_the_remedy(
    hub: HubStub, tmp_path: Path, arguments: dict, file: str, how: str
):
    """With every wait shortened this takes 2 to 5 s; with the clients' defaults, 28 s to minutes."""
    hub.dies_at[file] = how
    start = time.perf_counter()
    (end,), _ = attempt(hub, tmp_path, arguments, HURRY="1")
    assert time.perf_counter() - start < 25
    # 6 or 7 tries; the default of `datasets` is 120.
    assert sum(path.endswith(file) for _, path, _ in hub.log) < 10
    assert f"no answer from {hub.url}" in end["refused"]
    assert "HF_ENDPOINT" in end["refused"]
    hub.dies_at.clear()
    hub.down = hub.mute = False
    result = prepared(hub, tmp_path, **arguments)
    assert result["documents"] == documents(range(3))[: arguments.get("limit_documents")]


def test_too_little_disk_for_the_hub_cache_is_refused_naming_hf_home(hub: HubStub, tmp_path: Path):
    """The files of /proc are on a disk of their own that has no room."""
    (end,), _ = attempt(hub, tmp_path, {"source": "openwebtext"}, HF_HOME="/proc/hf")
    assert "not enough disk space: openwebtext needs about 24.2 GB in /proc/hf/hub" in end["refused"]
    assert end["refused"].endswith("0 B free: free some, or choose another disk with HF_HOME")


@pytest.mark.slow
def test_a_hub_cache_disk_that_fills_up_is_refused_naming_hf_home(hub: HubStub, tmp_path: Path):
    """During a download, while writing its Arrow copy (which is not compressed), and with OpenWebText."""
    noise = parquet(0, noise=[random.randbytes(10_000) for _ in range(ROWS)])
    hub.add("owner/download", {"README.md": CARD, "plain_text/train-0.parquet": noise})
    zeros = parquet(0, zeros=[bytes(10_000)] * ROWS)
    hub.add("owner/arrow", {"README.md": CARD, "plain_text/train-0.parquet": zeros})
    hub.add(OPENWEBTEXT, {OPENWEBTEXT_FILES[0]: noise}, OPENWEBTEXT_COMMIT)
    corpora = [{"source": "hub", "repo": repo} for repo in ("owner/download", "owner/arrow")]
    corpora.append({"source": "openwebtext", "limit_documents": 4})
    ends, _ = attempt(hub, tmp_path, *corpora, FILE_BYTES="20000")
    for end in ends:
        assert f"no space to write {tmp_path / 'hf' / 'hub'}" in end["refused"]
        assert "choose another disk with HF_HOME" in end["refused"]
    again, _ = attempt(hub, tmp_path, *corpora)
    assert [end["documents"] for end in again] == [documents(range(1))] * 2 + [documents(range(1))[:4]]


@pytest.mark.slow
def test_an_unwritable_hub_cache_is_refused_naming_hf_home(hub: HubStub, tmp_path: Path):
    (tmp_path / "hf").write_text("a file, so there is no folder below it, also not for root")
    ends, _ = attempt(hub, tmp_path, WHOLE, STREAM, PART)
    for end in ends:
        assert f"cannot write {tmp_path / 'hf' / 'hub'}" in end["refused"]
        assert "use HF_HOME to choose a folder that you can write to" in end["refused"]


def test_a_missing_column_split_config_repo_or_revision_is_named(hub: HubStub, tmp_path: Path):
    hub.add("owner/script", {"README.md": b"# old", "script.py": b"raise SystemExit"})
    wrong = {
        "no column 'content'; it has text": {"column": "content"},
        "['train']": {"split": "test"},
        "Available: ['plain_text']": {"config": "other"},
        "Repository Not Found": {"repo": "owner/nothing"},
        "v9": {"revision": "v9"},
        "scripts are no longer supported": {"repo": "owner/script"},
    }
    ends, _ = attempt(hub, tmp_path, *({**WHOLE, **arguments} for arguments in wrong.values()))
    for words, end in zip(wrong, ends, strict=True):
        assert words in end["refused"]
    assert "owner/script" in end["refused"]


@pytest.mark.slow
def test_a_local_folder_is_read_through_datasets_without_network(hub: HubStub, tmp_path: Path):
    """JSON lines, parquet, and CSV, for which this package has no reader."""
    hub.down = True
    lines = [json.dumps({"text": text}) + "\n" for text in documents(range(2))]
    written = {
        "lines.jsonl": "".join(lines).encode(),
        "table.csv": "\n".join(["text", *documents(range(2))]).encode(),
        "rows.parquet": parquet(0),
    }
    folders = []
    for name, content in written.items():
        folders.append(tmp_path / name.split(".")[0])
        folders[-1].mkdir()
        (folders[-1] / name).write_bytes(content)
    whole = [{"source": "hub", "repo": str(folder)} for folder in folders]
    streamed = [{**each, "streaming": True} for each in whole]
    before, _ = attempt(hub, tmp_path, *streamed, *whole)
    assert [end["name"] for end in before] == ["lines", "table", "rows"] * 2
    assert [end["documents"] for end in before] == [documents(range(count)) for count in (2, 2, 1)] * 2
    (folders[0] / "lines.jsonl").write_text("".join(lines[:ROWS]))
    (folders[2] / "rows.parquet").write_bytes(b"no parquet")
    ends, _ = attempt(hub, tmp_path, streamed[0], streamed[2], whole[0], whole[2])
    for after, broken in (ends[:2], ends[2:]):
        assert after["documents"] == documents(range(1))
        assert after["state"] != before[0]["state"]
        assert str(folders[2]) in broken["refused"]
        assert "check the network" not in broken["refused"]


@pytest.mark.slow
def test_a_csv_column_is_the_text_that_stands_there(hub: HubStub, tmp_path: Path):
    """pandas reads NA, null and None as missing values, and a column of numbers as numbers."""
    hub.down = True
    texts = ["NA", "null", "None", "nan", "true", "007", "1e3", "a, b"]
    for name, separator in (("comma.csv", ","), ("tab.tsv", "\t")):
        rows = [f'"{text}"{separator}{row}' for row, text in enumerate(texts)]
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("\n".join([f"text{separator}number", *rows]))
    common = {"source": "hub", "repo": str(tmp_path / "comma.csv")}
    (whole, streamed, tabs, numbers, missing), _ = attempt(
        hub,
        tmp_path,
        common,
        {**common, "streaming": True},
        {**common, "repo": str(tmp_path / "tab.tsv"), "streaming": True},
        {**common, "column": "number"},
        {**common, "column": "content"},
    )
    for end in (whole, streamed, tabs):
        assert end.get("documents") == sorted(texts), end
    assert numbers.get("documents") == list("01234567"), numbers
    assert "has no column 'content'; it has text, number" in missing["refused"]


@pytest.mark.slow
def test_repair_rebuilds_a_shard_from_a_local_folder(hub: HubStub, tmp_path: Path):
    hub.down = True
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.parquet").write_bytes(parquet(0))
    rows = {"source": "hub", "repo": str(tmp_path / "rows")}
    attempt(hub, tmp_path, rows, {**rows, "streaming": True})
    shards = sorted(tmp_path.glob("corpora*/*/train-00000.bin"))
    assert len(shards) == 2
    for shard in shards:
        whole = shard.read_bytes()
        shard.write_bytes(bytes(len(whole)))
        python(hub, tmp_path, "-m", "data.inspect", shard.parent, "--repair")
        assert shard.read_bytes() == whole


@pytest.mark.slow
def test_hidden_files_count_only_if_they_are_asked_for(hub: HubStub, tmp_path: Path):
    """A change in .git leaves the corpus as it is; a change in a hidden folder named in `files` makes another."""
    hub.down = True
    folder = tmp_path / "rows"
    for name in (".git/index", ".held/rows.parquet"):
        (folder / name).parent.mkdir(parents=True)
    (folder / ".held" / "rows.parquet").write_bytes(parquet(1))
    (folder / "rows.parquet").write_bytes(parquet(0))
    corpus = {"source": "hub", "repo": str(folder), "streaming": True}
    hidden = {**corpus, "files": [".held/*"]}
    before, _ = attempt(hub, tmp_path, corpus, hidden)
    assert [end["documents"] for end in before] == [documents(range(1)), documents(range(1, 2))]
    (folder / ".git" / "index").write_text("as `git status` writes it")
    (folder / ".held" / "rows.parquet").write_bytes(parquet(2))
    after, _ = attempt(hub, tmp_path, corpus, hidden)
    assert after[0] == before[0]
    assert after[1]["documents"] == documents(range(2, 3))


@pytest.mark.slow
def test_a_hub_folder_of_txt_files_is_refused_naming_text_files(hub: HubStub, tmp_path: Path):
    hub.down = True
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one document\nof two lines\n")
    message = refused(hub, tmp_path, source="hub", repo=str(tmp_path / "texts"), streaming=True)
    assert f"use data=text_files data.files={tmp_path / 'texts'}" in message
