from dataclasses import fields, is_dataclass, replace

import pytest

import kernels
from training import reference
from training.command_line import CONFIGS, composed, options_of
from training.config import Config, ConfigError, ModelConfig, TrainerConfig, cannot_load, load_config, to_yaml
from training.parallel.config import ParallelConfig

GROUPS = [
    f"{path.name}={option}"
    for path in sorted(CONFIGS.iterdir())
    if path.is_dir() and path.name != "hydra"  # they need plugins: tests/test_sweep.py
    for option in options_of(path.name)
]


FINAL_FRACTIONS = {"cosine": 0.1, "linear": 0.0, "constant": None}


@pytest.mark.parametrize("choice", GROUPS)
def test_every_option_of_every_group_composes(choice):
    """Attention to that name, GPT-2's sizes to a head_dim of 64, a schedule to its final fraction."""
    config = composed(choice)
    assert isinstance(config, Config)
    group, _, name = choice.partition("=")
    if group == "attention":
        assert config.attention.name == name
    if choice.startswith("model=gpt2"):
        assert config.model.head_dim == 64
    if group == "schedule" and name in FINAL_FRACTIONS:
        assert config.schedule.final_fraction == FINAL_FRACTIONS[name]


def test_attention_configs_are_auto_and_one_for_each_backend():
    assert set(options_of("attention")) == {"auto", *kernels.ATTENTION}


def test_schedule_decay_gives_the_final_fraction_of_the_group():
    for decay, fraction in FINAL_FRACTIONS.items():
        assert composed(f"schedule.decay={decay}").schedule.final_fraction == fraction
    assert {*FINAL_FRACTIONS} < {*options_of("schedule")}


def test_a_config_written_to_yaml_loads_back_equal(tmp_path):
    config = composed(
        "model=gpt2_small", "trainer.precision=bf16", "data.files=[a.txt,b.txt]", "logger.tags=[x]"
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def with_batch(**trainer) -> Config:
    return Config(model=ModelConfig(seq_len=256), trainer=TrainerConfig(**trainer))


def test_micro_batches_of_all_ranks_add_up_to_the_global_batch():
    config = with_batch(batch_tokens=256 * 48, micro_batch=4)
    for world_size in (1, 2, 4):
        steps, micro_batch = config.accumulation_steps(world_size)
        assert steps * micro_batch * world_size * 256 == config.trainer.batch_tokens
        assert micro_batch == 4
    assert with_batch(batch_tokens=256 * 48).accumulation_steps(2) == (1, 24)


def test_the_error_for_an_indivisible_batch_names_the_nearest_valid_sizes():
    with pytest.raises(ConfigError, match="3840 or 4096"):
        with_batch(batch_tokens=4000)
    with pytest.raises(ConfigError, match="nearest: 256"):
        with_batch(batch_tokens=100)
    with pytest.raises(ConfigError, match="3072 or 4608"):
        with_batch(batch_tokens=256 * 16).accumulation_steps(6)
    with pytest.raises(ConfigError, match="nearest: 6144"):  # of which each rank takes a micro-batch
        with_batch(batch_tokens=256 * 16, micro_batch=4).accumulation_steps(6)
    with pytest.raises(ConfigError, match="nearest: 4 or 8"):
        with_batch(batch_tokens=256 * 16, micro_batch=5).accumulation_steps(1)
    with pytest.raises(ConfigError, match="is 1 sequence, which 2 ranks cannot share equally; nearest: 512"):
        with_batch(batch_tokens=256).accumulation_steps(2)


def test_the_error_for_an_indivisible_batch_names_the_numbers_of_ranks_that_a_resumed_run_goes_on_with():
    """Its batch belongs to what it is: another number of tokens would be refused next."""
    goes_on = "; a resumed run keeps its batch, and goes on with "
    cases = [
        ({"batch_tokens": 256 * 16}, 1, 6, [4, 8], "4 or 8 ranks"),
        ({"batch_tokens": 256 * 16, "micro_batch": 4}, 1, 6, [4], "4 ranks"),  # 8 would leave a rank too few
        ({"batch_tokens": 256 * 16, "micro_batch": 5}, 1, 6, [], "4 or 8 ranks"),  # of which none gets fives
        ({"batch_tokens": 256 * 15}, 2, 4, [3, 5], "6 or 10 ranks"),
        ({"batch_tokens": 256}, 1, 2, [1], "1 rank"),
    ]
    for batch, context, parts, able, named in cases:
        config = replace(with_batch(**batch), parallel=ParallelConfig(context=context))
        with pytest.raises(ConfigError) as refused:
            config.accumulation_steps(parts)
        assert str(refused.value).endswith(f"{goes_on}{named}.")
        for each in able:
            assert config.accumulation_steps(each)


def test_the_reference_has_every_setting_its_default_and_meaning_and_is_up_to_date():
    assert reference.FILE.read_text() == reference.reference(), "run python -m training.reference"
    assert load_config(reference.FILE) == composed()
    schemas = [Config, *(f.default_factory for f in fields(Config) if is_dataclass(f.default_factory))]
    for schema in schemas:
        named = {f.name for f in fields(schema) if not is_dataclass(f.default_factory)}
        assert named == named & reference.comments(schema).keys()
        assert schema is Config or schema.__doc__


@pytest.mark.parametrize(
    ("error", "of_torch"),
    [
        (ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory"), True),
        (ImportError("/x/libtorch_cuda.so: undefined symbol: ncclFoo"), True),
        (OSError("libcublas.so.13: cannot open shared object file"), True),  # ctypes
        (FileNotFoundError(2, "No such file or directory", "/home/u/.sources/text.sorted"), False),
        (OSError(28, "No space left on device", "/scratch/run.so"), False),
        (ImportError("cannot import name 'x' from 'y' (y.cpython-312.so)"), False),
    ],
)
def test_what_is_said_of_torchs_libraries_is_said_of_no_other_file(error, of_torch):
    assert bool(cannot_load(error)) == of_torch
