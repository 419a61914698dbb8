# recipes.sh NAME...: a few steps of configs/experiment/paper/NAME.yaml with the micro-batches that it states, with our
# kernels and with naive; peak memory is in each run's summary.json
source .ci/gpu/jobs/run.sh
naive_micro_batch() { sed -n 's/.*attention=naive: \([0-9]*\).*/\1/p' "configs/experiment/paper/$1.yaml"; }
failed=0
for name in "$@"; do
  for attention in flash naive; do
    settings=(experiment=paper/$name attention=$attention data=python_source data.tokenizer="$TOK" trainer.steps=8)
    if [ $attention = naive ]; then settings+=(trainer.micro_batch=$(naive_micro_batch $name)); fi
    settings+=(trainer.batch_tokens=$((64 * 1024)))
    if [ -n "${TRY:-}" ]; then
      settings+=(attention=naive model.n_layer=1 model.n_head=2 model.n_embd=16 model.seq_len=32 trainer.precision=fp32)
      settings+=(trainer.device=cpu trainer.batch_tokens=1024 data.limit_documents=40 data.workers=1)
    fi
    settings+=(trainer.eval_every=0 trainer.save_every=0 trainer.sample_tokens=0 trainer.log_every=2 logger=none)
    run "runs/$name-$attention" python train.py "${settings[@]}" data.cache_dir="$CACHE" \
      hydra.run.dir=runs/$name-$attention 2>&1 | tail -n 8
    status=${PIPESTATUS[0]}
    if [ $status != 0 ]; then failed=1; fi
    echo "$name, $attention: status $status"
  done
done
exit $failed
