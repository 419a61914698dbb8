"""The training experiment: its tiny form to the end, which contenders are timed, and the verdicts."""

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch

from benchmarks.aims import MET, MISSED, NO_AIM
from benchmarks.training import aims
from kernels import ATTENTION, get_attention, register_attention
from reproduce import training, training_figures
from reproduce.__main__ import main
from reproduce.contenders import FUSED, HF_EAGER, HF_SDPA, NANOGPT, NANOGPT_BIASES, PADDED, Contender
from reproduce.experiment import NOT_COMPARABLE, NOT_MEASURED, NOT_REPRODUCED, REPRODUCED
from reproduce.standard import CUT
from tests.conftest import INTERPRETED
from tests.processes import in_three

# On a machine with a GPU, the tests have Triton compile, not interpret, as the fused loss needs on a CPU.

NANOGPT_LIKE = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters")
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
    def forward(self, tokens, targets):
        logits = self.wte(tokens) @ self.wte.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


# Half the tokens of the tiny form: with our kernels, each token takes the interpreter time.
STEP, CONTEXT = 16, 4
FEW = (
    *(f"contexts={CONTEXT},{2 * CONTEXT}", f"step_tokens={STEP}", f"micro_tokens={STEP // 2}"),
    *(f"gpt3_contexts={2 * CONTEXT}", f"gpt3_step_tokens={STEP}", f"gpt3_micro_tokens={STEP // 2}"),
)


def run(folder: Path, *arguments: str) -> dict:
    assert main(["training", "--tiny", "--device", "cpu", "--results", str(folder), *FEW, *arguments]) == 0
    return json.loads((folder / "cpu" / "training.json").read_text())


def contenders_of(settings: training.Settings) -> dict[tuple[str, str, int, float], set[str]]:
    """(part, mode, context, dropout) -> who takes part."""
    found = {}
    for group, names in training.plan(settings):
        assert group.micro_batch * group.accumulation * group.context == settings.step_tokens
        place = group.part, group.mode, group.context, group.dropout
        found[place] = found.get(place, set()) | set(names)
    return found


def test_every_part_has_its_contenders_and_a_step_the_same_tokens_at_every_context():
    found = contenders_of(training.TINY)
    huggingface, fused, both = {HF_EAGER, HF_SDPA}, "naive" + FUSED, {"standard", CUT}
    assert {part for part, *_ in found} == set(training.PARTS)
    assert found["small", "eager", 8, 0.0] == {*huggingface, "naive", "sdpa", fused}
    assert found["medium", "eager", 8, 0.0] == {*huggingface, "naive", *both, fused}
    assert found["compiled", "compiled", 8, 0.0] == {"naive", *both, fused}
    assert found["whole", "compiled", 8, 0.0] == {"naive", fused}
    assert found["today", "compiled", 8, 0.0] == {*huggingface, fused}
    assert found["padded", "compiled", 8, 0.0] == {HF_EAGER + PADDED, HF_SDPA + PADDED, fused}
    assert found["dropout", "eager", 8, 0.1] == {*huggingface, *both, fused}
    assert found["dropout", "compiled", 8, 0.1] == {*both, fused}
    assert found["context", "compiled", 8, 0.0] == {"naive", *both}
    for mode in ("eager", "compiled"):
        assert found["context", mode, 16, 0.0] == {"naive", "standard"}
        assert found["gpt3", mode, 16, 0.0] == {"naive", *both}


def test_every_attention_has_standard_in_both_forms_and_what_is_chosen_alone_is_taken():
    found = contenders_of(replace(training.TINY, backends=()))["small", "eager", 8, 0.0]
    assert {"naive", "flash", "standard", CUT} < found
    found = contenders_of(replace(training.TINY, core=("naive", "sdpa")))
    assert not any({"standard", CUT} & names for names in found.values())


def backwards(q, k, v, **options):
    """An attention that sees the tokens to come."""
    return get_attention("naive")(q, k, v, **options | {"causal": False})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """An eager and a compiled part, with backends that are wrong or refuse; the results, and what was printed.

    Of the other parts, `today` differs by the padding, `medium` by the shape, `whole`, `context` and `gpt3` by the
    batch, and `dropout` by what a test below has. The fused layers alone take the interpreter seconds in each.
    """
    if torch.cuda.is_available():
        pytest.skip("runs Triton's interpreter")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        register_attention("wrong", refuses=lambda request: None)(backwards)
        patch.setitem(ATTENTION, "wrong", ATTENTION.pop("wrong"))  # gone after the run
        folder = tmp_path_factory.mktemp("results")
        return run(
            folder, "parts=small,padded", f"backends=naive,sdpa,{CUT},sdpa_cudnn,wrong"
        ), said.getvalue()


@pytest.mark.slow
def test_every_phase_is_timed_in_steps_of_the_same_tokens(tiny):
    timed = [sample for sample in tiny[0]["samples"] if sample["kind"].startswith("speed")]
    assert {sample["part"] for sample in timed} == {"small", "padded"}
    for sample in timed:
        assert sample["micro_batch"] * sample["accumulation"] * sample["context"] == STEP
        for phases in sample["ms"].values():
            assert phases.keys() == {"forward", "backward", "optimizer"}
            assert all(len(values) >= 2 for values in phases.values())


@pytest.mark.slow
def test_hugging_face_and_every_backend_are_timed_but_not_those_that_are_wrong_or_refuse(tiny):
    results, said = tiny
    of_part = {s["part"]: set(s["ms"]) for s in results["samples"] if s["kind"] == "speed"}
    assert of_part["small"] == {HF_EAGER, HF_SDPA, "naive", "sdpa", CUT, "naive" + FUSED}
    assert of_part["padded"] == {HF_EAGER + PADDED, HF_SDPA + PADDED, "naive" + FUSED}
    assert "2 sequences, wrong: 0.00 GiB; its logits are off by" in said
    (refused,) = (s for s in results["samples"] if "refused" in s)
    assert refused["contender"] == "sdpa_cudnn"
    assert "sdpa_cudnn" in said.split("small: sdpa_cudnn")[0]


@pytest.mark.slow
def test_logits_agree_before_anything_is_timed(tiny):
    errors = {s["contender"]: s["logit_error"] for s in tiny[0]["samples"] if "logit_error" in s}
    assert errors.pop("wrong") > 0.02
    assert max(errors.values()) < 1e-5  # float32


@pytest.mark.slow
@INTERPRETED
def test_a_nanogpt_checkout_takes_part(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT_LIKE)
    results = run(tmp_path, "parts=compiled", "core=standard,naive", f"nanogpt={tmp_path / 'model.py'}")
    (timed,) = (s for s in results["samples"] if s["kind"] == "speed")
    assert timed["ms"].keys() == {"standard", CUT, "naive", "naive" + FUSED, NANOGPT, NANOGPT_BIASES}


@pytest.mark.parametrize(("length", "compiler"), [(8, None), (7, None), (8, "aot_eager")])
def test_standard_attention_cut_to_its_mask_trains_as_the_whole_does(length, compiler):
    config = replace(training.SHAPES["tiny"], seq_len=length)
    how = {"device": torch.device("cpu"), "dtype": torch.float32, "micro_batch": 2, "accumulation": 2}
    whole, cut = (Contender(name, config, **how, compiler=compiler) for name in ("standard", CUT))
    for number in range(3):
        losses = [each._loss(each.tokens[0], each.targets[0], torch.tensor(number)) for each in (whole, cut)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        assert [len(list(each.step(number))) for each in (whole, cut)] == [5, 5]
    torch.testing.assert_close(*(each.logits(whole.tokens[0]) for each in (whole, cut)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        *(dict(each.model.named_parameters()) for each in (whole, cut)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", [HF_SDPA, "standard", CUT])
def test_a_step_with_dropout_is_another_in_training_alone(name):
    how = {"device": torch.device("cpu"), "dtype": torch.float32, "micro_batch": 1, "accumulation": 1}
    config = replace(training.SHAPES["tiny"], seq_len=8)
    plain, dropped = (
        Contender(name, replace(config, dropout=dropout), **how, compiler=None) for dropout in (0.0, 0.5)
    )
    tokens = plain.tokens[0]
    assert torch.equal(plain.logits(tokens), dropped.logits(tokens))
    for each in (plain, dropped):
        assert len(list(each.step(0))) == 3
    assert not torch.allclose(plain.logits(tokens), dropped.logits(tokens), atol=1e-5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parts=large", "parts=large is unknown; choose from small"),
        ("nanogpt=nowhere.py", "nanogpt=nowhere.py is not a file"),
        (f"nanogpt={pytest.__file__}", "has no GPT and GPTConfig"),
    ],
)
def test_a_mistaken_setting_is_named(tmp_path, capsys, override, said):
    arguments = ["training", "--tiny", "--device", "cpu", "--results", str(tmp_path), override]
    assert main(arguments) == 1
    assert said in capsys.readouterr().err


# ---- conclusions, from figures made up for the purpose --------------------------------------------------


STEP_TOKENS = 65536


def speed(part: str, rates: dict[str, float], **where: object) -> dict:
    sample = {"kind": "speed", "part": part, "model": "gpt2_small", "context": 1024, "dropout": 0.0}
    sample |= {
        "mode": "eager",
        "dtype": "float16",
        "micro_batch": 16,
        "accumulation": 4,
        "flops_per_token": 10**9,
        "step_tokens": STEP_TOKENS,
        "ms": {name: phases(1e3 * STEP_TOKENS / rate) for name, rate in rates.items()},
        **where,
    }
    return sample


def phases(step_ms: float) -> dict[str, list[float]]:
    return {"forward": [0.3 * step_ms], "backward": [0.6 * step_ms], "optimizer": [0.1 * step_ms]}


def judged(*samples: dict) -> dict[tuple[str, str], tuple[str, str]]:
    verdicts = training.judge({"device": "GPU", "samples": in_three(*samples)})
    return {(each.claim, each.what): (each.status, each.ours) for each in verdicts}


def test_table_2_is_compared_with_the_whole_stack_not_attention_alone():
    found = judged(
        speed(
            "small",
            {HF_EAGER: 100e3, "naive": 200e3, "standard": 250e3, "flash": 300e3, "flash" + FUSED: 360e3},
        ),
        speed(
            "compiled",
            {"naive": 300e3, "flash": 400e3, "nanogpt": 380e3, "nanogpt_biases": 350e3},
            mode="compiled",
        ),
    )
    by_what = {what: verdict for (_, what), verdict in found.items()}
    eager, fused = (
        by_what[
            f"gpt2_small, whole stack: ours with flash, {how} over Hugging Face, eager attention, dropout 0, tokens/s"
        ]
        for how in ("torch's other layers (eager)", "our kernels for the other layers (eager)")
    )
    assert eager == (NOT_REPRODUCED, "3.00x")
    assert fused == (REPRODUCED, "3.60x")
    assert not any("compiled" in what for what in by_what if "whole stack" in what)  # theirs is eager
    alone = "gpt2_small, attention alone: flash over the fastest standard attention, eager, tokens/s"
    assert by_what[alone] == (NOT_COMPARABLE, "1.20x")  # standard+cut was not timed
    assert by_what["gpt2_small over Megatron-LM, tokens/s"] == (NOT_MEASURED, "")


def test_a_ratio_is_over_the_fastest_standard_attention_and_says_if_the_one_that_is_cut_was_not_timed():
    def alone(**more: float) -> training_figures.Verdict:
        rates = {"naive": 150e3, "standard": 200e3, **more, "flash": 300e3}
        base = speed("context", rates, mode="compiled")
        samples = in_three(
            speed("small", rates), base, speed("context", {"flash": 270e3}, mode="compiled", context=4096),
            speed("gpt3", rates, mode="compiled", model="gpt3_1.3b", context=2048),
        )  # fmt: skip
        found = training.judge({"device": "GPU", "samples": samples})
        return [each for each in found if "standard attention" in each.what and each.ours]

    lacking, timed = alone(), alone(**{CUT: 280e3})
    assert {each.claim for each in lacking} == {"C11", "C13", "C23"}
    words = "over {}, the fastest form of standard attention timed here"
    for each in lacking:
        assert f"{words.format('standard')} ({CUT} was not)" in each.why
    for each in timed:
        assert words.format(CUT) in each.why
        assert "was not)" not in each.why
    assert [each.ours.split()[0] for each in lacking] == ["1.50x", "1.50x", "1.35x", "1.50x"]
    assert [each.ours.split()[0] for each in timed] == ["1.07x", "1.07x", "0.96x", "1.07x"]
    assert [each.status for each in lacking if each.claim != "C11"] == [REPRODUCED, REPRODUCED]
    assert [each.status for each in timed if each.claim != "C11"] == [NOT_REPRODUCED, NOT_REPRODUCED]
    assert "over standard, which computes what is masked, 1.50x" in timed[-1].why
    assert "what is masked" not in lacking[-1].why


def test_replayed_steps_are_compared_with_replayed_ones():
    rates = {HF_SDPA: 150e3, "naive": 160e3, "standard": 190e3, "flash": 380e3, "flash" + FUSED: 600e3}
    found = judged(
        speed("replayed", rates, mode="replayed"), speed("small", {HF_EAGER: 100e3, "flash": 300e3})
    )
    shown = {
        what: verdict for (_, what), verdict in found.items() if "CUDA graphs" in what or "replayed" in what
    }
    whole = "gpt2_small, whole stack as CUDA graphs: ours, our kernels for the other layers (eager)"
    alone = "gpt2_small, attention alone: flash over the fastest standard attention, replayed, tokens/s"
    assert shown == {
        f"{whole} over Hugging Face, PyTorch's attention, dropout 0, tokens/s": (NOT_COMPARABLE, "4.00x"),
        alone: (NOT_COMPARABLE, "2.00x"),
    }


@pytest.mark.parametrize("name", [HF_SDPA, "sdpa", "flash" + FUSED])
def test_a_contender_records_in_its_first_step_and_then_steps_as_it_would(monkeypatch, name):
    """A CPU has no graphs: in their place stands the loss, run before as they run it."""
    recordings = []

    def without_graphs(module, like, **options):
        recordings.append(name)
        torch.autograd.grad(module(*like), list(module.parameters()), allow_unused=True)
        return module

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", without_graphs)
    config = replace(training.SHAPES["tiny"], seq_len=8)
    how = {"device": torch.device("cpu"), "dtype": torch.float32, "micro_batch": 2, "accumulation": 2}
    weights = []
    for graphs in (False, True):
        contender = Contender(name, config, **how, compiler=None, graphs=graphs)
        for number in range(3):
            for _ in contender.step(number):
                pass
        weights.append(dict(contender.model.named_parameters()))
    assert recordings == [name]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_nanogpts_speed_and_mfu_are_held_to_our_own_aims():
    rates = {"naive": 300e3, "flash": 400e3, "nanogpt": 380e3, "nanogpt_biases": 350e3}
    machine = {"kind": "machine", "peak_flops": 400e12 / 0.45}
    found = aims({"samples": in_three(machine, speed("compiled", rates, mode="compiled"))})
    by_what = {aim.what: (aim.status, aim.ours) for aim in found}
    nanogpt = (
        "gpt2_small, 16 sequences a forward: ours with flash over nanoGPT's model {}, both compiled, tokens/s"
    )
    assert by_what[nanogpt.format("without biases, as it trains")] == (MISSED, "1.053x")
    assert by_what[nanogpt.format("with GPT-2's biases")] == (MISSED, "1.143x")
    assert by_what["gpt2_small, 16 sequences a forward: MFU of ours, compiled"] == (MISSED, "45.0%")


def test_the_mfu_aimed_at_is_the_models_and_the_worst_process_has_to_reach_it():
    machine = {"kind": "machine", "peak_flops": 1e15}

    def found(*rates: float, **where: object) -> tuple[str, str, str]:
        where |= {"mode": "compiled"}
        samples = [
            {**speed("whole", {"flash": each}, **where), "process": number}
            for number, each in enumerate(rates)
        ]
        (aim,) = aims({"samples": [machine, *samples]})
        return aim.status, aim.ours, aim.aim

    assert found(515e3, 520e3) == (MET, "51.7% (51.5% to 52.0%)", "51 % at least")
    assert found(509.8e3, 520e3) == (MISSED, "51.49% (50.98% to 52.00%)", "51 % at least")  # not 51.0%
    assert found(540e3, micro_batch=64) == (MISSED, "54.0% (one process)", "55 % at least")
    assert found(560e3, micro_batch=64, model="gpt2_medium") == (
        MISSED,
        "56.0% (one process)",
        "57 % at least",
    )
    assert found(560e3, micro_batch=8) == (NO_AIM, "56.0% (one process)", "")


def test_todays_hugging_face_and_pytorchs_attention_have_rows_of_their_own():
    ours = {"flash" + FUSED: 440e3}
    rates = {"naive": 250e3, "standard": 240e3, "sdpa": 380e3, "flash": 400e3}
    found = judged(
        speed("compiled", rates, mode="compiled"),
        speed("today", {HF_EAGER: 200e3, HF_SDPA: 300e3, **ours}, mode="compiled"),
        speed("padded", {HF_EAGER + PADDED: 210e3, HF_SDPA + PADDED: 450e3, **ours}, mode="compiled"),
    )
    over = (
        "gpt2_small, whole stack: ours over Hugging Face, both compiled, {} attention, {} rows of vocabulary"
    )
    found = {what: verdict for (_, what), verdict in found.items()}
    # no figure of the paper's, so they count for nothing
    assert found[over.format("eager", "50,257")] == (NOT_COMPARABLE, "2.20x")
    assert found[over.format("PyTorch's", "50,304")] == (NOT_COMPARABLE, "0.98x")
    alone = "gpt2_small, attention alone: flash over {}, compiled, tokens/s"
    assert found[alone.format("PyTorch's SDPA")] == (NOT_COMPARABLE, "1.05x")
    assert found[alone.format("the fastest standard attention")] == (NOT_COMPARABLE, "1.60x")


def test_who_does_not_fit_beside_the_others_is_timed_after_them(monkeypatch):
    """Two fit beside each other, naive fits alone, and compiled never."""
    raced = []

    def hungry(options, group, names, built):
        raced.append((list(names), dict(built)))
        built |= dict.fromkeys(names)
        if "compiled" in names or (len(names) > 1 and "naive" in names) or len(names) > 2:
            raise torch.OutOfMemoryError
        return {"ms": {name: {} for name in names}, "late": {names[0]: 1}, "clocks": {"watts": [len(names)]}}

    monkeypatch.setattr(training, "_speed", hungry)
    options = training.Options(torch.device("cpu"), True, training.TINY, sample=None)
    names = ["compiled", "naive", "standard", "flash"]
    found = training._speed_of_all(options, None, names, dict.fromkeys(names))
    assert found == {
        "ms": {name: {} for name in ("standard", "flash", "naive")},
        "late": {"standard": 1, "naive": 1},
        "clocks": {"watts": [2]},
        "alone": {"naive": {"watts": [1]}},
    }
    together, *others = raced
    assert together == (names, dict.fromkeys(names))
    # what was compiled together is built anew
    assert others == [(each, {}) for each in (names[1:], names[2:], names[:1], names[1:2])]
    assert "alone" not in training._speed_of_all(options, None, ["flash"], {})
    with pytest.raises(torch.OutOfMemoryError):
        training._speed_of_all(options, None, ["compiled"], {})


def test_what_fails_alone_does_not_lose_the_others_times(monkeypatch):
    """But a broken device does, as no later sample could be trusted."""
    errors = {"standard": "CUDA graphs cannot be recorded", "naive": "CUDA error: an illegal access"}

    def fragile(options, group, names, built):
        if names[1:] and names[0] in errors:
            raise torch.OutOfMemoryError
        if names[0] in errors:
            raise RuntimeError(errors[names[0]])
        return {"ms": {name: {} for name in names}, "late": {}, "clocks": {}}

    monkeypatch.setattr(training, "_speed", fragile)
    options = training.Options(torch.device("cpu"), True, training.TINY, sample=None)
    found = training._speed_of_all(options, None, ["standard", "flash"], {})
    assert found == {"ms": {"flash": {}}, "late": {}, "clocks": {}}
    with pytest.raises(RuntimeError, match="CUDA error"):
        training._speed_of_all(options, None, ["naive", "flash"], {})


def test_a_ratio_over_what_was_timed_after_the_others_says_so():
    rates = {"naive": 150e3, CUT: 200e3, "flash": 300e3}
    where = {"mode": "compiled", "model": "gpt3_1.3b", "context": 8192}

    def why(rates: dict[str, float], *others: dict, **more: object) -> str:
        samples = in_three(speed("gpt3", rates, **where, **more), *others)
        (found,) = (
            each for each in training.judge({"device": "GPU", "samples": samples}) if each.claim == "C23"
        )
        return found.why

    after = " (naive: timed alone, after the others, as it fits beside none)"
    assert why(rates).endswith("; over naive, which computes what is masked, 2.00x")
    assert why(rates, alone={"naive": {}}).endswith(
        f"; over naive, which computes what is masked, 2.00x{after}"
    )
    assert f"timed here ({CUT}: timed alone, after" in why(rates, alone={CUT: {}})
    del rates["naive"]
    of_naive = {**speed("gpt3", {}, **where), "kind": "memory", "contender": "naive", "peak_bytes": 134 << 30}
    of_naive = {key: value for key, value in of_naive.items() if key not in ("part", "ms")}
    assert why(rates, of_naive).endswith("is masked, naive takes 134 GiB, and was not timed with ours")


def test_the_picture_shows_what_was_timed_after_the_others_where_the_plan_has_it(tmp_path):
    rates = {"sdpa": 280e3, "flash": 300e3, CUT: 200e3}
    results = {"device": "GPU", "samples": in_three(speed("gpt3", rates, alone={CUT: {}}))}
    picture = tmp_path / "training.svg"
    assert training_figures.draw(results, picture, claim="C23")
    names = [found for found in re.findall(r">([^<]+)</text>", picture.read_text()) if found in rates]
    assert names == [CUT, "sdpa", "flash"]


def test_memory_is_measured_alone_where_it_does_not_fit_beside_the_others(monkeypatch):
    def memory(options, group, name, built):
        if built:
            raise torch.OutOfMemoryError
        built[name] = "contender"
        return {"peak_bytes": 1}

    monkeypatch.setattr(training, "_memory", memory)
    options = training.Options(torch.device("cpu"), True, training.TINY, sample=None)
    built = {"naive": "large"}
    assert training._memory_with_others(options, None, "flash", built) == {"peak_bytes": 1}
    assert built == {"flash": "contender"}


@pytest.mark.parametrize("padded", ["", PADDED])
def test_hugging_faces_vocabulary_may_be_padded_and_computes_the_same(padded):
    config = replace(training.SHAPES["tiny"], vocab_size=50, seq_len=8)
    how = {"device": torch.device("cpu"), "dtype": torch.float32, "micro_batch": 1, "accumulation": 1}
    theirs = Contender(HF_SDPA + padded, config, **how, compiler=None)
    tokens = torch.arange(8)[None]
    ours = Contender("standard", config, **how, compiler=None).logits(tokens)
    assert theirs.model.lm_head.weight.shape[0] == (64 if padded else 50)
    assert torch.allclose(theirs.logits(tokens), ours, atol=1e-5)


def test_unsteady_step_times_are_reported():
    milliseconds = {
        HF_EAGER: {"forward": [300.0, 301.0], "backward": [350.0, 351.0], "optimizer": [2.0, 2.0]},
        "flash": {"forward": [80.0, 60.0], "backward": [110.0, 72.0], "optimizer": [5.0, 2.0]},
    }
    sample = speed("small", {HF_EAGER: 100e3, "flash": 400e3}, ms=milliseconds)
    whole_stack, *_ = training.judge({"device": "GPU", "samples": [sample]})
    assert whole_stack.why.endswith("not steady, 134 to 195 ms a step")


def test_contexts_and_gpt3_are_judged_by_their_ratios():
    found = judged(
        speed("context", {"naive": 150e3, "flash": 300e3}),
        speed("context", {"flash": 270e3}, context=2048),
        speed("context", {"flash": 200e3}, context=4096),
        speed("context", {"naive": 250e3, "standard": 240e3, "flash": 400e3}, mode="compiled"),
        speed("context", {"flash": 260e3}, context=4096, mode="compiled"),
        speed("gpt3", {"naive": 10e3, "flash": 15e3}, model="gpt3_1.3b", context=2048),
        speed("gpt3", {"flash": 12e3}, model="gpt3_1.3b", context=8192),
        speed("gpt3", {"naive": 13e3, "flash": 12e3}, model="gpt3_1.3b", context=8192, mode="compiled"),
    )
    statuses = {what: status for (claim, what), (status, _) in found.items() if claim == "C13"}
    over = "flash at context 4096 over the fastest standard attention at 1024, tokens/s, {}"
    assert statuses == {
        "flash, context 2048 over 1024, tokens/s at equal tokens a step, eager": REPRODUCED,
        "flash, context 4096 over 1024, tokens/s at equal tokens a step, eager": NOT_REPRODUCED,
        over.format("eager"): NOT_COMPARABLE,  # the paper's baseline was fused
        "flash, context 4096 over 1024, tokens/s at equal tokens a step, compiled": NOT_REPRODUCED,
        over.format("compiled"): REPRODUCED,  # 1.04x over the faster of the two
        "flash at context 4096 over Megatron-LM at 1024, tokens/s": NOT_MEASURED,
    }
    gpt3 = {what: verdict for (claim, what), verdict in found.items() if claim == "C23"}
    assert gpt3 == {
        "GPT3-1.3B, context 2048: flash over standard attention, eager": (
            NOT_COMPARABLE,
            "1.50x (15 TFLOP/s)",
        ),
        "GPT3-1.3B, context 8192: flash over standard attention, eager": (NOT_COMPARABLE, "12 TFLOP/s"),
        "GPT3-1.3B, context 8192: flash over standard attention, compiled": (
            NOT_REPRODUCED,
            "0.92x (12 TFLOP/s)",
        ),
    }


def test_standard_attention_that_has_a_peak_is_not_said_to_be_out_of_memory():
    sample = speed("gpt3", {"sdpa": 14e3, "flash": 15e3}, model="gpt3_1.3b", context=2048)
    peak = {**sample, "kind": "memory", "contender": "standard", "peak_bytes": 45 * 2**30}
    out = {**peak, "out_of_memory": True}
    both = (out, {**out, "contender": "naive"})
    kept = "ran out of memory: every layer's matrices are kept"
    cut = f"; {CUT}, which keeps 5/8 of them, was not tried"
    for others, why in (
        ((), "standard attention was not tried here"),
        ((peak,), "standard takes 45 GiB, and was not timed with ours"),
        ((out,), f"standard {kept}; naive was not tried: where both ran, their peaks are within 0.1 %{cut}"),
        (both, f"standard, naive {kept}{cut}"),
        ((*both, {**out, "contender": CUT}), f"standard, naive, {CUT} {kept}"),
        ((*both, {**peak, "contender": CUT}), f"{CUT} takes 45 GiB, and was not timed with ours"),
    ):
        (verdict,) = (
            v for v in training.judge({"device": "GPU", "samples": [sample, *others]}) if v.claim == "C23"
        )
        assert verdict.why == why


def test_one_process_says_so_and_is_faster_than_nothing():
    base = speed("context", {"standard": 100e3, "flash": 400e3}, mode="compiled")
    longer = speed("context", {"flash": 380e3}, context=4096, mode="compiled")
    found = training.judge({"device": "GPU", "samples": [base, longer]})
    over = {each.what: each for each in found}["flash at context 4096 over the fastest standard attention at 1024, "
                                              "tokens/s, compiled"]  # fmt: skip
    assert (over.ours, over.status) == ("3.80x (one process)", NOT_REPRODUCED)


def test_c13_waits_for_compiled_attention_at_1024():
    found = judged(
        speed("context", {"naive": 150e3, "flash": 300e3}), speed("context", {"flash": 270e3}, context=4096)
    )
    over = "flash at context 4096 over the fastest standard attention at 1024, tokens/s, {}"
    assert found["C13", over.format("eager")] == (NOT_COMPARABLE, "1.80x")
    assert found["C13", over.format("compiled")] == (NOT_MEASURED, "")


def test_without_figures_nothing_is_claimed():
    assert judged() == {}


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["small", "replayed"])
def test_on_a_gpu_flash_and_fused_layers_take_less_memory(tmp_path, part):
    """With 4 sequences: 16 need 100 GiB for all contenders, and other tests may hold part of the GPU's memory."""
    arguments = ["training", f"parts={part}", "medium=gpt2_small", "processes=1", "rounds=3", "seconds=0.1"]
    arguments += ["backends=naive,flash", "core=naive,flash"]
    tokens = ["step_tokens=4096", "micro_tokens=4096"]
    assert main([*arguments, *tokens, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/training.json")
    samples = json.loads(path.read_text())["samples"]
    peaks = {s["contender"]: s["peak_bytes"] for s in samples if s["kind"] == "memory"}
    assert peaks["flash+fused"] < peaks["flash"] < peaks["naive"]
    assert part == "replayed" or peaks["naive"] < peaks[HF_EAGER]
    (timed,) = (s for s in samples if s["kind"] == "speed")
    assert set(timed["ms"]) == set(peaks)
