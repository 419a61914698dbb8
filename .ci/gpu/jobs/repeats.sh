# Equal runs beside each other whose compilers share no file: do their weights agree bit for bit? TorchInductor takes some
# tiles by their time (kernels/log/versions.md), with TORCHINDUCTOR_DETERMINISTIC=1 none that decides a sum's order. Prints each
# run's tokens/s, a hash of its weights, and the reductions whose tile was timed, with the tile that each run took.
source .ci/gpu/jobs/end.sh
settings=(experiment=compare/gpt2_small attention=flash data=python_source data.tokenizer="$TOK" data.cache_dir="$CACHE")
settings+=(trainer.steps=30 trainer.batch_tokens=65536 trainer.eval_every=0 trainer.sample_tokens=0 trainer.log_every=10 logger=none)
if [ -n "${TRY:-}" ]; then
  settings+=(attention=naive model.n_layer=1 model.n_head=2 model.n_embd=32 model.seq_len=32 trainer.batch_tokens=64)
  settings+=(trainer.micro_batch=2 trainer.precision=fp32 trainer.steps=4 trainer.device=cpu data.limit_documents=40 data.workers=1)
fi
python prepare.py "${settings[@]:2:3}" > /dev/null # else each would tokenise
for deterministic in 0 1; do
  for number in 1 2 3; do
    name=$deterministic.$number
    TORCHINDUCTOR_DETERMINISTIC=$deterministic TORCHINDUCTOR_CACHE_DIR=$PWD/cache/$name TRITON_CACHE_DIR=$PWD/cache/$name/triton \
      python train.py "${settings[@]}" hydra.run.dir=runs/$name > "$JOB_OUT/$name.txt" 2>&1 &
  done
  wait
done
python - <<'P' | tee "$JOB_OUT/repeats.txt"
import hashlib, json, pathlib
from collections import defaultdict
from training.checkpoint import find, load_weights
tiles = defaultdict(dict)
for run in sorted(pathlib.Path("runs").iterdir()):
    summary = json.loads((run / "summary.json").read_text())
    print(run.name, summary["perf/tokens_per_second"], "tokens/s", end=" ")
    weights = hashlib.sha256()
    for name, weight in sorted(load_weights(find(run), "cpu").items()):
        weights.update(weight.contiguous().numpy().tobytes())
    print(weights.hexdigest()[:16])
    for file in pathlib.Path("cache", run.name).rglob("*.best_config"):
        tiles[file.stem][run.name] = json.loads(file.read_text())
for kernel, taken in tiles.items():
    shown = {run: {key: each[key] for key in each if "BLOCK" in key} for run, each in taken.items()}
    if any("R0_BLOCK" in each for each in shown.values()):
        print(kernel, "one tile" if len({json.dumps(each) for each in shown.values()}) == 1 else shown)
P
