"""Make a corpus ready ahead of a run, with the data settings that the run will have.

    python prepare.py data=openwebtext
    python prepare.py data=text_files data.files='*.txt' data.tokenizer=gpt2
    python prepare.py data=text_files --cfg job         the config of a command, without doing it

data is one of python_source, text_files, openwebtext, hub, mix; the settings are explained in configs/reference.yaml.
"""

from pathlib import Path

import training.installed  # noqa: F401  (ends with one line if a package is missing)
from training.command_line import launch
from training.config import Config


def main(config: Config, _run_dir: Path) -> None:
    from training.corpus import prepare_corpus

    corpus = prepare_corpus(config.data)
    for name, split in (("training", corpus.train), ("validation", corpus.val)):
        print(
            f"{name:<11} {split.documents:>12,} documents {split.tokens:>15,} tokens {split.utf8_bytes:>16,} bytes"
        )
    print(f"corpus      {corpus.directory}")


if __name__ == "__main__":
    launch(main, makes_run=False, usage=__doc__)
