"""A run exported for transformers, by the command line. About 8 s, 4 of them transformers' import."""

import base64
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken
import torch
from safetensors.torch import load_file, save_file
from tiktoken_ext import openai_public

from data.tokenizer import END_OF_TEXT, load_tokenizer
from model.config import MLPKind
from model.huggingface import _transformers_imports
from tests.conftest import ROOT
from tests.local_server import Handler, Server
from tests.training.conftest import having
from training import checkpoint, export
from training.load_run import load_run
from training.sampling import sample_text
from training.trainer import train

pytest.importorskip("transformers")


@pytest.fixture
def exported(monkeypatch):
    """`python -m training.export ARGUMENTS`, in this process; returns what it ends with, None or an error."""

    def exported(*arguments: object) -> str | None:
        monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
        try:
            export.main()
        except SystemExit as end:
            return end.code

    return exported


def write_ranks(path: Path) -> str:
    words = b"th the \x20t \x20th \x20the qu qui ow \x20b \x20j um ox \xc3\xaf 17 \x20\x20 \n\n aa aaa".split(
        b" "
    )
    tokens = dict.fromkeys([*(bytes([value]) for value in range(256)), *filter(None, words)])
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))
    return str(path)


def draw_weights(run: Path) -> None:
    """Weights that say something else after every token; those of a few steps repeat one letter, as would ones of
    large biases, or of embeddings that are large beside what the blocks add."""
    file = checkpoint.find(run) / checkpoint.WEIGHTS
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(each.shape, generator=draw) * (0.1 if name.endswith(("bias", "wte.weight")) else 1)
        for name, each in load_file(file).items()
    }
    save_file(weights, file)


LLAMA = {"rope": True, "rope_theta": 500.0, "rmsnorm": True, "mlp": "swiglu", "n_kv_head": 1}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("tokenizer", "switches"),
    [("bytes", {}), ("ranks", {}), ("bytes", LLAMA)],
    ids=["bytes", "ranks", "llama"],
)
def test_a_pipeline_continues_a_prompt_as_sample_py_does(config, exported, tmp_path, tokenizer, switches):
    if tokenizer == "ranks":
        tokenizer = write_ranks(tmp_path / "own.tiktoken")
    run, folder = tmp_path / "run", tmp_path / "exported"
    config = replace(config, model=replace(config.model, **switches))
    train(having(replace(config, data=replace(config.data, tokenizer=tokenizer)), steps=1), run)
    draw_weights(run)
    assert exported(run, folder) is None

    with _transformers_imports():
        from transformers import pipeline

        theirs = pipeline("text-generation", str(folder))
    ours, encoding = load_run(run, "cpu")
    tokens = torch.randint(encoding.n_vocab, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.model(tokens).logits, rtol=1e-4, atol=1e-4)
    for prompt in ("the quick", "17 naïve  foxes\n\nj"):
        known = len(encoding.encode_ordinary(prompt))
        expected = sample_text(ours, encoding, prompt, 32 - known, torch.Generator(), temperature=0)
        (continued,) = theirs(prompt, do_sample=False)
        assert continued["generated_text"] == expected
        assert len(set(expected.removeprefix(prompt))) > 5
    settings = json.loads((folder / "generation_config.json").read_text())
    assert (settings["temperature"], settings["top_k"], settings["do_sample"]) == (0.8, 50, True)
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1  # who may read the rest may read the weights
    assert exported(run, folder) == f"error: {folder} is not an empty folder: name a new one."


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_every_encoding_of_tiktoken_gives_the_same_tokens(name, tmp_path, monkeypatch):
    """With its own split pattern and special tokens, which leave gaps, and a few ranks."""
    ranks = load_tokenizer(write_ranks(tmp_path / "own.tiktoken"))._mergeable_ranks
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **_: ranks)
    arguments = openai_public.ENCODING_CONSTRUCTORS[name]()
    encoding = tiktoken.Encoding(**arguments | {"explicit_n_vocab": None})
    theirs = export.tokenizer_of(encoding, 10**6)
    assert theirs.convert_tokens_to_ids(list(encoding._special_tokens)) == [
        *encoding._special_tokens.values()
    ]
    choose = random.Random(0)
    pieces = ["the", "quick", "Fox", "don't", "WE'LL", "1234567", "naïve", "东京", "aaaaaaa", "x=(y)"]
    pieces += ["\u017f", "\r\n", "\n\n", "\t", "  ", ""]
    text = " ".join(choose.choices(pieces, k=3000))
    text += "".join(
        chr(choose.choice([choose.randrange(0xD800), choose.randrange(0xE000, 0x110000)]))
        for _ in range(3000)
    )
    assert theirs.encode(text) == encoding.encode_ordinary(text)
    assert theirs.decode(theirs.encode(text)) == text


def test_what_cannot_be_exported_is_refused_in_one_line(
    config, run_of_a_step, exported, tmp_path, monkeypatch
):
    assert re.fullmatch(
        r"error: \S+/none does not exist; name a run .*", exported(tmp_path / "none", tmp_path / "to")
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert re.fullmatch(r"error: \S+/empty holds no checkpoint: .*", exported(empty, tmp_path / "to"))
    file = tmp_path / "file"
    file.touch()
    assert exported(empty, file) == f"error: {file} is not an empty folder: name a new one."

    masked = replace(config, data=replace(config.data, document_mask=True))
    train(having(masked, steps=1), tmp_path / "masked")
    refusal = exported(tmp_path / "masked", tmp_path / "to")
    assert re.fullmatch(r"error: \S+/masked was trained with data\.document_mask=true, .*", refusal)
    for switches, said in (
        (
            {"qk_norm": True},
            "qk_norm: GPT-2's format has no such part, and Llama's only together with rope, ",
        ),
        (LLAMA | {"sinks": True, "window": 8}, "sinks, window: neither GPT-2's format nor Llama's has such"),
    ):
        modern, run = replace(config, model=replace(config.model, **switches)), tmp_path / said[:5]
        train(having(modern, steps=1), run)
        assert exported(run, tmp_path / "to").startswith(f"error: {run} cannot be exported: {said}")
    assert re.fullmatch(r"error: \S+/file/to cannot be written .*", exported(run_of_a_step, file / "to"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    refusal = exported(run_of_a_step, tmp_path / "to")
    assert refusal == "error: training.export needs transformers: pip install transformers."
    assert not (tmp_path / "to").exists()


def test_a_gguf_file_holds_the_same_weights_and_tokens(config, exported, tmp_path):
    """As gguf's own reader has them; its names and layouts are those that llama.cpp's converter writes."""
    gguf = pytest.importorskip("gguf")
    tokenizer = write_ranks(tmp_path / "own.tiktoken")
    run, folder = tmp_path / "run", tmp_path / "exported"
    train(having(replace(config, data=replace(config.data, tokenizer=tokenizer)), steps=1), run)
    assert exported(run, folder, "--gguf") is None
    read = gguf.GGUFReader(folder / "model.gguf")
    value = {name: field.contents() for name, field in read.fields.items()}
    model, encoding = load_run(run, "cpu")
    assert (value["general.architecture"], value["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert value["gpt2.block_count"] == model.config.n_layer
    theirs = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert value["tokenizer.ggml.merges"] == [" ".join(pair) for pair in theirs["merges"]]
    tokens = value["tokenizer.ggml.tokens"]
    assert {tokens[token]: token for token in theirs["vocab"].values()} == theirs["vocab"]
    assert len(tokens) == encoding.n_vocab
    weights = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in read.tensors}
    ours = model.state_dict()
    assert torch.equal(weights["token_embd.weight"], ours["wte.weight"][: encoding.n_vocab])
    assert torch.equal(weights["blk.0.attn_qkv.weight"], ours["h.0.attn.c_attn.weight"])
    assert torch.equal(weights["blk.0.ffn_down.weight"], ours["h.0.mlp.c_proj.weight"])
    assert torch.equal(weights["output_norm.bias"], ours["ln_f.bias"])
    assert len(weights) == len(ours)


def test_a_gguf_file_of_bytes_has_a_merge_that_never_applies(run_of_a_step, exported, tmp_path):
    """Without any, llama.cpp cannot find the tokenizer's merges."""
    gguf = pytest.importorskip("gguf")
    assert exported(run_of_a_step, tmp_path / "to", "--gguf") is None
    field = gguf.GGUFReader(tmp_path / "to" / "model.gguf").fields["tokenizer.ggml.merges"]
    assert field.contents() == [f"{END_OF_TEXT} {END_OF_TEXT}"]


@pytest.mark.parametrize("tokenizer", ["bytes", "ranks"])
def test_llama_cpp_reads_a_gguf_file_and_says_the_same(config, exported, tmp_path, tokenizer):
    """llama.cpp itself: pip install llama-cpp-python gguf; it compiles for 20 minutes."""
    llama_cpp, _ = pytest.importorskip("llama_cpp"), pytest.importorskip("gguf")
    if tokenizer == "ranks":
        tokenizer = write_ranks(tmp_path / "own.tiktoken")
    run = tmp_path / "run"
    train(having(replace(config, data=replace(config.data, tokenizer=tokenizer)), steps=1), run)
    draw_weights(run)
    assert exported(run, tmp_path / "to", "--gguf") is None
    model, encoding = load_run(run, "cpu")
    llama = llama_cpp.Llama(str(tmp_path / "to/model.gguf"), n_ctx=32, logits_all=True, verbose=False)
    text = "the quick  naïve\n\n17 don't"
    tokens = encoding.encode_ordinary(text)
    assert llama.tokenize(text.encode()) == tokens
    assert llama.detokenize(tokens) == text.encode()
    llama.eval(tokens)
    logits = model(torch.tensor([tokens]))[0].detach()
    torch.testing.assert_close(torch.from_numpy(llama.scores[: len(tokens)]), logits, rtol=0.01, atol=0.01)
    llama.close()


def test_gguf_without_its_package_is_refused_before_anything_is_written(
    run_of_a_step, exported, tmp_path, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refusal = exported(run_of_a_step, tmp_path / "to", "--gguf")
    assert refusal == "error: --gguf needs the package gguf: pip install gguf."
    assert not (tmp_path / "to").exists()


def test_gguf_of_a_model_that_is_exported_as_a_llama_is_refused(config, exported, tmp_path):
    llama = replace(config, model=replace(config.model, rope=True, rmsnorm=True, mlp=MLPKind.swiglu))
    train(having(llama, steps=1), tmp_path / "run")
    refusal = exported(tmp_path / "run", tmp_path / "to", "--gguf")
    assert refusal.endswith("which has no rope, rmsnorm or swiglu; leave --gguf out.")
    assert not (tmp_path / "to").exists()


class _Hub(Handler):
    """Answers an upload as the Hub does; `server.received`: repository -> path -> content."""

    def do_POST(self):
        content = self.body()
        if self.headers.get("Authorization") != "Bearer right":
            return self.send_json({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.received[name] = {"visibility": asked["visibility"]}
            return self.send_json({"url": f"{self.server.url}/{name}"})
        repo, action = re.fullmatch(r"/api/models/(.+)/(preupload|commit)/main", self.path).groups()
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(content)["files"]
            ]
            return self.send_json({"files": files})
        for line in map(json.loads, content.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                self.server.received[repo][value["path"]] = base64.b64decode(value["content"])
        self.send_json({"commitUrl": f"{self.server.url}/{repo}/commit/abc", "commitOid": "abc"})


@pytest.fixture
def hub():
    with Server(_Hub) as server:
        server.received = {}
        yield server


@pytest.mark.slow
def test_push_uploads_the_folder_to_a_private_repository(run_of_a_step, hub, tmp_path, user_environment):
    def push(folder: str, token: str, endpoint: str = hub.url) -> subprocess.CompletedProcess:
        environment = {
            "HF_ENDPOINT": endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": token,
            "HF_HOME": str(tmp_path),
        }
        return subprocess.run(
            [sys.executable, "-m", "training.export", run_of_a_step, tmp_path / folder, "--push", "me/tiny"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=user_environment | environment,
        )

    done = push("a", "right")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"pushed: {hub.url}/me/tiny/commit/abc\n")
    written = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert hub.received == {"me/tiny": {"visibility": "private"} | written}
    for refused in (
        push("b", "wrong"),
        push("c", "right", "http://127.0.0.1:9"),
    ):  # no such token; no network
        assert refused.returncode == 1
        error = refused.stderr.splitlines()[-1]
        assert re.fullmatch(
            r"error: (\S+) is written, but not pushed \(.*\): `hf upload me/tiny \1` tries again\.", error
        )
