# train.sh WORDS...: train.py on the English text, one corpus for all jobs; then `python -m benchmarks recipes`
source .ci/gpu/jobs/run.sh
tiny=()
if [ -n "${TRY:-}" ]; then
  tiny=(model.n_layer=1 model.n_head=2 model.n_embd=32 model.seq_len=32 trainer.batch_tokens=256 trainer.micro_batch=8)
  tiny+=(trainer.steps=6 trainer.eval_every=3 trainer.eval_tokens=1000 trainer.device=cpu attention=naive)
  case "$*" in *modern*) tiny+=(model.n_kv_head=1) ;; esac
fi
run runs/train python train.py "$@" data=text_files "data.files=$TEXT/*.jsonl" data.tokenizer="$TOK" \
  data.cache_dir="$CACHE" logger=none hydra.run.dir=runs/train "${tiny[@]}"
