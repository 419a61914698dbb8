"""The picture of a run's attention, by its command. About 4 s, most of them matplotlib's import."""

import sys

import pytest
import torch

from training import attention_maps

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch):
    """`python -m training.attention_maps ARGUMENTS`, in this process; returns what it ends with, None or an error."""

    def drawn(*arguments: object) -> str | None:
        monkeypatch.setattr(sys, "argv", ["attention_maps", *map(str, arguments)])
        try:
            attention_maps.main()
        except SystemExit as end:
            return end.code

    return drawn


def test_a_picture_has_a_map_for_every_layer_and_head_that_is_asked_for(
    run_of_a_step, drawn, tmp_path, capsys
):
    for options, titles in (
        ([], ["layer 0, head 0", "layer 0, head 1"]),
        (["--layer", "0", "--head", "1"], ["layer 0, head 1"]),
    ):
        picture = tmp_path / "maps.svg"
        capsys.readouterr()
        assert drawn(run_of_a_step, "the fox\tx$", "-o", picture, *options) is None
        assert capsys.readouterr().out == f"{picture}\n"
        text = picture.read_text()
        assert all(f"<!-- {title} -->" in text for title in titles)
        assert text.count("<!-- layer ") == len(titles)
        assert text.count("<!-- · -->") == 2 * (len(titles) == 1)  # the space of the text, on both axes


def test_the_maps_are_of_the_texts_tokens(run_of_a_step):
    maps, tokens = attention_maps.maps_of(run_of_a_step, "the fox")
    assert tokens == list("the fox")
    assert maps.shape == (1, 2, 7, 7)
    torch.testing.assert_close(maps.sum(-1), torch.ones(1, 2, 7))
    assert not maps.triu(1).any()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x" * 33], "the text has 33 tokens; the model reads 1 to 32"),
        ([""], "the text has 0 tokens"),
        (["x", "--layer", "1"], "--layer 1: the model has layers 0 to 0"),
        (["x", "--head", "-1"], "--head -1: the model has heads 0 to 1"),
        (["x", "-o", "maps.doc"], "maps.doc cannot be written: Format 'doc' is not supported"),
        (["x", "-o", "none/maps.png"], "none/maps.png cannot be written: "),
    ],
)
def test_a_mistake_is_refused_in_one_line(run_of_a_step, drawn, arguments, said):
    error = drawn(run_of_a_step, *arguments)
    assert error.startswith(f"error: {said}")
    assert "\n" not in error
