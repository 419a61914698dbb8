"""`python -m reproduce compare` on real runs: what it shows, what it says differs, what it survives."""

import ast
import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from warnings import catch_warnings

import pytest
import yaml

from benchmarks import __main__ as benchmarks
from reproduce.__main__ import main
from reproduce.common import ReproduceError
from reproduce.comparison import charts, seeds
from reproduce.comparison.compare import _common_folder
from reproduce.comparison.page import page
from reproduce.comparison.reaching import to_loss
from reproduce.comparison.runs import differing_settings, find_runs
from reproduce.comparison.table import HEADER, table, text, warnings
from reproduce.plots import colour
from tests.conftest import ROOT, rows, text_data
from tests.reproduce.pages import assert_fits
from tests.wandb_stub import WandbStub
from training.config import AttentionConfig, Config, LoggerConfig, ModelConfig, TrainerConfig, WandbMode
from training.trainer import train


@pytest.fixture(scope="module")
def sweep(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of naive and one of sdpa, wandb offline folders included."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as variables:
        variables.delenv("TRITON_INTERPRET", raising=False)  # the tests switch it on, and a comparison tells
        for number, name in enumerate(("naive", "sdpa")):
            train(_config(text_file, name), folder / f"{number}_{name}")
    return folder


@pytest.mark.slow
def test_the_page_goes_to_wandb_as_an_artifact_and_into_a_run(sweep, user_environment, tmp_path):
    """The wandb run of the page itself is none of the runs when they are compared again."""
    shutil.copytree(sweep, tmp_path, dirs_exist_ok=True)
    sweep, page = tmp_path, tmp_path / "compare.html"
    command = [sys.executable, "-m", "reproduce", "compare", str(sweep), "--html", str(page)]
    with WandbStub() as server:
        done = subprocess.run(
            [*command, "--wandb"],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env=user_environment | server.variables,
        )
    assert done.returncode == 0, done.stderr
    ((name, run),) = server.runs.items()
    assert done.stdout.splitlines()[-1] == f"wandb: {server.url}/someone/tilegpt/runs/{name}"
    assert server.files["compare.html"] == page.read_bytes()
    assert run.facts["displayName"] == f"compare {tmp_path.name}"
    assert run.history[-1]["compare"]["_type"] == "html-file"
    assert [each.path.name for each in find_runs([str(sweep)])] == ["0_naive", "1_sdpa"]


@pytest.mark.slow
def test_a_server_that_denies_the_page_is_an_error_and_leaves_it_in_its_file(
    sweep, user_environment, tmp_path
):
    page = tmp_path / "compare.html"
    command = [sys.executable, "-m", "reproduce", "compare", str(sweep), "--html", str(page), "--wandb"]
    with WandbStub() as server:
        server.stranger = True
        variables = user_environment | server.variables
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the page was not sent to wandb: ")
    assert last.endswith(f"it is in {page}")
    assert page.is_file()


def _config(text_file: Path, attention: str) -> Config:
    return Config(
        model=ModelConfig(seq_len=32, n_layer=1, n_head=2, n_embd=32),
        attention=AttentionConfig(attention),
        data=text_data(text_file),
        trainer=TrainerConfig(
            steps=12, batch_tokens=256, log_every=2, eval_every=4, sample_tokens=0, device="cpu"
        ),
        logger=LoggerConfig(mode=WandbMode.offline),
    )


@pytest.fixture
def copies(sweep: Path, tmp_path: Path) -> Path:
    """A copy of the sweep that a test may damage."""
    return shutil.copytree(sweep, tmp_path / "sweep", ignore=shutil.ignore_patterns("wandb", "checkpoints"))


def told(*paths: Path) -> str:
    """What the command prints about the runs; without the page, whose plots take a second."""
    return text(find_runs([str(path) for path in paths]))


def test_a_sweep_is_compared_to_its_first_run(sweep, capsys):
    assert main(["compare", str(sweep)]) == 0
    said = capsys.readouterr().out
    summaries = [json.loads((sweep / run / "summary.json").read_text()) for run in ("0_naive", "1_sdpa")]
    naive, sdpa = said.splitlines()[1:3]
    assert naive.startswith("naive")
    assert f"{summaries[0]['val/perplexity']:.2f}" in naive
    speeds = [summary["perf/tokens_per_second"] for summary in summaries]
    assert f"{speeds[1]:,.0f} ({speeds[1] / speeds[0]:.2f}x)" in sdpa
    assert "differ in more than attention" not in said
    assert "different environments" not in said

    assert main(["compare", str(sweep), "--html", str(sweep / "compare.html" / "below")]) == 1
    assert (
        "below cannot be written (File exists): choose another place with --html FILE"
        in capsys.readouterr().err
    )
    page = (sweep / "compare.html").read_text()
    for title in ("Loss against tokens", "Loss against time", "Loss minus that of naive", "Training speed"):
        assert title in page
    assert page.count("<figure") == 4
    assert "1 layer, 2 heads, 32 wide" in page
    assert "<script src" not in page
    assert "<link" not in page


def test_the_tokens_and_the_time_to_a_loss_are_read_between_two_evaluations(copies, capsys):
    """256 tokens a step. The second run needs half the steps, and never goes as low as 3.0."""
    for run, losses in (("0_naive", [6.0, 4.0, 3.0]), ("1_sdpa", [4.0, 3.5, 3.1])):
        file = copies / run / "metrics.csv"
        lines = rows(copies / run)
        evaluated = [row for row in lines if row["val/loss"]]
        for number, (row, loss) in enumerate(zip(evaluated, losses, strict=True), 1):
            row["val/loss"], row["seconds"] = loss, 100 * number
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, lines[0])
            writer.writeheader(), writer.writerows(lines)
    assert main(["compare", str(copies), "--loss", "3.5"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"to validation loss 3.5 +tokens +time\n", said)
    assert re.search(r"\nnaive +2.56 k +250 s\n", said)  # 10 steps
    assert re.search(r"\nsdpa +2.05 k \(0.80x\) +200 s \(0.80x\)\n", said)
    main(["compare", str(copies), "--loss", "3.0"])
    assert re.search(r"\nsdpa +not reached\n", capsys.readouterr().out)


def test_a_loss_is_reached_in_evaluations_of_the_same_tokens(copies, sweep):
    """With trainer.eval_tokens the last evaluation is of others than those before it."""
    paths = [copies / "0_naive", copies / "1_sdpa"]
    for path in paths:
        config = yaml.safe_load((path / "config.yaml").read_text())
        config["trainer"]["eval_tokens"], steps = 32, config["trainer"]["steps"]
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        path.joinpath("metrics.csv").write_text(
            f"step,tokens,seconds,val/loss\n1,100,1,9\n2,200,2,5\n{steps},300,3,4\n"
        )
    assert re.search(r"\nsdpa +not reached", to_loss(find_runs(map(str, paths)), 4.5))
    assert re.search(r"\nsdpa +200 \(1.00x\)", to_loss(find_runs(map(str, paths)), 5.0))
    others = find_runs([str(paths[0]), str(sweep / "1_sdpa")])
    assert re.search(r"\nsdpa.* other tokens", to_loss(others, 5.0))


def test_in_a_sweep_what_a_run_took_to_a_loss_is_relative_to_its_match(copies):
    names = [(attention, seed, 0.001) for attention in ("naive", "sdpa") for seed in (1, 2)]
    paths = sweep_of(copies, dict.fromkeys(names, 3.0))
    for path, (first, second) in zip(paths, ((9, 8), (9, 4), (9, 5), (9, 4)), strict=True):
        path.joinpath("metrics.csv").write_text(
            f"step,tokens,seconds,val/loss\n1,100,1,{first}\n2,200,2,{second}\n"
        )
    said = to_loss(find_runs([str(path) for path in paths]), 5.0)
    assert re.search(r"\nnaive seed=1 +not reached", said)
    assert re.search(r"\nsdpa seed=1 +200 +2 s *\n", said)
    assert re.search(r"\nsdpa seed=2 +180 \(1.00x\)", said)


def test_step_time_is_split_by_phase_in_the_table_and_in_a_bar_per_run(sweep):
    runs = find_runs([str(sweep)])
    column = HEADER.index("data / fwd+bwd / opt")
    for run, row in zip(runs, table(runs), strict=True):
        summary = run.summary
        split = run.step_split()
        assert sum(split.values()) == pytest.approx(summary["perf/step_ms"])
        shown = [summary[f"perf/{phase}_ms"] for phase in ("data", "forward_backward", "optimizer")]
        assert row[column] == " / ".join(f"{ms:.2f}" for ms in shown)
        assert min(split.values()) >= 0
    content = page(runs)
    assert content.count('<div class="bar">') == 6  # a step's time, the run's time, memory
    longest = max(sum(run.step_split().values()) for run in runs)
    for run in runs:
        share = run.summary["perf/optimizer_ms"] / longest
        assert f'width:{share:.2%};--shade:#9db4c7" title="optimizer' in content


def test_the_page_fits_a_phone_and_a_dark_screen_and_tells_what_is_pointed_at(sweep):
    content = page(find_runs([str(sweep)]))
    assert_fits(content, 720, HEADER)
    assert re.search(r"svg\.onpointermove = \(event\) => point\(", content)
    assert 'tip.className = "tip"' in content
    assert ".tip {" in content
    numbers = json.loads(re.search(r'id="numbers">(.*?)</script>', content)[1])
    shown = {run["label"]: run["colour"] for run in numbers["runs"]}
    assert shown == {name: colour(name) for name in ("naive", "sdpa")}  # as in every picture
    for name, shade in shown.items():
        assert f'<i class="dot" style="--shade:{shade}"></i>{name}' in content


def test_an_old_run_without_phase_times_is_still_compared(copies):
    old = copies / "0_naive"
    before = rows(old)
    gone = [f"perf/{phase}_ms" for phase in ("data", "forward_backward", "optimizer")]
    columns = [name for name in before[0] if name not in gone]
    with (old / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(before)
    summary = json.loads((old / "summary.json").read_text())
    (old / "summary.json").write_text(json.dumps({k: v for k, v in summary.items() if k not in gone}))
    runs = find_runs([str(copies)])
    assert [run.step_split() is None for run in runs] == [True, False]
    assert main(["compare", str(copies)]) == 0
    assert table(runs)[0][HEADER.index("data / fwd+bwd / opt")] == "-"
    assert "<span>not logged</span>" in (copies / "compare.html").read_text()


def measured(run: Path, speeds: list[float], **phases_ms: float) -> None:
    """Rewrite the run's files with these tokens/s, row by row, and these step times in the summary."""
    lines = [f"{step},{256 * step},{speed}" for step, speed in enumerate(speeds, 1)]
    (run / "metrics.csv").write_text("\n".join(["step,tokens,perf/tokens_per_second", *lines]) + "\n")
    summary = json.loads((run / "summary.json").read_text())
    summary |= {f"perf/{name}_ms": ms for name, ms in phases_ms.items()}
    (run / "summary.json").write_text(json.dumps(summary))


STEP = {"step": 35.0, "data": 0.15, "forward_backward": 31.0, "optimizer": 2.6}


def test_the_exchange_of_several_ranks_is_a_phase_where_they_logged_it(copies):
    measured(copies / "0_naive", [14_000] * 3, **STEP)
    measured(copies / "1_sdpa", [14_000] * 3, **STEP, exchange=1.0)
    runs = find_runs([str(copies)])
    alone, ranks = (run.step_split() for run in runs)
    assert ranks == pytest.approx(alone | {"exchange": 1.0, "other": 0.25})
    column = HEADER.index("data / fwd+bwd / opt")
    phases = "0.15 / 31.00 / 2.60"
    assert [row[column] for row in table(runs)] == [phases, f"{phases} (exchange 1.00)"]
    for those, bars in ((runs, 1), (runs[:1], 0)):
        content = page(those)
        assert content.count('title="exchange ') == bars
        assert content.count("</i>exchange&emsp;") == bars  # in their key
        assert content.count("Exchange is ms per step") == bars


def test_usual_variation_of_speeds_and_phases_gives_no_warning(copies):
    measured(copies / "0_naive", [10_383, 13_184, 14_580], **STEP)
    measured(copies / "1_sdpa", [*[14_000] * 19, 90], **STEP | {"data": 0.9, "optimizer": 3.4})
    assert not warnings(find_runs([str(copies)]))


def test_large_variation_of_speeds_and_phases_gives_warnings(copies):
    measured(copies / "0_naive", [983, 378, 372], **STEP | {"step": 1100.0, "optimizer": 224.0})
    measured(copies / "1_sdpa", [21_000, 21_700, 22_000], **STEP)
    varied, optimizer = warnings(find_runs([str(copies)]))
    assert "more than 2x within a run: naive (372 to 983)." in varied
    assert (
        "optimizer took 2.60 ms of a step in sdpa and 224.00 in naive: more than 1.5x apart, by over 5%"
        in optimizer
    )
    # On another machine, the phases have other reasons to differ.
    environment = copies / "1_sdpa" / "environment.json"
    environment.write_text(environment.read_text().replace('"device_name": "', '"device_name": "Other '))
    assert not [each for each in warnings(find_runs([str(copies)])) if "optimizer took" in each]


def test_an_interpreted_run_is_reported_without_warnings_on_phases(copies, text_file, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    train(_config(text_file, "sdpa_math"), copies / "2_math")
    measured(copies / "0_naive", [14_000] * 3, **STEP)
    measured(copies / "2_math", [140] * 3, **STEP | {"step": 3500.0, "optimizer": 5.6})
    runs = find_runs([str(copies / "0_naive"), str(copies / "2_math")])
    environment, interpreted = warnings(runs)
    assert environment == "they ran in different environments: TRITON_INTERPRET."
    assert "kernels were interpreted, not compiled (TRITON_INTERPRET=1): sdpa_math." in interpreted


def test_the_difference_of_losses_is_that_of_the_summaries(sweep):
    runs = find_runs([str(sweep)])
    losses = [run.summary["val/loss"] for run in runs]
    cell = table(runs)[1][1]
    assert cell.endswith(f"({losses[1] - losses[0]:+.1e})" if losses[1] != losses[0] else "(equal)")


@pytest.mark.slow
def test_wandb_folders_alone_give_the_same_table(sweep, tmp_path):
    for offline in sweep.glob("*/wandb/offline-run-*"):
        shutil.copytree(offline, tmp_path / "wandb" / offline.name)
    from_files = table(find_runs([str(sweep)]))
    # Two runs may have started in the same second, and then the order of their folders is undefined.
    runs = sorted(find_runs([str(tmp_path / "wandb")]), key=lambda run: run.facts["attention"])
    from_wandb = table(runs)
    assert [row[:6] for row in from_wandb] == [row[:6] for row in from_files]
    assert [row[-1] for row in from_wandb] == ["finished", "finished"]
    assert find_runs([str(tmp_path / "wandb")])[0].environment["torch"]


def test_an_unfinished_run_and_its_wandb_copy_have_equal_losses(sweep, tmp_path):
    run = shutil.copytree(sweep / "0_naive", tmp_path / "0_naive")
    (run / "summary.json").unlink()
    ours, wandbs = find_runs([str(run), str(run / "wandb" / "offline-run-*")])
    for each in (ours, wandbs):
        each.summary = {}
    assert table([ours, wandbs])[1][1].endswith(" (equal at step 12)")
    for column in ("train/loss", "val/loss"):
        assert wandbs.curve(column) == ours.curve(column)


def test_a_wandb_folder_that_takes_too_long_is_named(sweep, capsys, monkeypatch):
    monkeypatch.setattr("reproduce.comparison.runs._LEET_TIMEOUT", 0)
    (offline,) = (sweep / "0_naive").glob("wandb/offline-run-*")
    assert main(["compare", str(offline)]) == 1
    assert f"{offline}: wandb leet inspect did not read it within 0 s" in capsys.readouterr().err


def test_settings_other_than_attention_that_differ_are_listed(copies, capsys):
    config = copies / "1_sdpa" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1337", "seed: 7").replace("lr: 0.0006", "lr: 0.001"))
    environment = copies / "1_sdpa" / "environment.json"
    environment.write_text(environment.read_text().replace('"torch": "2', '"torch": "1'))
    assert main(["compare", str(copies / "*")]) == 0
    said = capsys.readouterr().out
    assert "the runs differ in more than attention: optimizer.lr, seed" in said
    assert "different environments: torch" in said
    assert "seed          naive: 1337, sdpa: 7" in said
    page = (copies / "compare.html").read_text()
    assert '<tr class="red"><td>torch</td>' in page
    assert '<tr class="red"><td>python</td>' not in page


@pytest.mark.parametrize(("context", "listed"), [(2048, False), (4096, True)])
def test_precise_delta_differs_only_where_its_default_is_not_what_it_was(copies, context, listed):
    for name, value in (("0_naive", "null"), ("1_sdpa", "false")):
        config = copies / name / "config.yaml"
        settings = re.sub("seq_len: .*", f"seq_len: {context}", config.read_text())
        config.write_text(settings.replace("precise_delta: null", f"precise_delta: {value}"))
    assert ("attention.precise_delta" in differing_settings(find_runs([str(copies)]))) is listed


def test_whether_null_became_cuda_graphs_is_told_though_no_setting_differs(copies):
    facts = copies / "1_sdpa" / "facts.json"
    facts.write_text(facts.read_text().replace('"cuda_graphs": false', '"cuda_graphs": true'))
    assert differing_settings(find_runs([str(copies)])) == {"cuda_graphs": [False, True]}


def test_runs_of_one_name_in_two_sweeps_have_labels_and_figures_of_their_own(copies):
    shutil.copytree(copies, copies / "again", ignore=shutil.ignore_patterns("again"))
    measured(copies / "0_naive", [14_000] * 3, **STEP)
    measured(copies / "again" / "0_naive", [14_000] * 3, **STEP | {"step": 50.0, "data": 7.0})
    runs = find_runs([str(copies / "*_*"), str(copies / "again" / "*")])
    assert [run.label for run in runs] == [
        f"{name} ({folder}/{number}_{name})"
        for folder in ("sweep", "again")
        for number, name in enumerate(("naive", "sdpa"))
    ]
    content = page(runs)
    bars = content[content.index("Where the time of a step goes") :]
    for run, data in ((runs[0], 0.15), (runs[2], 7.0)):
        assert (
            re.search(rf"<span>{re.escape(run.label)}</span>.*?<span>data ([\d.]+),", bars)[1]
            == f"{data:.2f}"
        )


def sweep_of(copies: Path, losses: dict[tuple[str, int, float], float]) -> list[Path]:
    """Runs with these (attention, seed, learning rate) and final losses."""
    made = []
    for (attention, seed, rate), loss in losses.items():
        run = copies / f"{attention}_{seed}_{rate}"
        shutil.copytree(copies / {"naive": "0_naive", "sdpa": "1_sdpa"}[attention], run)
        config = (run / "config.yaml").read_text()
        config = config.replace("seed: 1337", f"seed: {seed}").replace("lr: 0.0006", f"lr: {rate}")
        (run / "config.yaml").write_text(config)
        summary = json.loads((run / "summary.json").read_text()) | {"val/loss": loss}
        (run / "summary.json").write_text(json.dumps(summary))
        made.append(run)
    return made


def test_runs_of_one_attention_are_named_by_what_they_set_otherwise(copies):
    paths = [copies / "with_adamw", copies / "with_muon"]
    for path in paths:
        shutil.copytree(copies / "1_sdpa", path)
    config = (paths[1] / "config.yaml").read_text()
    (paths[1] / "config.yaml").write_text(config.replace("name: adamw", "name: muon"))
    runs = find_runs([str(path) for path in paths])
    assert [run.label for run in runs] == ["sdpa optimizer=adamw", "sdpa optimizer=muon"]
    assert "differ in more than attention" not in text(runs)  # it is the optimizers that are compared
    assert len(set(re.findall(r'"colour":"(#\w+)"', page(runs)))) == 2


def test_a_sweep_over_attention_seed_and_rate_is_compared_in_matched_pairs(copies):
    losses = {
        ("naive", 1, 0.001): 3.10, ("naive", 2, 0.001): 3.12, ("sdpa", 1, 0.001): 3.101, ("sdpa", 2, 0.001): 3.119,
        ("naive", 1, 0.002): 3.20, ("naive", 2, 0.002): 3.22, ("sdpa", 1, 0.002): 3.300, ("sdpa", 2, 0.002): 3.321,
    }  # fmt: skip
    paths = sweep_of(copies, losses)
    said = told(*paths)
    assert "differ in more than attention" not in said
    assert "relative to the run of naive with equal settings" in said
    runs = find_runs([str(path) for path in paths])
    assert len({run.label for run in runs}) == 8
    for run, row, (attention, seed, rate) in zip(runs, table(runs), losses, strict=True):
        difference = losses[attention, seed, rate] - losses["naive", seed, rate]
        if attention == "sdpa":
            assert run.label == f"sdpa lr={rate} seed={seed}"
            assert row[1].endswith(f"({difference:+.2g})")
    slow, fast = (row for row in seeds.table(runs) if row[1] == "sdpa")
    assert seeds.shown(runs) == (seeds.HEADER, seeds.table(runs))
    assert slow[0] == "lr 0.001"
    assert slow[3] == "3.1100 ± 0.013"
    assert slow[4].endswith(" ± 0.0014")
    assert slow[5].startswith("no: ")
    assert fast[5].startswith("yes: 4.9 times the gap between seeds, 0.021")
    assert said.count("± is the standard deviation") == 1
    assert said.count("the geometric mean of their pairs' ratios") == 1
    assert "±" not in told(*paths[::2])  # one seed
    content = page(runs)
    assert content.count("± is the standard deviation") == 1
    assert "By attention, over seeds" in content
    assert len(set(re.findall(r'"colour":"(#\w+)"', content))) == 2  # one a backend
    numbers = json.loads(re.search(r'id="numbers">(.*?)</script>', content)[1])
    patterns = {run["label"]: run["pattern"] for run in numbers["runs"]}
    assert (
        patterns["sdpa lr=0.002 seed=2"]
        == patterns["naive lr=0.002 seed=2"]
        != patterns["naive lr=0.001 seed=2"]
    )


def test_a_run_missing_from_a_sweep_costs_only_its_own_pair(copies):
    names = [(attention, seed, 0.001) for attention in ("naive", "sdpa") for seed in (1, 2, 3)]
    paths = sweep_of(copies, {name: 3.0 + 0.01 * name[1] for name in names})
    shutil.rmtree(paths[1])
    del paths[1]
    said = told(*paths)
    assert "without a run of naive with equal settings, so not compared: sdpa seed=2." in said
    header, (naive, sdpa) = seeds.shown(find_runs([str(path) for path in paths]))
    assert header[0] == "attention"  # no settings, as none differ
    assert (naive[1], naive[3], sdpa[1], sdpa[4]) == ("2", "-", "3", "no: equal")
    (alone,) = (row for row in table(find_runs([str(path) for path in paths])) if row[0] == "sdpa seed=2")
    assert alone[1] == "3.0200"


def test_runs_that_repeat_a_seed_tell_nothing_of_the_gap_between_seeds(copies):
    """Each run twice, with a rounding error between the attentions; then the repeats have other initial weights."""
    names = [(attention, 1, rate) for rate in (0.001, 0.002) for attention in ("naive", "sdpa")]
    paths = sweep_of(copies, {name: 3.0 + 1e-8 * (name[0] == "sdpa") for name in names})
    again = [shutil.copytree(path, path.with_name(f"{path.name}_again")) for path in paths]

    def verdicts() -> list[str]:
        rows = seeds.table(find_runs([str(path) for path in (*paths, *again)]))
        return [row[5] for row in rows if row[1:3] == ["sdpa", "2"]]

    assert [each.partition(",")[0] for each in verdicts()] == ["not known: one seed"] * 2
    for path in again:
        config = path / "config.yaml"
        config.write_text(config.read_text().replace("init_seed: null", "init_seed: 2"))
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps(summary | {"val/loss": summary["val/loss"] + 0.1}))
    assert [each.partition(",")[0] for each in verdicts()] == ["no: 1e-07 times the gap between seeds"] * 2


@pytest.mark.parametrize(
    ("differences", "gap", "words"),
    [
        ([0.001, -0.001, 0.002], 0.02, "no: 0.033 times the gap between seeds"),
        (
            [0.001, 0.0011, 0.001],
            0.02,
            "no: 0.052 times the gap between seeds, 0.02; yet the same in every pair",
        ),
        ([0.1, 0.101, 0.099], 0.02, "yes: 5 times"),
        ([0.1, -0.02], 0.02, "not known: 2 times the gap between seeds, 0.02, but 2 pairs leave it open"),
        ([0.1], 0.02, "not known: 5 times the gap between seeds, 0.02, but one pair"),
        ([0.1], None, "not known: one seed"),
        ([0.0, 0.0], 0.02, "no: equal"),
        ([0.0, float("nan")], 0.02, "not known: a loss is not finite"),
    ],
)
def test_a_difference_is_held_against_the_gap_between_seeds(differences, gap, words):
    assert seeds.answer(differences, gap).startswith(words)


def test_a_run_that_diverged_leaves_the_page_readable(copies):
    run = copies / "1_sdpa"
    lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    column = lines[0].index("train/loss")
    for line in lines[4:]:
        line[column] = line[column] and "nan"
    (run / "metrics.csv").write_text("\n".join(map(",".join, lines)) + "\n")

    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    embedded = re.search(r'id="numbers">(.*?)</script>', page(find_runs([str(copies)])))[1]
    numbers = json.loads(embedded, parse_constant=fail)
    points = [len(each["x"]) for each in numbers["charts"][0]["series"] if not each["dots"]]
    assert points == [7, 3]  # steps 1, 2, 4, ... 12; of the other run three are left


def test_without_seeds_the_comparison_says_that_noise_is_not_known(sweep):
    assert "more than noise is not known: no two runs differ in their seed alone" in told(sweep)


def test_speed_is_called_faster_only_where_ranges_do_not_overlap(copies):
    losses = {(name, seed, 0.001): 3.0 for name in ("naive", "sdpa") for seed in (1, 2)}
    paths = sweep_of(copies, losses)
    for speed, verdict in ((200, "2.00x, faster"), (110, "1.10x, ranges overlap")):
        for path, speeds in zip(paths, ([100, 99], [101, 120], [speed, speed], [speed, speed]), strict=True):
            measured(path, speeds)
            summary = json.loads((path / "summary.json").read_text())
            summary["perf/tokens_per_second"] = speed if "sdpa" in path.name else 100
            (path / "summary.json").write_text(json.dumps(summary))
        (row,) = (row for row in seeds.table(find_runs([str(path) for path in paths])) if row[1] == "sdpa")
        assert verdict in row[6]


def test_one_pair_of_runs_does_not_say_faster(copies):
    losses = {(name, 1, rate): 3.0 for name in ("naive", "sdpa") for rate in (0.001, 0.002)}
    for path in (paths := sweep_of(copies, losses)):
        measured(path, [200, 200] if "sdpa" in path.name else [100, 100])
    rows = [row for row in seeds.table(find_runs([str(path) for path in paths])) if row[1] == "sdpa"]
    assert [row[6].endswith("x, one pair)") for row in rows] == [True, True]


def test_the_loss_axis_starts_where_the_curves_part():
    def curve(run: int, ends: list[float]) -> dict:
        return {"run": run, "x": list(range(10)), "y": [10 - x for x in range(7)] + ends, "dots": False}

    assert charts.parting([curve(0, [3, 2, 1]), curve(1, [3, 2.5, 2])], [0, 0]) == 7
    assert charts.parting([curve(0, [3, 2, 1]), curve(1, [3, 2, 1])], [0, 0]) is None
    apart = [{**curve(1, [4, 3, 2]), "y": [11 - x for x in range(10)]}, curve(0, [3, 2, 1])]
    assert charts.parting(apart, [0, 0]) is None  # from the first point on: nothing to leave out
    assert charts.parting([curve(0, [3, 2, 1])], [0]) is None
    # Two seeds, apart from the first point on: each run is compared with its match.
    other = {**curve(2, [3, 2, 1]), "y": [12 - x for x in range(10)]}
    seeds = [curve(0, [3, 2, 1]), curve(1, [3, 2.5, 2]), other, {**other, "run": 3}]
    assert charts.parting(seeds, [0, 0, 2, 2]) == 7
    assert charts.parting(seeds, [0, 0, 0, 0]) is None


def test_among_many_runs_only_those_that_differ_are_named(copies):
    for name in "234":
        shutil.copytree(copies / "1_sdpa", copies / name)
    config = copies / "3" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1337", "seed: 7"))
    assert "seed  sdpa seed=7: 7, all others: 1337\n" in told(copies)


@pytest.mark.slow
def test_time_split_excludes_checkpoints_and_allows_any_eval_interval(text_file, tmp_path):
    config = _config(text_file, "sdpa")
    for name, every in (("saves", {"save_every": 1}), ("evaluates", {"log_every": 5, "eval_every": 3})):
        train(replace(config, trainer=replace(config.trainer, **every)), tmp_path / name)
    evaluates, saves = find_runs([str(tmp_path)])
    assert saves.time_split()["steps"] == pytest.approx(12 * saves.summary["perf/step_ms"] / 1e3, rel=1e-3)
    assert evaluates.time_split()


def test_an_unfinished_run_shows_how_far_it_came(copies):
    run = copies / "1_sdpa"
    (run / "summary.json").unlink()
    lines = (run / "metrics.csv").read_text().splitlines()
    upto = next(i for i, line in enumerate(lines) if line.startswith("6,"))
    (run / "metrics.csv").write_text("\n".join([*lines[: upto + 1], "8,20"]))  # killed while writing
    said = told(copies)
    assert "unfinished, step 6 of 12" in said
    assert "not finished: sdpa" in said
    assert "at step 4)" in said  # losses are compared at the last step at which both runs were evaluated


def test_a_run_that_stopped_after_its_last_step_says_what_it_lacks(copies):
    run = copies / "1_sdpa"
    (run / "summary.json").unlink()
    facts = json.loads((run / "facts.json").read_text())
    (run / "facts.json").write_text(json.dumps({**facts, "corpus": "another"}))
    assert "all 12 steps done, but no summary" in told(copies)  # killed while it sampled, say
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (run / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row for row in rows if not row["val/loss"])
    loss, *_, state = table(find_runs([str(copies)]))[1][1:]
    assert (loss, state) == ("-", "all 12 steps done, but not evaluated")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("eval_tokens", "steps_alike"), [(64, [4]), (10**6, [4, 8])])
def test_losses_are_compared_at_a_step_where_the_same_tokens_were_predicted(
    text_file, tmp_path, eval_tokens, steps_alike
):
    """The shorter run's last evaluation is of the whole split, the longer one's at that step of eval_tokens of it."""
    config = _config(text_file, "sdpa")
    for steps in (8, 12):
        trainer = replace(config.trainer, steps=steps, eval_tokens=eval_tokens)
        train(replace(config, trainer=trainer), tmp_path / str(steps))
    short, long = runs = find_runs([str(tmp_path)])
    assert 8 in short.curve("val/loss", "step").keys() & long.curve("val/loss", "step").keys()
    assert table(runs)[1][1].endswith(f" at step {steps_alike[-1]})")
    (minus,) = (each for each in charts.charts(runs) if each["title"].startswith("Loss minus"))
    assert [each["x"] for each in minus["series"] if each["dots"]] == [[256 * step for step in steps_alike]]
    assert "the last validation loss is of the whole split" in text(runs)


def test_an_unfinished_run_shows_the_backend_that_auto_chose(copies, text_file):
    train(_config(text_file, "auto"), copies / "2")
    (copies / "2" / "summary.json").unlink()
    said = told(copies / "0_naive", copies / "2")
    assert "not finished: sdpa" in said
    assert "auto" not in said
    assert "differ in more than attention" not in said


@pytest.mark.parametrize(
    "name", ["config.yaml", "facts.json", "summary.json", "environment.json", "metrics.csv"]
)
def test_a_file_that_cannot_be_read_is_named(copies, capsys, name):
    (copies / "1_sdpa" / name).write_bytes(b"step\n\xff\n")
    assert main(["compare", str(copies / "1_sdpa")]) == 1
    assert f"{name} cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.yaml", "facts.json", "summary.json", "environment.json"])
def test_a_file_with_unexpected_content_is_named(copies, capsys, name):
    (copies / "1_sdpa" / name).write_text("[1]")
    assert main(["compare", str(copies / "1_sdpa")]) == 1
    assert f"{copies / '1_sdpa' / name} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("summary.json", '{"val/loss": "low"}', "val/loss is 'low', not a number"),
        ("config.yaml", "trainer: {steps: many}", "trainer.steps is 'many', not a number"),
        (
            "facts.json",
            '{"resumed": "twice"}',
            "resumed is 'twice', not steps with the settings that changed",
        ),
        ("facts.json", '{"resumed": {"4": {"seed": 2}}}', "resumed is {'4': {'seed': 2}}, not steps"),
    ],
)
def test_a_value_of_another_kind_is_named_and_leaves_out_its_run_alone(copies, capsys, name, text, said):
    (copies / "1_sdpa" / name).write_text(text)
    assert main(["compare", str(copies)]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"note: left out: {copies / '1_sdpa' / name} cannot be read: {said}")
    assert err.count("\n") == 1
    assert "\nnaive " in out
    assert "sdpa" not in out


def test_a_run_of_another_program_is_compared_by_the_fields_it_has(copies, capsys):
    other = copies / "0_naive"
    (other / "config.yaml").write_text("seed: 3\n")
    (other / "summary.json").write_text('{"steps": 12, "perf/tokens_per_second": 0}')
    (other / "metrics.csv").write_text("epoch,loss\n1,2.5\n")
    assert main(["compare", str(copies)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[1:3]] == [["naive", "-"], ["sdpa", said[2].split()[1]]]


@pytest.mark.slow
def test_only_a_part_of_a_resumed_run_is_reported(copies, text_file, capsys):
    config = _config(text_file, "sdpa")
    run = copies / "2_sdpa"
    train(replace(config, trainer=replace(config.trainer, save_every=6)), run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    shutil.rmtree(run / "wandb")
    (run / "summary.json").unlink()  # with it nothing is left to do
    again = replace(config, trainer=replace(config.trainer, resume=str(run)))
    train(again, copies / "3_sdpa")
    train(again, run)
    capsys.readouterr()
    assert "resume" not in told(copies / "0_naive", run)
    with catch_warnings(action="error"):  # of matplotlib's: a legend without a label
        assert main(["compare", str(copies / "0_naive"), str(copies / "3_sdpa")]) == 0
    said = capsys.readouterr().out
    assert "differ in more than attention: trainer.resume" in said
    part = "resumed: sdpa; curves, speed and memory cover only the part since then, time all of the training."
    assert part in said
    (folder,) = run.glob("wandb/offline-run-*")  # of the part alone
    assert part in told(folder)
    whole, *parts = (find_runs([str(path)])[0] for path in (run, folder, copies / "3_sdpa"))
    for each in parts:
        assert each.rows[0]["step"] > 6
        assert each.rows[0]["seconds"] > whole.curve("seconds", "step")[6]


@pytest.mark.slow
def test_a_run_resumed_with_changed_settings_reports_them(copies, text_file):
    config, run = _config(text_file, "naive"), copies / "2"

    def said_after(step: int, attention: str) -> list[str]:
        """The lines about settings changed on resuming, after the run is resumed from `step` with `attention`."""
        resume = str(run / "checkpoints" / f"step-{step:08}") if step else None
        trainer = replace(config.trainer, save_every=3, keep_checkpoints=9, resume=resume)
        train(replace(config, attention=AttentionConfig(attention), trainer=trainer), run)
        lines = told(run, copies / "0_naive").splitlines()
        assert ("  speed and memory of" in "".join(lines)) == bool(step)
        return [line.removeprefix("! ") for line in lines if " was resumed " in line]

    naive_to_sdpa = "was resumed with attention.name naive -> sdpa: its losses come from both settings."
    assert said_after(0, "naive") == []
    assert said_after(9, "sdpa") == [f"after step 9 sdpa {naive_to_sdpa}"]
    rows = [row["step"] for row in find_runs([str(run)])[0].last_part]
    assert rows[0] > 9
    assert rows[-1] == 12
    # Resuming from 6 drops what followed: sdpa runs from 6 on. Then from 3 on it is naive again, as before step 3.
    assert said_after(6, "sdpa") == [f"after step 6 sdpa {naive_to_sdpa}"]
    assert said_after(3, "naive") == []
    # A wandb folder holds a single part of the run, and tells the same.
    assert said_after(3, "sdpa") == [f"after step 3 sdpa {naive_to_sdpa}"]
    newest = max(run.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert f"! after step 3 sdpa {naive_to_sdpa}" in told(newest)


def test_long_run_names_do_not_squeeze_the_plots(copies):
    names = [f"2026-11-23_14-12-42_a_name_of_{'many_' * 12}words_{seed}" for seed in (1, 2)]
    for name in names:
        shutil.copytree(copies / "0_naive", copies / name)
    with catch_warnings(action="error"):  # of matplotlib's: axes that collapsed
        assert main(["compare", *(str(copies / name) for name in names)]) == 0


def test_a_run_with_a_summary_but_no_metrics_is_compared(copies, capsys):
    (copies / "1_sdpa" / "metrics.csv").write_text("")
    assert main(["compare", str(copies)]) == 0
    assert "finished" in capsys.readouterr().out


def test_runs_on_different_corpora_are_compared_by_speed_only(copies, capsys):
    facts = copies / "1_sdpa" / "facts.json"
    facts.write_text(facts.read_text().replace('"corpus": "', '"corpus": "another-'))
    assert main(["compare", str(copies)]) == 0
    said = capsys.readouterr().out
    assert "losses are not compared: sdpa" in said
    _, loss, perplexity, _, speed, *_ = re.split(r"\s{2,}", said.splitlines()[2])
    assert loss.endswith(" (other tokens)")
    assert perplexity == "-"
    assert speed.endswith("x)")
    assert "Loss minus that of" not in (copies / "compare.html").read_text()


def test_a_single_run_without_metrics_still_gives_a_page(copies, capsys):
    shutil.rmtree(copies / "0_naive")
    (copies / "1_sdpa" / "metrics.csv").unlink()
    (copies / "1_sdpa" / "summary.json").unlink()
    assert main(["compare", str(copies)]) == 0
    said = capsys.readouterr().out
    assert "only one run" in said
    assert "no metrics" in said
    assert (copies / "1_sdpa" / "compare.html").is_file()


def test_the_page_goes_to_the_common_folder_never_to_the_current_one(tmp_path, monkeypatch):
    for run in ("runs/a_sweep/0_naive", "runs/b_sweep/0_naive", "here"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "metrics.csv").write_text("step\n")
    monkeypatch.chdir(tmp_path)
    assert _common_folder(find_runs(["runs/*_sweep"])) == Path("runs")
    assert _common_folder(find_runs(["runs/b_sweep", "here"])) == Path("runs/b_sweep/0_naive")


@pytest.mark.parametrize("argument", ["nowhere", "nowhere/*"])
def test_a_path_without_runs_is_a_one_line_error(argument, capsys):
    assert main(["compare", argument]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {argument}: no run found")
    assert len(error.splitlines()) == 1


def test_other_files_matched_by_a_shell_glob_are_skipped(copies, capsys):
    (copies / "multirun.yaml").write_text("hydra: {}")
    (copies / "empty").mkdir()
    runs = find_runs([str(path) for path in sorted(copies.iterdir())])
    assert [run.attention for run in runs] == ["naive", "sdpa"]
    assert capsys.readouterr().err == f"note: {copies / 'empty'}: no run found\n"
    for arguments, named in (("multirun.yaml", "empty"), "multirun.yaml"), (("0_naive", "0_naiv"), "0_naiv"):
        with pytest.raises(ReproduceError, match=f"{named}: no run found"):
            find_runs([str(copies / argument) for argument in arguments])


def test_a_run_without_settings_files_is_reported_as_unknown(copies, capsys):
    (copies / "1_sdpa" / "config.yaml").unlink()
    for name in ("summary.json", "facts.json", "environment.json"):
        (copies / "1_sdpa" / name).unlink()
    assert main(["compare", str(copies)]) == 0
    said = capsys.readouterr().out
    assert "settings unknown for: 1_sdpa" in said
    assert "environment unknown for: 1_sdpa" in said
    assert "differ in more than attention" not in said
    assert "losses are not compared: 1_sdpa" in said


def test_comparing_runs_needs_no_experiment_no_torch_and_no_matplotlib(sweep):
    code = f"""
import sys
from reproduce.comparison import compare, milestones, workspace
compare.main([{str(sweep)!r}])
print(sorted(name for name in sys.modules if name.startswith(("torch", "matplotlib", "reproduce."))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert {name for name in loaded if not name.startswith("reproduce.comparison")} == {
        "reproduce.common", "reproduce.plots",
    }  # fmt: skip


def test_runs_are_kept_with_their_curves_as_a_recipe(sweep, tmp_path):
    runs = [str(sweep / name) for name in ("0_naive", "1_sdpa")]
    words = ["recipes", "attentions", *runs, "--commit", "abc", "--results", str(tmp_path)]
    assert benchmarks.main([*words, "--labels", "standard", "torch's"]) == 0
    (path,) = tmp_path.glob("*/attentions.json")
    kept = json.loads(path.read_text())
    assert list(kept) == ["standard", "torch's"]
    run = kept["standard"]
    (*_, (tokens, loss)) = run["loss_by_tokens"]
    assert loss == pytest.approx(
        json.loads((sweep / "0_naive" / "summary.json").read_text())["val/loss"], abs=1e-5
    )
    assert tokens == run["settings"]["trainer.batch_tokens"] * run["settings"]["trainer.steps"]
    assert str(sweep) not in path.read_text()
    assert "torch's" in path.with_suffix(".svg").read_text()
    with pytest.raises(SystemExit):
        benchmarks.main([*words, "--labels", "one"])
