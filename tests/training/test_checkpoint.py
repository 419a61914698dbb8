import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file

from kernels import get_attention
from model.config import GPTConfig
from model.gpt import GPT
from training import checkpoint
from training.config import ConfigError


def save(run, step, keep=2):
    return checkpoint.save(run, step, {"w": torch.full((4,), float(step))}, {"identity": {}}, keep)


def test_the_newest_checkpoint_is_found_and_read_back(tmp_path):
    for step in (5, 10, 100):
        save(tmp_path, step)
    found = checkpoint.find(tmp_path)
    assert found == checkpoint.find(found) == checkpoint.find(tmp_path / "checkpoints")
    assert checkpoint.load_training(found)["step"] == 100
    assert checkpoint.load_weights(found, "cpu")["w"].tolist() == [100.0] * 4


def test_saving_deletes_old_checkpoints_beyond_the_keep_limit(tmp_path):
    for step in (5, 10, 100, 1000):
        save(tmp_path, step, keep=2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000100", "step-00001000"]


def test_a_partial_checkpoint_is_ignored_and_overwritten_by_the_next_save(tmp_path):
    save(tmp_path, 5)
    partial = tmp_path / "checkpoints" / "step-00000010.partial"
    partial.mkdir()
    (partial / "weights.safetensors").write_bytes(b"half")
    assert checkpoint.find(tmp_path).name == "step-00000005"
    save(tmp_path, 10)
    assert checkpoint.load_weights(checkpoint.find(tmp_path), "cpu")["w"][0] == 10
    assert not partial.exists()


def test_leftover_folders_do_not_block_saving_and_are_deleted_later(tmp_path, monkeypatch):
    """A kill leaves them while an old checkpoint is deleted or replaced; so does a folder that cannot be deleted."""
    folder = tmp_path / "checkpoints"
    for step in (5, 10):
        save(tmp_path, step)
    for name in ("step-00000005.replaced", "step-00000010.replaced", "step-00000020.partial"):
        (folder / name).mkdir()
        (folder / name / "weights.safetensors").write_bytes(b"half")
    delete = shutil.rmtree
    with monkeypatch.context() as patch:

        def half(path, **_):
            (path / "training.pt").unlink(missing_ok=True)

        patch.setattr(shutil, "rmtree", half)  # each save leaves what it could not delete
        for _ in range(2):
            save(tmp_path, 10)
        save(tmp_path, 20)
    assert shutil.rmtree is delete
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000010", "step-00000020"]
    for found in checkpoint.saved(tmp_path):
        checkpoint.load_training(found)
    save(tmp_path, 30)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000020", "step-00000030"]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(tmp_path, monkeypatch):
    save(tmp_path, 5, keep=1)
    rename = Path.rename

    def refuse(path, target):
        if path.name == "step-00000005":
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    save(tmp_path, 10, keep=1)
    assert checkpoint.find(tmp_path).name == "step-00000010"


@pytest.mark.parametrize(
    ("writer", "error", "said"),
    [
        ("torch.save", OSError(28, "No space left on device"), "No space left"),
        (
            "torch.save",
            RuntimeError("[enforce fail at inline_container.cc:672] ."),
            r"disk full\? \[enforce fail",
        ),
        ("training.checkpoint.save_file", SafetensorError("I/O error: No space left"), "No space left"),
    ],
)
def test_a_failing_write_leaves_no_checkpoint(tmp_path, monkeypatch, writer, error, said):
    def full_disk(*_):
        raise error

    monkeypatch.setattr(writer, full_disk)
    with pytest.raises(ConfigError, match=said):
        save(tmp_path, 5)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_error_for_a_truncated_file_names_it_and_an_older_checkpoint(tmp_path):
    weights = save(tmp_path, 5) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        ConfigError, match=r"weights\.safetensors cannot be read .* there is no older checkpoint"
    ):
        checkpoint.load_weights(checkpoint.find(tmp_path), "cpu")
    newer = save(tmp_path, 10)
    (newer / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"use the checkpoint before it, .*step-00000005"):
        checkpoint.load_weights(newer, "cpu")


def cut(name, size):
    def harm(parts):
        (parts / name).write_bytes((parts / name).read_bytes()[:size])

    return harm


PART = "__0_0.distcp"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut(PART, 100), rf"parts/{PART} cannot be read \(it ends at byte 100 of \d,\d+\)"),
        (
            lambda parts: (parts / PART).unlink(),
            rf"parts/{PART} cannot be read \(No such file or directory\)",
        ),
        (cut(".metadata", 100), r"parts/\.metadata cannot be read \(pickle data was truncated\)"),
        (lambda parts: (parts / ".metadata").unlink(), r"parts has lost \.metadata, which lists the parts"),
    ],
    ids=["cut", "missing", "cut list", "no list"],
)
def test_of_a_checkpoint_in_parts_the_damaged_file_is_named(tmp_path, capfd, harm, said):
    older, saved = save(tmp_path, 5), save(tmp_path, 10)
    (saved / checkpoint.WEIGHTS).unlink()
    dcp.save({"model.w": torch.full((4,), 3.0)}, checkpoint_id=saved / checkpoint.PARTS, no_dist=True)
    into = {"model.w": torch.zeros(4)}
    checkpoint.load_parts(saved, into)
    assert into["model.w"].tolist() == checkpoint.load_weights(saved, "cpu")["w"].tolist() == [3.0] * 4

    harm(saved / checkpoint.PARTS)
    assert checkpoint.find(saved) == saved
    for load in (lambda: checkpoint.load_weights(saved, "cpu"), lambda: checkpoint.load_parts(saved, into)):
        with pytest.raises(ConfigError, match=f"{said}; use the checkpoint before it, {older}"):
            load()
    assert capfd.readouterr().err == ""  # torch would print where it looked for a list


def test_the_pickled_weights_of_an_older_run_are_read(tmp_path):
    saved = save(tmp_path, 5)
    (saved / "weights.safetensors").unlink()
    torch.save({"w": torch.full((4,), 3.0)}, saved / "weights.pt")
    assert checkpoint.load_weights(checkpoint.find(tmp_path), "cpu")["w"].tolist() == [3.0] * 4


def test_pickled_code_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return print, ("ran",)

    saved = save(tmp_path, 5)
    torch.save({"optimizer": Payload()}, saved / "training.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        checkpoint.load_training(saved)


def test_the_weights_of_a_model_are_read_by_safetensors_alone_with_tied_ones_once(tmp_path):
    model = GPT(GPTConfig(vocab_size=100, seq_len=8, n_layer=1, n_head=2, n_embd=16), get_attention("naive"))
    saved = checkpoint.save(tmp_path, 5, model.state_dict(), {}, keep=1)
    weights = load_file(saved / "weights.safetensors")
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())


def test_who_may_read_a_runs_files_may_read_its_weights(tmp_path):
    saved = save(tmp_path, 5)
    (tmp_path / "other").touch()
    modes = [path.stat().st_mode for path in (tmp_path / "other", *saved.iterdir())]
    assert modes == modes[:1] * 3


def test_the_best_checkpoint_is_kept_and_found_through_its_link(tmp_path):
    assert checkpoint.best(tmp_path) is None
    link = tmp_path / "checkpoints" / "best"
    for step, loss in ((5, 3.0), (10, 2.1), (20, None), (30, None)):
        save(tmp_path, step, keep=1)
        if loss:
            checkpoint.keep_best(tmp_path, step, loss, 100, keep=1)
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000010", "step-00000030"]
    assert checkpoint.best(tmp_path) == (checkpoint.find(link), 2.1, 100)
    assert checkpoint.load_training(checkpoint.find(link))["step"] == 10
    assert checkpoint.find(tmp_path).name == "step-00000030"
    checkpoint.drop_after(tmp_path, 10)
    assert checkpoint.best(tmp_path)
    checkpoint.drop_after(tmp_path, 5)  # the best, of step 10, is newer and goes as well
    assert checkpoint.best(tmp_path) is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("at", ["write_text", "symlink_to", "replace"])
def test_a_kill_while_replacing_the_best_checkpoint_leaves_the_old_best(tmp_path, monkeypatch, at):
    save(tmp_path, 5, keep=1)
    checkpoint.keep_best(tmp_path, 5, 3.0, 100, keep=1)
    save(tmp_path, 10, keep=1)
    act = getattr(Path, at)

    def killed(path, *args, **options):
        if at != "replace" or path.name == "best.partial":
            raise KeyboardInterrupt
        return act(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, at, killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.keep_best(tmp_path, 10, 2.0, 100, keep=1)
    found, loss, _ = checkpoint.best(tmp_path)
    assert (checkpoint.load_training(found)["step"], loss) == (5, 3.0)
    checkpoint.keep_best(tmp_path, 10, 2.0, 100, keep=1)
    assert checkpoint.best(tmp_path).loss == 2.0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best", "step-00000010"]


def test_a_best_link_that_was_copied_as_a_folder_can_be_replaced(tmp_path):
    """`cp -rL`, and any other copy that does not preserve links, makes a folder of it."""
    save(tmp_path / "run", 5, keep=1)
    checkpoint.keep_best(tmp_path / "run", 5, 3.0, 100, keep=1)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not (copy / "checkpoints" / "best").is_symlink()
    assert checkpoint.best(copy).loss == 3.0
    save(copy, 10, keep=1)
    checkpoint.keep_best(copy, 10, 2.0, 100, keep=1)
    assert checkpoint.best(copy) == (checkpoint.at(copy, 10), 2.0, 100)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["best", "step-00000010"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5)
    checkpoint.save(tmp_path, 5, {"w": torch.full((4,), 7.0)}, {"identity": {}}, 2)
    assert checkpoint.load_weights(checkpoint.find(tmp_path), "cpu")["w"][0] == 7
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere", "nowhere does not exist"),
        (".", "holds no checkpoint"),
        ("file", "file is a file; name a run directory"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused(tmp_path, place, said):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=said):
        checkpoint.find(tmp_path / place)


def test_find_on_a_sweep_folder_is_refused_and_lists_its_runs(tmp_path):
    for run in ("0_nano_naive", "1_nano_sdpa"):
        save(tmp_path / run, 5)
    with pytest.raises(
        ConfigError, match=r"holds runs; name one of them: .*/0_nano_naive, .*/1_nano_sdpa\.$"
    ):
        checkpoint.find(tmp_path)
