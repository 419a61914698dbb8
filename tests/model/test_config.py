"""GPTConfig, the YAML beside it, and what its import costs. About 2 s."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from model.config import GPTConfig

YAML = sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_embd": 100, "n_head": 12},
            "n_embd=100 is not divisible by n_head=12: set n_embd=96 or 108, or n_head=10 or 20",
        ),
        ({"n_embd": 4, "n_head": 6}, "n_embd=4 is not divisible by n_head=6: set n_embd=6, or n_head=4"),
        ({"n_layer": 0}, "n_layer=0: it must be at least 1"),
        ({"vocab_size": -1}, "vocab_size=-1: it must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0: it must be at least 0.0 and below 1.0"),
    ],
)
def test_errors_name_the_nearest_valid_values(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**changes)


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 64), (64, 64), (257, 320), (50257, 50304)])
def test_vocabulary_is_padded_to_64(vocab_size, padded):
    assert GPTConfig(vocab_size=vocab_size).padded_vocab_size == padded


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.stem)
def test_yaml_fits_the_structured_config(path):
    merged = OmegaConf.merge(OmegaConf.structured(GPTConfig), OmegaConf.load(path).model)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, GPTConfig)
    assert config.vocab_size == 50257  # left to the tokenizer


def test_structured_config_refuses_wrong_types_and_unknown_names():
    schema = OmegaConf.structured(GPTConfig)
    for wrong in ({"n_layer": "many"}, {"n_layers": 2}):
        with pytest.raises(OmegaConfBaseException):
            OmegaConf.merge(schema, wrong)


def test_import_does_not_load_torch():
    code = (
        "import sys, model, model.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
