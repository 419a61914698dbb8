"""Files on disk are complete or absent."""

from pathlib import Path

import pytest

from data.files import written_whole


def test_a_file_appears_only_once_it_is_complete(tmp_path: Path) -> None:
    path, scratch = tmp_path / "shard", tmp_path / "partial"
    scratch.mkdir()
    with written_whole(path, scratch) as file:
        file.write(b"first half, ")
        file.flush()
        assert not path.exists()
        file.write(b"second half")
    assert path.read_bytes() == b"first half, second half"


def test_an_interrupted_write_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"before")

    def interrupted() -> None:
        with written_whole(path, tmp_path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
