import pytest

import kernels
from training.command_line import CONFIGS, composed, options_of
from training.config import Config, ConfigError, ModelConfig, TrainerConfig, load_config, to_yaml

GROUPS = [
    f"{path.name}={option}"
    for path in sorted(CONFIGS.iterdir())
    if path.is_dir()
    for option in options_of(path.name)
]


@pytest.mark.parametrize("choice", GROUPS)
def test_every_option_of_every_group_composes(choice):
    assert isinstance(composed(choice), Config)


def test_every_attention_has_its_config_and_no_other():
    assert set(options_of("attention")) == {"auto", *kernels.ATTENTION}
    for name in options_of("attention"):
        assert composed(f"attention={name}").attention.name == name


def test_published_sizes_have_the_published_head_dim():
    for name in options_of("model"):
        if name.startswith("gpt2"):
            assert composed(f"model={name}").model.head_dim == 64


@pytest.mark.parametrize(
    ("override", "said"),
    [("+unknown=1", "unknown is not a setting"), ("+trainer.lrr=1", "trainer.lrr is not a setting")],
)
def test_keys_that_hydra_lets_in_are_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        composed(override)


@pytest.mark.parametrize("group", ["schedule", "schedule.decay"])
def test_a_schedule_is_the_same_by_its_group_and_by_its_decay(group):
    ends = [
        composed(f"{group}={decay}").schedule.final_fraction for decay in ("cosine", "linear", "constant")
    ]
    assert ends == [0.1, 0.0, None]


def test_a_config_survives_its_yaml(tmp_path):
    config = composed(
        "model=gpt2_small", "trainer.precision=bf16", "data.files=[a.txt,b.txt]", "logger.tags=[x]"
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def with_batch(**trainer) -> Config:
    return Config(model=ModelConfig(seq_len=256), trainer=TrainerConfig(**trainer))


def test_accumulation_makes_up_the_global_batch():
    config = with_batch(batch_tokens=256 * 48, micro_batch=4)
    for world_size in (1, 2, 4):
        steps, micro_batch = config.accumulation_steps(world_size)
        assert steps * micro_batch * world_size * 256 == config.trainer.batch_tokens
        assert micro_batch == 4
    assert with_batch(batch_tokens=256 * 48).accumulation_steps(2) == (1, 24)


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(ConfigError, match="3840 or 4096"):
        with_batch(batch_tokens=4000)
    with pytest.raises(ConfigError, match="nearest: 256"):
        with_batch(batch_tokens=100)
    with pytest.raises(ConfigError, match="3072 or 4608"):
        with_batch(batch_tokens=256 * 16).accumulation_steps(6)
    with pytest.raises(ConfigError, match="nearest: 4 or 8"):
        with_batch(batch_tokens=256 * 16, micro_batch=5).accumulation_steps(1)
