"""AdamW's step in one pass, against torch's own sequence of passes."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import get_attention
from kernels.layers import adamw
from kernels.layers.adamw import BLOCK, adamw_step, takes
from kernels.layers.sums import next_sums, sum_in_product
from model.config import GPTConfig
from model.gpt import GPT
from training.optimizer import OptimizerConfig, OptimizerName, build_optimizer, update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)
ODD = {"matrix": (3, BLOCK // 2 + 5), "table": (7, 11), "bias": (13,), "scalar": (1,)}
EVEN = {"matrix": (5, BLOCK // 4), "bias": (768,)}


def problem(shapes, dtype=torch.bfloat16, weight_decay=0.1):
    """Two models with equal weights, half of them cast for `linear`, and their optimizers."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    pairs = []
    for _ in range(2):
        model = torch.nn.ParameterDict(
            {name: torch.randn(shape, generator=generator, device=DEVICE) for name, shape in shapes.items()}
        )
        if pairs:
            model.load_state_dict(pairs[0][0].state_dict())
        for index, weight in enumerate(model.values()):
            weight.grad = torch.zeros_like(weight)
            if index % 2 == 0:
                sum_in_product(weight, dtype)
        pairs.append((model, build_optimizer(model, OptimizerConfig(lr=0.01, weight_decay=weight_decay))))
    return pairs


def give_gradients(models, step, scale=1.0):
    generator = torch.Generator(DEVICE).manual_seed(step)
    for weights in zip(*[model.values() for model in models], strict=True):
        new = torch.randn(weights[0].shape, generator=generator, device=DEVICE) * scale
        for weight in weights:
            weight.grad.copy_(new)


def torchs(model, optimizer, clip):
    norms = torch.stack(torch._foreach_norm([weight.grad for weight in model.values()]))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norms.norm())
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    next_sums(model.parameters())


def ours(model, optimizer, clip):
    norms = torch.stack(torch._foreach_norm([weight.grad for weight in model.values()]))
    adamw_step(optimizer, norms.norm(), clip)


def assert_alike(pairs, steps=1):
    """Two ulp, or two of the larger terms of a sum that nearly cancels; as many times for steps not compared."""
    close = {"rtol": 2.4e-7 * steps, "atol": 1.2e-7 * steps}
    (mine, my_moments), (theirs, their_moments) = pairs
    for a, b in zip(mine.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, **close)
        for name, value in my_moments.state[a].items():
            torch.testing.assert_close(value, their_moments.state[b][name], **close)
        assert not a.grad.any()
        if hasattr(a, "low"):
            # Triton's interpreter cuts a number off to bfloat16.
            torch.testing.assert_close(
                a.low, a.to(a.low.dtype), rtol=0 if DEVICE == "cuda" else 2**-7, atol=0
            )


def make_equal(pairs):
    (mine, my_moments), (theirs, their_moments) = pairs
    mine.load_state_dict(theirs.state_dict())
    my_moments.load_state_dict(copy.deepcopy(their_moments.state_dict()))  # other addresses


@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize("clip", [1.0, 1e4, float("inf")])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_steps_are_torchs(shapes, clip, weight_decay):
    pairs = problem(shapes, weight_decay=weight_decay)
    for step in range(4):
        give_gradients([model for model, _ in pairs], step)
        pairs[0][1].param_groups[0]["lr"] = pairs[1][1].param_groups[0]["lr"] = 0.01 / (step + 1)
        ours(*pairs[0], clip)
        torchs(*pairs[1], clip)
        assert_alike(pairs)
        make_equal(pairs)


def test_either_continues_from_the_others_checkpoint():
    pairs = problem(ODD, torch.float32)
    for step in range(4):
        give_gradients([model for model, _ in pairs], step)
        for way, pair in zip((ours, torchs) if step % 2 else (torchs, ours), pairs, strict=True):
            way(*pair, 1.0)
            pair[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
    assert_alike(pairs, steps=4)
    assert {state["step"].item() for _, optimizer in pairs for state in optimizer.state.values()} == {4}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_breaks_the_weights_that_it_breaks_in_torch(bad):
    pairs = problem(ODD)
    give_gradients([model for model, _ in pairs], 0)
    for model, _ in pairs:
        model["matrix"].grad[1, 2] = bad
    ours(*pairs[0], 1.0)
    torchs(*pairs[1], 1.0)
    for a, b in zip(*[model.values() for model, _ in pairs], strict=True):
        torch.testing.assert_close(a, b, rtol=2.4e-7, atol=6e-8, equal_nan=True)
        assert not a.grad.any()


def test_update_takes_it_where_gradients_are_kept(monkeypatch):
    pairs = problem(ODD)
    monkeypatch.setattr(adamw, "takes", lambda optimizer: optimizer is pairs[0][1])
    give_gradients([model for model, _ in pairs], 0)
    mine, theirs = (update(*pair, UNSCALED, keep_gradients=True) for pair in pairs)
    assert torch.equal(mine, theirs)
    assert_alike(pairs)


@pytest.mark.parametrize("frozen", [{"table"}, {"bias", "scalar"}], ids=["of a group", "a group"])
def test_a_weight_without_a_gradient_stays_as_it_is(monkeypatch, frozen):
    pairs = problem(ODD)
    monkeypatch.setattr(adamw, "takes", lambda optimizer: optimizer is pairs[0][1])
    give_gradients([model for model, _ in pairs], 0)
    for model, _ in pairs:
        for name in frozen:
            model[name].requires_grad_(False).grad = None
    before = {name: weight.clone() for name, weight in pairs[0][0].items()}
    for pair in pairs:
        update(*pair, UNSCALED, keep_gradients=True)
    mine, theirs = (model for model, _ in pairs)
    torch.testing.assert_close({**mine}, {**theirs}, rtol=2.4e-7, atol=1.2e-7)
    assert {name for name in before if torch.equal(before[name], mine[name])} == frozen


def test_only_adamw_on_a_gpu_is_taken_and_not_muon():
    model = GPT(
        GPTConfig(vocab_size=20, seq_len=8, n_layer=1, n_head=2, n_embd=16), get_attention("naive")
    ).to(DEVICE)
    assert takes(build_optimizer(model, OptimizerConfig())) == (DEVICE == "cuda")
    assert not takes(build_optimizer(model, OptimizerConfig(name=OptimizerName.muon)))
    assert not takes(build_optimizer(model.bfloat16(), OptimizerConfig()))


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"maximize": True}, {"fused": False}])
def test_adamw_with_an_option_that_the_pass_lacks_is_not_taken(option):
    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(4, device="cuda"))]
        plain, other = (torch.optim.AdamW(weights, **{"fused": True, **more}) for more in ({}, option))
        assert takes(plain)
        assert not takes(other)


@pytest.mark.gpu
def test_updates_of_gpt2_small_are_torchs_and_repeat_bit_for_bit():
    shapes = {
        "wte": (50257, 768),
        "wpe": (1024, 768),
        "c_fc": (3072, 768),
        "bias": (3072,),
        "c_attn": (2304, 768),
    }
    ends = []
    for _ in range(2):
        pairs = problem(shapes)
        for step in range(5):
            give_gradients([model for model, _ in pairs], step, scale=1e-3)
            update(*pairs[0], UNSCALED, keep_gradients=True)
            torchs(*pairs[1], 1.0)
        assert_alike(pairs, steps=5)
        ends.append(pairs[0][0].state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in shapes)


def test_models_that_take_turns_keep_their_tables(monkeypatch):
    built, build = [], adamw._tables
    monkeypatch.setattr(adamw, "_tables", lambda *how: built.append(how) or build(*how))
    pairs = [problem(EVEN)[0] for _ in range(5)]  # two groups each
    for step in range(3):
        give_gradients([model for model, _ in pairs], step)
        for pair in pairs:
            ours(*pair, 1.0)
    assert len(built) == 5 * 2
