# GPT-2 small on English and code by all GPUs of the job, for about JOB_LIMIT less two minutes
source .ci/gpu/jobs/end.sh
IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
ranks=${#gpus[@]} batch=524288
# The tokens/s are of a GPU: what eight H200 reached at a quarter of this batch, so that it is rather done too early.
steps=$(((JOB_LIMIT - 120) * 490000 * ranks / batch))
settings=(trainer.batch_tokens=$batch trainer.micro_batch=64 trainer.steps=$steps trainer.eval_every=$((steps / 24)))
settings+=(trainer.log_every=10 trainer.sample_tokens=0)
limit=
if [ -n "${TRY:-}" ]; then
  ranks=2 limit=data.limit_documents
  settings=(trainer.device=cpu attention=naive model.n_layer=1 model.n_head=2 model.n_embd=16 model.seq_len=32 data.workers=1)
  settings+=(trainer.batch_tokens=256 trainer.micro_batch=4 trainer.steps=20 trainer.eval_every=10 trainer.eval_tokens=512)
fi
data=(data.tokenizer="$TOK" data.cache_dir="$CACHE")
prepare() { # a name, a folder, a limit in a trial: the corpus and its tokens, as data.corpora takes them
  if ! read -r tokens folder < <(python prepare.py data=text_files data.files="$2" "${data[@]}" ${limit:+$limit=$3} 2> "$JOB_OUT/$1.txt" |
    awk '/^training/ { gsub(",", ""); tokens = $4 } /^corpus/ { print tokens, $2 }'); then
    cat "$JOB_OUT/$1.txt" >&2
    exit 1
  fi
  ln -sfn "$folder" "$1" # the run's settings then name no path of this machine
  echo "$1: $tokens"
}
english=$(prepare english "$TEXT" 60) && code=$(prepare code "$CODE" 40) || exit
corpora="{$english, $code}"
echo "corpora $corpora, ranks $ranks, steps $steps"
source .ci/gpu/jobs/run.sh
run runs/long python -m torch.distributed.run --standalone --nproc_per_node=$ranks train.py model=gpt2_small \
  data=mix "data.corpora=$corpora" "${data[@]}" logger=none hydra.run.dir=runs/long "${settings[@]}"
