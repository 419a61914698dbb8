# Two GPUs: where the exchange of gradients beside CUDA graphs loses time (files/exchange.py)
source .ci/gpu/jobs/end.sh
settings=(model=gpt2_small trainer.batch_tokens=131072 trainer.micro_batch=16)
if [ -n "${TRY:-}" ]; then
  settings=(model=nano model.n_layer=2 model.seq_len=64 trainer.batch_tokens=1024 trainer.micro_batch=2 trainer.device=cpu)
  settings+=(attention=naive data.workers=1 data.limit_documents=20)
fi
python -m torch.distributed.run --standalone --nproc_per_node=2 .ci/gpu/files/exchange.py "$(mktemp -d)" \
  $((JOB_LIMIT - 60)) "${settings[@]}"
