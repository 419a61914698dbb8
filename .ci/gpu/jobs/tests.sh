# tests.sh a|b|flash 1/2|random|class|two: a part of the GPU tests; flash: its kernels alone, such a shard of them
source .ci/gpu/jobs/verify.sh
source .ci/gpu/jobs/end.sh
export PYTHONPATH=$PWD/.ci/gpu/files:$PYTHONPATH # shard.py
gigabytes=$(python -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 30 if torch.cuda.is_available() else 0)')
mark=gpu
export TORCHINDUCTOR_COMPILE_THREADS=4 # of each worker
# The interrupt lets pytest name what failed, and the slowest.
tests() { # a name, the number of workers, then pytest's own
  name=$1 workers=$2; shift 2
  if [ -n "${TRY:-}" ]; then mark="not slow" workers=0; set -- tests/kernels/test_versions.py ${SHARD:+-p shard}; fi
  timeout --foreground -s INT $((JOB_LIMIT - 20)) python -m pytest "$@" -p no:cacheprovider \
    -o addopts="--import-mode=importlib --strict-markers" -m "$mark" -n $workers --dist load --maxschedchunk 1 \
    -v -rs --tb=short -W ignore --continue-on-collection-errors --durations=40 \
    --junitxml="$JOB_OUT/$name.xml" > "$JOB_OUT/$name.txt" 2>&1
  status=$?
  echo "$name: pytest's status: $status"
  grep -E "FAILED|ERROR" "$JOB_OUT/$name.txt" | cut -c1-200 | head -30
  tail -n 1 "$JOB_OUT/$name.txt"
  return $status
}
several=tests/training/test_parallel_gpu.py
case $1 in
a | b) # four eighths beside each other: compilers and imports take the time, not the GPU
  first=1; if [ "$1" = b ]; then first=5; fi
  for part in 0 1 2 3; do
    SHARD=$((first + part))/8 tests "$((first + part))" $((gigabytes > 100 ? 6 : 2)) -p shard tests &
  done ;;
flash)
  flash=(tests/kernels/test_{flash*,hopper*,documents,library*,registry,history,in_torch_gpu}.py)
  SHARD=$2 tests "${2%/*}" $((gigabytes > 100 ? 12 : 7)) -p shard "${flash[@]}" & ;;
random) export TILEGPT_RANDOM_CASES=300; tests random 14 tests -k random & ;;
class) tests class 8 tests/kernels/test_library_gpu.py -k class & ;;
two) # beside each other: compilers take the time, and what is killed or stopped waits
  tests layouts 0 $several -k "layout or share" &
  tests bits 0 $several -k "bits or bitwise" &
  tests killed 0 $several -k "lost_rank and killed" &
  tests stopped 0 $several -k "lost_rank and stopped" &
  tests ring 0 tests/training/test_context.py tests/kernels/test_ring.py & ;;
esac
failed=0
for each in $(jobs -p); do wait "$each" || failed=1; done
exit $failed
