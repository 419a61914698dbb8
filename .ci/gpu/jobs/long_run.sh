# GPT-2 small on English and code by eight GPUs
source .ci/gpu/jobs/end.sh
seconds=230 tokens_per_second=3900000 batch=524288 ranks=8
steps=$((seconds * tokens_per_second / batch))
settings=(trainer.batch_tokens=$batch trainer.micro_batch=64 trainer.steps=$steps trainer.eval_every=$((steps / 8)))
settings+=(trainer.log_every=10 trainer.sample_tokens=300)
limit=
if [ -n "${TRY:-}" ]; then
  ranks=2 limit=data.limit_documents
  settings=(trainer.device=cpu attention=naive model.n_layer=1 model.n_head=2 model.n_embd=16 model.seq_len=32 data.workers=1)
  settings+=(trainer.batch_tokens=256 trainer.micro_batch=4 trainer.steps=20 trainer.eval_every=10 trainer.eval_tokens=512)
fi
data=(data.tokenizer="$TOK" data.cache_dir="$CACHE")
prepare() { # a folder, a limit in a trial: the corpus and its tokens, as data.corpora takes them
  python prepare.py data=text_files data.files="$1" "${data[@]}" ${limit:+$limit=$2} 2> /dev/null |
    awk '/^training/ { gsub(",", ""); tokens = $4 } /^corpus/ { printf "%s: %s", $2, tokens }'
}
corpora="{$(prepare "$TEXT" 60), $(prepare "$CODE" 40)}"
echo "corpora $corpora, steps $steps"
source .ci/gpu/jobs/run.sh
run runs/long python -m torch.distributed.run --standalone --nproc_per_node=$ranks train.py model=gpt2_small \
  data=mix "data.corpora=$corpora" "${data[@]}" logger=none hydra.run.dir=runs/long "${settings[@]}"
