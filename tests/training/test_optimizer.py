import pytest
import torch

from kernels import get_attention
from model.config import GPTConfig
from model.gpt import GPT
from training.optimizer import OptimizerConfig, OptimizerName, build_optimizer, parameter_groups, update

MUON = OptimizerConfig(name=OptimizerName.muon, lr=0.01, weight_decay=0.5)
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)


@pytest.fixture
def model() -> GPT:
    return GPT(GPTConfig(vocab_size=100, seq_len=8, n_layer=2, n_head=2, n_embd=16), get_attention("naive"))


def names(model: GPT, group: dict) -> set[str]:
    ids = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in ids}


def test_weight_decay_applies_only_to_weight_matrices_of_the_blocks(model):
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert names(model, decayed) == {
        f"h.{i}.{name}.weight"
        for i in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_decay_embeddings_adds_the_embeddings_to_weight_decay(model):
    decayed, _ = parameter_groups(model, 0.1, decay_embeddings=True)
    assert {"wte.weight", "wpe.weight"} < names(model, decayed)


def test_the_first_step_matches_adamw_computed_by_hand(model):
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01, betas=(0.9, 0.99), weight_decay=0.5))
    weight, bias = model.h[0].mlp.c_fc.weight, model.h[0].mlp.c_fc.bias
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    # The first step moves by lr * sign(gradient), after decay.
    torch.testing.assert_close(weight.detach(), before * (1 - 0.01 * 0.5) - 0.01)
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, -0.01))


def test_preallocated_moments_give_the_same_steps_as_torchs_adamw():
    linear = [torch.nn.Linear(4, 3) for _ in range(2)]
    linear[1].load_state_dict(linear[0].state_dict())
    config = OptimizerConfig(weight_decay=0.0)
    ours = build_optimizer(linear[0], config)
    theirs = torch.optim.AdamW(linear[1].parameters(), config.lr, config.betas, config.eps, 0.0, fused=True)
    assert {len(state) for state in ours.state.values()} == {3}
    for step in range(3):
        for each, optimizer in zip(linear, (ours, theirs), strict=True):
            each(torch.full((2, 4), step + 1.0)).square().sum().backward()
            optimizer.step()
    for a, b in zip(linear[0].parameters(), linear[1].parameters(), strict=True):
        assert torch.equal(a, b)
        assert ours.state[a].keys() == theirs.state[b].keys()
        assert all(torch.equal(x, theirs.state[b][name]) for name, x in ours.state[a].items())


@pytest.mark.parametrize("keep", [True, False])
def test_update_clips_the_gradients_makes_a_step_and_clears_them(keep):
    linear = torch.nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(linear, OptimizerConfig(lr=0.5, weight_decay=0.0))
    before = linear.weight.detach().clone()
    linear.weight.grad = torch.tensor([[3.0, -4.0]])
    norms = update(linear, optimizer, UNSCALED, 2.5, keep)
    assert norms.tolist() == [5]
    torch.testing.assert_close(optimizer.state[linear.weight]["exp_avg"], 0.1 * torch.tensor([[1.5, -2.0]]))
    torch.testing.assert_close(linear.weight.detach(), before - torch.tensor([[0.5, -0.5]]))
    assert torch.equal(linear.weight.grad, torch.zeros(1, 2)) if keep else linear.weight.grad is None


def test_muon_steps_each_map_of_a_block_apart_as_torchs_muon_does_and_all_else_as_adamw_does(model):
    """By hand: c_attn's q, k and v as three parameters of torch.optim.Muon, the rest one by one with AdamW."""
    other = GPT(model.config, get_attention("naive"))
    maps = [
        part.clone()
        for name, weight in other.h.named_parameters()
        if weight.dim() == 2
        for part in weight.detach().split(16 if "c_attn" in name else weight.size(0))
    ]
    assert len(maps) == 2 * 6
    muon = torch.optim.Muon(maps, 0.01, 0.5, 0.95, adjust_lr_fn="match_rms_adamw")
    kept = [parameter for parameter in other.parameters() if parameter.dim() < 2]
    adamw = torch.optim.AdamW(
        [*kept, other.wte.weight, other.wpe.weight], 0.01, (0.9, 0.95), 1e-8, 0.0, fused=True
    )
    ours, tokens = build_optimizer(model, MUON), torch.arange(16).view(2, 8)
    matrices = [weight for weight in other.h.parameters() if weight.dim() == 2]
    for step in range(3):
        for each in (model, other):
            each(tokens + step, tokens + step + 1).backward()
        update(model, ours, UNSCALED, clip=0.3)
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.3)
        gradients = [weight.grad.split(16 if len(weight) == 48 else len(weight)) for weight in matrices]
        for part, gradient in zip(maps, sum(gradients, ()), strict=True):
            part.grad = gradient
        muon.step(), adamw.step(), other.zero_grad()
        left = iter(maps)
        for weight in matrices:
            rows = [next(left) for _ in range(3 if len(weight) == 48 else 1)]
            weight.data = torch.cat(rows)
    for (name, weight), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, theirs), name


def test_muons_moments_are_there_before_the_first_step_and_no_gradient_outlives_a_step(model):
    optimizer, tokens = build_optimizer(model, MUON), torch.arange(16).view(2, 8)
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    model(tokens, tokens).backward()
    update(model, optimizer, UNSCALED)
    assert held == sum(value.numel() for state in optimizer.state.values() for value in state.values())
    assert {*optimizer.state} == {*model.parameters()}
    parts = optimizer.muon.param_groups[0]["params"]
    assert [part.grad for part in parts] == [None] * len(parts)


def test_a_gradient_that_overflows_fp16_skips_muons_step_and_adamws(model):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=float(2**126))
    optimizer, tokens = build_optimizer(model, MUON), torch.arange(16).view(2, 8)
    scaler.scale(model(tokens, tokens)).backward()
    update(model, optimizer, scaler)
    assert all(map(torch.equal, model.parameters(), before))
    assert scaler.get_scale() == 2**125


@pytest.mark.parametrize(
    "bad",
    [
        {"momentum": 1.0},
        {"lr": 0.0},
        {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"eps": 0.0},
        {"lr": float("nan")},
    ],
)
def test_impossible_values_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        OptimizerConfig(**bad)
