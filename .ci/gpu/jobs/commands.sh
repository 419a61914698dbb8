# commands.sh fused|torch|documents: the sweeps of docs/gpu.md, each compared by `reproduce compare`; with fused also its
# tuning and its profile
source .ci/gpu/jobs/run.sh
settings=(experiment=compare/gpt2_small data=python_source data.tokenizer="$TOK" data.cache_dir="$CACHE" logger=none)
flash=flash attentions=naive,sdpa,flash steps=100 profiled=15
if [ -n "${TRY:-}" ]; then
  settings+=(model.n_layer=1 model.n_head=2 model.n_embd=32 model.seq_len=32 trainer.batch_tokens=64 trainer.micro_batch=2)
  settings+=(trainer.precision=fp32 data.limit_documents=40 data.workers=1)
  flash=naive attentions=naive,sdpa steps=4 profiled=3
fi
case $1 in
fused) sweep=(attention=$attentions) ;;
torch) sweep=(attention=$attentions model.loss=torch model.block=torch) ;;
documents) sweep=(attention=flash,sdpa,flex,fa4 data.document_mask=true); if [ -n "${TRY:-}" ]; then sweep[0]=attention=naive,sdpa; fi ;;
esac
run "runs/sweep/*" python train.py -m "${settings[@]}" "${sweep[@]}" trainer.steps=$steps hydra.sweep.dir=runs/sweep | tail -n 40
python -m reproduce compare runs/sweep/* --html "$JOB_OUT/compare.html" | tee "$JOB_OUT/compare.txt"
if [ "$1" = fused ]; then
  run runs/profiled python train.py "${settings[@]}" attention=$flash trainer.steps=$((profiled + 5)) \
    trainer.profile_step=$profiled hydra.run.dir=runs/profiled | tail -n 40
  if [ -z "${TRY:-}" ]; then python -m kernels.tune | tee "$JOB_OUT/tune.txt"; fi
fi
