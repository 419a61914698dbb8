# Attention beside PyTorch's, then 30 training steps with each: times that torch and triton versions are compared by
source .ci/gpu/jobs/verify.sh
settings=(experiment=compare/gpt2_small data=python_source data.tokenizer="$TOK" data.cache_dir="$CACHE" logger=none)
settings+=(trainer.steps=30 trainer.batch_tokens=65536 trainer.eval_every=0 trainer.sample_tokens=0 trainer.log_every=5)
if [ -n "${TRY:-}" ]; then
  settings+=(model.n_layer=1 model.n_head=2 model.n_embd=32 model.seq_len=32 trainer.batch_tokens=64 trainer.micro_batch=2)
  settings+=(trainer.precision=fp32 trainer.steps=4 data.limit_documents=40 data.workers=1)
fi
bash .ci/gpu/jobs/race.sh plain 0 120
source .ci/gpu/jobs/run.sh
for attention in flash sdpa; do
  if [ -n "${TRY:-}" ]; then attention=${attention/flash/naive}; fi
  run "runs/$attention" python train.py "${settings[@]}" attention=$attention hydra.run.dir=runs/$attention | tail -n 20
done
