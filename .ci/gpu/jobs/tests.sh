# tests.sh K/N|random|two|killed|stopped: a part of the GPU tests
source .ci/gpu/jobs/verify.sh
source .ci/gpu/jobs/end.sh
several=tests/training/test_parallel_gpu.py
gigabytes=$(python -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 30 if torch.cuda.is_available() else 0)')
workers=$((gigabytes > 100 ? 10 : 7))
case $1 in
*/*) export SHARD=$1 PYTHONPATH=$PWD/.ci/gpu/files:$PYTHONPATH; chosen=(-p shard tests) ;;
random) export TILEGPT_RANDOM_CASES=300; workers=14; chosen=(tests -k "random or class") ;; # compilers take the time
two) workers=0; chosen=($several tests/training/test_context.py tests/kernels/test_ring.py -k "not lost_rank") ;;
killed | stopped) workers=0; chosen=($several -k "lost_rank and $1") ;;
esac
mark=gpu
if [ -n "${TRY:-}" ]; then mark="not slow" workers=0 chosen=(${SHARD:+-p shard} tests/kernels/test_versions.py); fi
# The interrupt lets pytest name what failed, and the slowest.
timeout --foreground -s INT $((JOB_LIMIT - 20)) python -m pytest "${chosen[@]}" -p no:cacheprovider \
  -o addopts="--import-mode=importlib --strict-markers" -m "$mark" -n $workers --dist load --maxschedchunk 1 \
  -v -rs --tb=short -W ignore --continue-on-collection-errors --durations=40 \
  --junitxml="$JOB_OUT/tests.xml" > "$JOB_OUT/tests.txt" 2>&1
echo "pytest's status: $?"
grep -E "FAILED|ERROR" "$JOB_OUT/tests.txt" | cut -c1-200 | head -60
tail -n 3 "$JOB_OUT/tests.txt"
