# tests.sh a|b|random|two|lost: a part of the GPU tests, those that tell most first, so that a cut loses the least
source .ci/gpu/jobs/verify.sh
source .ci/gpu/jobs/end.sh
kernels=(hopper_backward flash_random hopper_features hopper_sum documents decode masks)
a=("${kernels[@]/#/tests/kernels/test_}")
a=("${a[@]/%/.py}" tests/kernels/layers/test_*.py)
several=tests/training/test_parallel_gpu.py
workers=7
case $1 in
a) chosen=("${a[@]}") ;;
b) # where most tests need a GPU, then all other files with one that does
  chosen=(tests/kernels/test_flash_gpu.py tests/kernels/test_hopper_forward.py tests/training/test_gpu.py)
  for file in $(grep -rlE "mark\.gpu|DEVICE" tests --include="test_*.py" | sort); do
    [[ " ${a[*]} ${chosen[*]} $several " == *" $file "* ]] || chosen+=("$file")
  done ;;
random) export TILEGPT_RANDOM_CASES=300; workers=14; chosen=(tests -k "random or class") ;; # compilers take the time
two) workers=0; chosen=($several tests/training/test_context.py tests/kernels/test_ring.py -k "not lost_rank") ;;
lost) workers=0; chosen=($several -k lost_rank) ;;
esac
mark=gpu
if [ -n "${TRY:-}" ]; then mark="not slow" workers=0 chosen=(tests/kernels/test_versions.py); fi
# The interrupt lets pytest name what failed, and the slowest.
timeout --foreground -s INT $((JOB_LIMIT - 20)) python -m pytest "${chosen[@]}" -p no:cacheprovider \
  -o addopts="--import-mode=importlib --strict-markers" -m "$mark" -n $workers --dist load --maxschedchunk 1 \
  -v -rs --tb=short -W ignore --continue-on-collection-errors --durations=40 \
  --junitxml="$JOB_OUT/tests.xml" > "$JOB_OUT/tests.txt" 2>&1
echo "pytest's status: $?"
grep -E "FAILED|ERROR" "$JOB_OUT/tests.txt" | cut -c1-200 | head -60
tail -n 3 "$JOB_OUT/tests.txt"
