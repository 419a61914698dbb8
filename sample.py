"""Text from a trained run, as it is drawn: `python sample.py RUN "prompt"`. Several prompts are drawn as a batch."""

import argparse
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import training.installed  # noqa: F401  (ends with one line if a package is missing)
from training.config import one_line_errors


def at_least(smallest: float, kind: type) -> Callable[[str], float]:
    """An argparse type: a number of `kind`, `smallest` or more."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text}: it must be a {'whole ' * (kind is int)}number"
            ) from None
        if not smallest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: it must be {smallest} or more")
        return value

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run directory, or one of its checkpoints")
    parser.add_argument(
        "prompts", nargs="*", default=[], metavar="prompt", help="text to continue (none: a new document)"
    )
    parser.add_argument(
        "-n", "--tokens", type=at_least(0, int), default=200, help="add at most this many tokens (200)"
    )
    parser.add_argument(
        "-t",
        "--temperature",
        type=at_least(0, float),
        default=0.8,
        help="0 always takes the likeliest token (0.8)",
    )
    parser.add_argument(
        "-k", "--top-k", type=at_least(1, int), default=50, help="sample among the K likeliest tokens (50)"
    )
    parser.add_argument("--samples", type=at_least(1, int), default=1, help="how many texts (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", default="auto", help="attention backend (auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--tokenizer", metavar="PATH", help="the run's tokenizer file, if it has moved")
    args = parser.parse_intermixed_args()  # the prompt may come after the options

    sys.stdout.reconfigure(errors="replace")  # for any text, where the terminal or file is not UTF-8
    with one_line_errors():
        import torch

        from training.console import printable
        from training.load_run import load_run
        from training.sampling import sample_texts, stream_text

        show = printable if sys.stdout.isatty() else str
        model, tokenizer = load_run(Path(args.run), args.device, args.attention, args.tokenizer)
        generator = torch.Generator().manual_seed(args.seed % 2**64)  # torch takes no larger seed
        for number in range(args.samples):
            if number:
                print("-" * 80)
            options = (args.tokens, generator, args.temperature, args.top_k)
            if len(args.prompts) > 1:
                texts = sample_texts(model, tokenizer, args.prompts, *options)
                print(f"\n{'-' * 80}\n".join(map(show, texts)))
                continue
            held = ""  # a carriage return, until it is known whether a line ends there
            for piece in stream_text(model, tokenizer, "".join(args.prompts), *options):
                piece = held + piece
                held = piece[len(piece.removesuffix("\r")) :]
                print(show(piece.removesuffix("\r")), end="", flush=True)
            print(show(held))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends cat
    main()
