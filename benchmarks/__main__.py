"""`python -m benchmarks`: list and run the benchmarks, and hold them to this project's own aims."""

from functools import partial

from reproduce.command_line import Program, run, start
from reproduce.experiment import ATTENTIONS, Experiment

_Benchmark = partial(Experiment, package="benchmarks")
BENCHMARKS: dict[str, Experiment] = {
    each.name: each
    for each in (
        _Benchmark(
            name="loss",
            title="GPT-2's head and its loss: time and peak memory against torch's and Liger-Kernel's",
            minutes=1.0,
            measures=(
                *("kernels.layers.softmax_gradient", "model.gpt.cross_entropy"),
                "training.precision.compiled",
            ),
            seconds={"check": 2.0, "memory": 1.0, "time": 10.0},
            compiles=({"kind": "check"}, {"kind": "memory"}),
        ),
        _Benchmark(
            name="documents",
            title="packed documents and sliding windows: time over attention without them, against PyTorch's",
            minutes=2.5,
            measures=ATTENTIONS,
            seconds={"check": 0.5, "time": 2.0},
            compiles=({"kind": "check"},),
        ),
        _Benchmark(
            name="features",
            title="flash against other libraries with the same feature (softcap, key padding, ...) or head_dim",
            minutes=26.0,  # estimated, from 17 for softcap, ALiBi, sinks and dropout
            measures=ATTENTIONS,
            seconds={"check": 1.4, "time": 7.0},
            compiles=({"kind": "check"},),
        ),
        _Benchmark(
            name="neighbour",
            title="whether a busy GPU next to it changes what a GPU or the host takes",
            minutes=2.0,
            measures=("kernels.flash", "kernels.naive.naive_attention", "kernels.library.sdpa"),
            gpus=2,
            alone=True,
        ),
        _Benchmark(
            name="host",
            title="what a call of attention costs the host, against PyTorch's and a function that does nothing",
            minutes=0.5,
            measures=("kernels.flash.api.flash_attention", "kernels.launch.launch"),
            alone=True,
        ),
        _Benchmark(
            name="huggingface",
            title="transformers' GPT-2 and Llama on our kernels, against its own attentions",
            minutes=6.0,
            measures=(
                *("kernels.flash.portable", "kernels.flash.hopper"),
                *("kernels.under_transformers.attention", "kernels.under_transformers.mask_of"),
            ),
            alone=True,
        ),
        _Benchmark(
            name="decode",
            title="a generated token's time, against transformers' generate with sdpa on the same weights",
            minutes=15.0,  # estimated, from 5.4 with a quarter of the rounds
            measures=("kernels.flash.decode", "model.decode.Decoder", "model.decode.generate_batch"),
            alone=True,
        ),
    )
}
TOOLS = {
    "aims": ("benchmarks.aims_page", "results/ held to this project's own aims, as results/BENCHMARKS.md"),
    "step": ("benchmarks.step", "--nanogpt PATH: a CPU training step against nanoGPT's"),
    "scaling": (
        "benchmarks.scaling",
        "--gpus 1 2 4 8: tokens/s and memory of several GPUs, whole and in parts",
    ),
    "predict": ("benchmarks.predict", "step time for 8 to 1,024 GPUs, from one GPU's and stated link speeds"),
    "recipes": (
        "benchmarks.recipes",
        "NAME RUN...: curves of training runs, kept as results/<gpu>/NAME.json, .svg",
    ),
    "preparation": ("benchmarks.preparation", "preparing text against bare tiktoken and nanoGPT"),
}
PROGRAM = Program("benchmarks", BENCHMARKS, TOOLS)


def main(argv: list[str]) -> int:
    return run(PROGRAM, argv)


if __name__ == "__main__":
    start(PROGRAM)
