# One rank of the job, which has one a GPU, is killed, half of them go on: whole on each GPU, then in parts, whose ranks
# cannot save alone
source .ci/gpu/jobs/end.sh
IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
ranks=${#gpus[@]}
settings=(model=gpt2_small attention=flash trainer.batch_tokens=131072 trainer.micro_batch=16 trainer.steps=4000)
settings+=(trainer.log_every=5)
if [ -n "${TRY:-}" ]; then
  ranks=2
  settings=(trainer.device=cpu attention=naive model.n_layer=1 model.n_head=2 model.n_embd=16 model.seq_len=32 data.workers=1)
  settings+=(trainer.batch_tokens=256 trainer.micro_batch=4 trainer.steps=100000 trainer.log_every=20 data.limit_documents=20)
fi
settings+=(logger=none trainer.eval_every=0 trainer.sample_tokens=0 data.tokenizer="$TOK" data.cache_dir="$CACHE")
python .ci/gpu/files/killed.py whole $ranks "${settings[@]}"
if [ $SECONDS -lt $((JOB_LIMIT / 2)) ]; then
  python .ci/gpu/files/killed.py parts $ranks "${settings[@]}" parallel.shard=full trainer.save_every=25
fi
