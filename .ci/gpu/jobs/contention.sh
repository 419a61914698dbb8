how="--seconds 120"
if [ -n "${TRY:-}" ]; then export TRITON_INTERPRET=1; how="--device cpu --seconds 5"; fi
set -o pipefail
python -m tests.training.contention $how 2>&1 | grep -v Warning | tee "$JOB_OUT/contention.txt"
