import base64
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """400 documents of 0 to 3,000 characters, not all ASCII, some with the text of the special token in them."""
    words = [
        "the",
        "attention",
        "naïve",
        "tile",
        "东京",
        "<|endoftext|>",
        "softmax,",
        "e^x",
        "1729",
        "\n",
        "  ",
        "don't",
    ]
    choose = random.Random(0)
    texts = [" ".join(choose.choices(words, k=choose.randrange(400))) for _ in range(399)]
    return [*texts[:7], "", *texts[7:]]


@pytest.fixture(scope="session")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small BPE vocabulary: the bytes and some merges."""
    merges = b"th the  t  th  the at en on ti tio tion  a  at ma so soft <| || \xc3\xaf 17 \n\n".split(b" ")
    tokens = [bytes([value]) for value in range(256)]
    tokens += [token for token in dict.fromkeys(merges) if len(token) > 1]
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )
    return str(path)


@pytest.fixture(scope="session")
def parquet(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents in three files of several row groups."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("parquet")
    for index in range(3):
        texts = documents[index * 150 : (index + 1) * 150]
        table = pyarrow.table({"text": texts, "id": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, folder / f"part-{index}.parquet", row_group_size=20)
    return folder
