"""All jobs: python jobs.py lists them; python jobs.py ROOT PRIORITY NAME ... puts some into a runner's queue.

NAME=SECONDS sets a job's limit, from which the longer ones take how much they do.
"""

import sys
from pathlib import Path
from typing import NamedTuple

PINNED = "torch213"  # requirements.txt


class Job(NamedTuple):
    what: str
    body: str
    gpus: int = 1
    limit: int = 420
    env: str = PINNED
    needs: str = ""

    def script(self) -> str:
        header = {"gpus": self.gpus, "limit": self.limit, "env": self.env, "needs": self.needs}
        lines = [f"# {key}: {value}" for key, value in header.items()]
        return "\n".join([*lines, f"# {self.what}", self.body]) + "\n"


def script(line: str) -> str:
    return f"bash .ci/gpu/jobs/{line}"


def measure(*lines: str) -> str:
    """Experiments of `reproduce` and `benchmarks`: `whole` ones, or a `slice` each; merge.py joins slices."""
    return "\n".join(["source .ci/gpu/jobs/measure.sh", *lines])


JOBS: dict[str, Job] = {}

for version in ("211", "213", "214", "215"):
    pair = f"torch{version}"
    for half in "ab":
        JOBS[f"tests_{version}_{half}"] = Job(
            f"half of the GPU tests with {pair}", script(f"tests.sh {half}"), limit=540, env=pair
        )
    for half in (1, 2):
        JOBS[f"flash_{version}_{half}"] = Job(
            f"half of flash's GPU tests with {pair}", script(f"tests.sh flash {half}/2"), limit=600, env=pair
        )
    JOBS[f"times_{version}"] = Job(
        f"attention and 30 training steps with {pair}", script("times.sh"), limit=300, env=pair
    )

JOBS |= {
    f"commands_{name}": Job(f"docs/gpu.md's commands: {what}", script(f"commands.sh {name}"))
    for name, what in {
        "fused": "compare/gpt2_small, tuning, a profile",
        "torch": "torch's other layers",
        "documents": "packed documents",
    }.items()
}
JOBS |= {
    "class": Job("every class of shapes with every backend", script("tests.sh class"), limit=400),
    "random": Job("300 random calls of each kind", script("tests.sh random"), limit=500),
    "sanitizer": Job("compute-sanitizer over every kernel", script("sanitizer.sh"), limit=400),
    "repeats": Job("equal runs whose compilers share no file", script("repeats.sh"), limit=400),
    "contention": Job(
        "14 processes repeat training steps, and attention alone in ten forms, bit for bit",
        script("contention.sh"),
        limit=400,
    ),
    "host": Job(
        "what a call costs the host; few jobs at the same time", measure("whole benchmarks host"), limit=240
    ),
    "ptxas": Job("the same kernels by several assemblers", script("ptxas.sh"), limit=400),
}

for name, what in {
    "wide 0": "head_dim 136 to 256 on the Hopper kernels",
    "wide 1": "the same in another process",
    "dims 0": "other head_dims up to 128 on the Hopper kernels",
    "features 0": "padding, dropout and sinks on the Hopper kernels",
    "wide_features 0": "windows, documents, softcap and ALiBi at head_dim 136 to 256 on the Hopper kernels",
    "wide_padding 0": "padding, dropout and sinks at head_dim 136 to 256 on the Hopper kernels",
    "wide_dropout 0": "new forms with dropout, and ALiBi with padding, at head_dim 136 to 192 on the Hopper kernels",
    "full 0": "full documents and windows, and windows with key padding, on the Hopper kernels",
    "untimed 0": "softcap and ALiBi beside others, features at head_dim 32, 80 and 96, on the Hopper kernels",
    "untimed 1": "the same in another process",
    "lengths 0": "features at 128 to 65,536 tokens, where benchmarks features has no point, beside other libraries",
    "by_query 0": "documents whose keys have offsets of their own, or key padding, on the Hopper kernels",
}.items():
    JOBS[f"race_{name.replace(' ', '_')}"] = Job(what, script(f"race.sh {name}"))
JOBS["race_combined_0"] = Job(
    "precise_delta with others, softcap, ALiBi, and 16 to 512 tiles on the Hopper kernels",
    script("race.sh combined 0"),
    limit=300,
)

JOBS |= {
    "tests_two": Job("tests that need two GPUs, side by side", script("tests.sh two"), gpus=2, limit=420),
    "scaling_1": Job("one GPU: what all others are compared with", script("scaling.sh 1"), limit=500),
    "scaling_2": Job("two GPUs, whole and in parts", script("scaling.sh 2"), gpus=2, limit=720),
    "scaling_4": Job("four GPUs", script("scaling.sh 4"), gpus=4, limit=280),
    "scaling_8": Job("eight GPUs", script("scaling.sh 8"), gpus=8, limit=360),
    "long_1": Job("one sequence of 256k tokens on one GPU", script("scaling.sh long_1"), limit=300),
    "long_2": Job("long sequences over two GPUs", script("scaling.sh long_2"), gpus=2, limit=560),
    "long_4": Job("long sequences over four GPUs", script("scaling.sh long_4"), gpus=4, limit=560),
    "long_8": Job("long sequences over eight GPUs", script("scaling.sh long_8"), gpus=8, limit=560),
    "ring_2": Job(
        "ring attention on two GPUs, beside the results of four and eight",
        # A part of a run of all: merge.py leaves the others' results. In a trial, as its tiny settings are.
        measure(
            "words=(ranks=2,4,8 lengths=32768,65536,131072,262144 --select ranks=2 lengths=32768,65536,131072)",
            'if [ -n "${TRY:-}" ]; then words=(); fi',
            'slice reproduce ring "${words[@]}" --compilers 0',
        ),
        gpus=2,
        limit=330,
    ),
}
for gpus in (4, 8):
    JOBS |= {
        f"scaling_whole_{gpus}": Job(
            f"XL whole on each of {gpus} GPUs", script(f"scaling.sh whole_{gpus}"), gpus=gpus, limit=300
        ),
        f"ring_{gpus}": Job(
            f"ring attention on {gpus} GPUs, the longest last",
            # In a trial, as its tiny settings are.
            measure(
                f"words=(ranks={gpus} lengths=131072,32768,65536,262144)",
                'if [ -n "${TRY:-}" ]; then words=(); fi',
                'whole reproduce ring "${words[@]}"',
            ),
            gpus=gpus,
            limit=240,
        ),
        f"killed_{gpus}": Job(
            f"a rank of {gpus} is killed; half of them go on", script("killed.sh"), gpus=gpus, limit=300
        ),
        f"long_run_{gpus}": Job(
            "GPT-2 small on English and code, for ten minutes",
            script("long_run.sh"),
            gpus=gpus,
            limit=720,
            needs="text code",
        ),
    }

for name, (part, only, seconds) in {
    "sdpa": ("gpt2", "sdpa", 700),
    "sdpa_math": ("gpt2", "sdpa_math", 1300),
    "flash_seed": ("gpt2", "flash_seed", 650),
    "flash_triton": ("gpt2", "flash_triton", 650),
    "context_512": ("context", "context_512", 500),
    "context_1024_seed": ("context", "context_1024_seed", 500),
    "stability_sdpa": ("stability", "stability_sdpa", 540),
    "stability_half_lr": ("stability", "stability_half_lr", 540),
    "numerics": ("numerics", "numerics_start,numerics_end", 900),  # trains flash again
}.items():
    JOBS[f"perplexity_{name}"] = Job(
        "C12, C14: a run of reproduce perplexity",
        script(f"perplexity.sh {part} {only}"),
        limit=seconds,
        needs="text code",
    )

# Runs of `perplexity` with other weights. Afterwards: python -m benchmarks recipes pairs RUN... --commit SHA
PAIR = "model=gpt2_small attention.precise_delta=false trainer.batch_tokens=65536 trainer.micro_batch=16 "
PAIR += "trainer.steps=3052 trainer.eval_every=200 trainer.keep_checkpoints=1 trainer.precision=bf16 "
PAIR += "schedule.warmup_fraction=0.01"
for weights in range(2, 6):
    for attention, seconds in (("naive", 900), ("flash", 600)):
        JOBS[f"pair_{attention}_{weights}"] = Job(
            f"C12: {attention} with weights {weights}",
            script(f"train.sh attention={attention} init_seed={weights} {PAIR}"),
            limit=seconds,
            needs="text",
        )

for number, names in enumerate(("gpt2_small gpt2_medium", "gpt2_small_2k gpt2_small_4k"), 1):
    JOBS[f"recipes_{number}"] = Job(
        "peak memory of the papers' recipes with their micro-batches",
        script(f"recipes.sh {names}"),
        limit=300,
    )

# 50 M tokens, a quarter of docs/recipes.md's: about 3 minutes of an H100 a run.
SWEEP = "model=gpt2_small trainer.batch_tokens=65536 trainer.micro_batch=16 trainer.steps=763 "
SWEEP += "trainer.eval_every=50 trainer.eval_tokens=2000000 schedule.warmup_fraction=0.01"
for optimizer in ("adamw", "muon"):
    for schedule in ("linear", "wsd"):
        JOBS[f"sweep_{optimizer}_{schedule}"] = Job(
            "docs/recipes.md: Muon, and warm-up, stable, decay; 50 M tokens",
            script(f"train.sh optimizer={optimizer} schedule={schedule} {SWEEP}"),
            limit=360,
            needs="text",
        )
    for recipe in ("compare", "modern"):
        JOBS[f"{recipe}_{optimizer}"] = Job(
            "docs/recipes.md: GPT-2 with the parts of later models; on English text, 52 M tokens",
            script(f"train.sh experiment={recipe}/gpt2_small optimizer={optimizer} trainer.steps=400"),
            limit=360,
            needs="text",
        )

ATTENTION = (
    ("README's table: fa2's 4096 and GPT-2's shapes", "figures=gpt2,fa2 lengths=4096"),
    ("README's table: fa2's 1024 and 2048", "figures=fa2 lengths=1024,2048"),
    ("README's table: fa2's 8192 and 16384", "figures=fa2 lengths=8192,16384"),
    ("fa2's 512", "figures=fa2 lengths=512 --seconds 190"),
    ("README's memory, C7, C8: fa1's 1024 and 2048", "figures=fa1 lengths=1024,2048"),
    ("README's memory: fa1's 4096 and 512", "figures=fa1 lengths=4096,512"),
    ("fa1's 256, 128 and 8192", "figures=fa1 lengths=8192,256,128"),
    ("README's memory: fa1's 16384 to 65536", "figures=fa1 lengths=16384,32768,65536"),
    ("dropout with stored scores", "figures=stored lengths=512,256,128 --seconds 190"),
    ("16k tokens at 128 and 256, one sequence of 32k and 64k", "figures=beyond"),
)
for number, (what, select) in enumerate(ATTENTION, 1):
    JOBS[f"attention_{number}"] = Job(what, measure(f"slice reproduce attention --select {select}"))

# The first process takes a minute or more before its first time: FlashAttention-4 compiles.
FEATURES = (
    ("softcap against other libraries", "features=softcap"),
    ("ALiBi against other libraries", "features=alibi_slopes"),
    ("sinks against other libraries", "features=sinks"),
    ("dropout against other libraries", "features=dropout_p"),
    ("key padding against other libraries", "features=kv_lengths"),
    ("windows of unequal lengths against other libraries", "features=window"),
    ("head_dim 32, 80 and 96 against other libraries", "features=head_dim other_head_dims=32,80,96"),
    ("head_dim 160 and 192 against other libraries", "features=head_dim other_head_dims=160,192"),
    ("what precise_delta costs", "features=precise_delta"),
)
FEATURE = "slice benchmarks features --select"
for number, (what, select) in enumerate(FEATURES, 1):
    JOBS[f"features_{number}"] = Job(what, measure(f"{FEATURE} head_dims=64,128 {select}"), limit=600)
for feature in ("softcap", "alibi_slopes", "sinks", "dropout_p", "kv_lengths", "window", "precise_delta"):
    JOBS[f"features_256_{feature}"] = Job(
        f"{feature} at head_dim 256", measure(f"{FEATURE} head_dims=256 features={feature}"), limit=600
    )

TRAINING = (
    ("README: compiled, against nanoGPT", "parts=compiled"),
    ("README: the whole step in one forward, GPT-2 small", "parts=whole --only model=gpt2_small"),
    ("C11, C13: compiled, at 1024", "parts=context --only mode=compiled context=1024"),
    ("C13: compiled, at 2048 and 4096", "parts=context --only mode=compiled context=2048,4096"),
    ("Hugging Face compiled", "parts=today"),
    ("C11: every attention, eager", "parts=small"),
    ("C11: with the paper's dropout, eager", "parts=dropout --only mode=eager"),
    ("C13: contexts, eager", "parts=context --only mode=eager"),
    ("C11: GPT-2 medium, eager", "parts=medium"),
    ("Hugging Face compiled, its vocabulary padded", "parts=padded"),
    ("GPT-2 medium, the whole step in one forward", "parts=whole --only model=gpt2_medium"),
    ("with dropout, compiled", "parts=dropout --only mode=compiled"),
    ("C11: GPT-2 small, eager as CUDA graphs", "parts=replayed --only model=gpt2_small"),
    ("C11: GPT-2 medium, eager as CUDA graphs", "parts=replayed --only model=gpt2_medium"),
)
STEP = "slice reproduce training ${NANOGPT:+nanogpt=nanoGPT/model.py}"
for number, (what, select) in enumerate(TRAINING, 1):
    JOBS[f"training_{number}"] = Job(what, measure(f"{STEP} --compilers 3 --select {select}"), limit=480)
# At 2048 naive is left to its memory. At 8192 it takes 134 of 140 GiB, and without expandable segments the allocator
# lacked 4 GiB in four runs of seven; it is timed after the others. With them SDPA's peak, measured after the cut
# form's, holds that one's memory too (97 GiB for 37): take it from a run without.
for mode, seconds in (("eager", 380), ("compiled", 480)):
    where = f"mode={mode} context=2048"
    core = f"--compilers 1 --seconds {seconds} --select parts=gpt3 core=standard,sdpa,flash"
    memory = "--compilers 0 --seconds 120 --processes 0 --select parts=gpt3"
    JOBS[f"gpt3_{mode}_2048"] = Job(
        "C23: GPT-3 1.3B",
        measure(
            f"{STEP} {core} --only {where}",
            f"{STEP} {memory} --only kind=memory {where}",
        ),
        limit=seconds + 160,
    )
    JOBS[f"gpt3_{mode}_8192"] = Job(
        "C23: GPT-3 1.3B",
        measure(
            "export PYTORCH_ALLOC_CONF=expandable_segments:True",
            f"{STEP} --compilers 1 --select parts=gpt3 --only mode={mode} context=8192",
        ),
        limit=2 * seconds,
    )

ORDER = "--only 'kind=order,check,flash1 tiles,passes'"
for name, (what, line) in {
    "numerics": ("C1, C2, C26", "whole reproduce numerics"),
    "traffic": ("C3, C6, C29, C31: ncu's counters", "whole reproduce traffic"),
    "rungs": ("docs/ladder.md: times of rungs 2, 3 and 5", "slice reproduce traffic --only kind=rungs"),
    "sparse": ("C5, C10", "whole reproduce sparse"),
    "history_1": ("order of the loops", f"slice reproduce history --select lengths=1024,4096,16384 {ORDER}"),
    "history_2": ("order of the loops", f"slice reproduce history --select lengths=512,2048,8192 {ORDER}"),
    "history_3": (
        "C4, C18, C21, C25, C27, C30: the rest",
        "slice reproduce history --only kind=changes,warps,ablation,tiles,programs,softmax",
    ),
    "encoders_1": ("C15: BERT-large", "slice reproduce encoders --only kind=bert"),
    "encoders_2": ("C16: times", "slice reproduce encoders --only kind=listops,path"),
    "loss": ("the fused loss", "whole benchmarks loss"),
    "documents": ("packed documents, windows", "whole benchmarks documents"),
    "huggingface_1": ("GPT-2 under transformers", "slice benchmarks huggingface --select models=gpt2"),
    "huggingface_2": ("Llama under transformers", "slice benchmarks huggingface --select models=llama"),
    "decode": ("a generated token", "whole benchmarks decode"),
}.items():
    JOBS[name] = Job(what, measure(line))
# A run takes 230 s. With flash the host bounds it: four on one GPU take 250. With standard attention the GPU does,
# and a run holds 38 GiB.
for seed in range(5):
    JOBS[f"encoders_{3 + seed}"] = Job(
        "C16: accuracy",
        measure(f"slice reproduce encoders --only kind=accuracy seed={seed} --processes 0"),
        limit=780,
    )
JOBS["neighbour"] = Job("a busy neighbour", measure("whole benchmarks neighbour"), gpus=2, limit=340)
JOBS["preparation"] = Job(
    "preparing text against nanoGPT, on 16 cores", script("preparation.sh"), gpus=0, needs="text"
)


def main(root: str = "", priority: str = "", *names: str) -> None:
    if not names:
        for name, job in JOBS.items():
            print(f"{name:30}{job.gpus} GPU  {job.limit:5} s  {job.env}  {job.what}")
    for each in names:
        name, _, limit = each.partition("=")
        job = JOBS[name]._replace(limit=int(limit or JOBS[name].limit))
        new = Path(root, "queue", f"{int(priority):02}_{name}.new")
        new.write_text(job.script())
        new.rename(new.with_suffix(".sh"))  # never half a job


if __name__ == "__main__":
    main(*sys.argv[1:])
