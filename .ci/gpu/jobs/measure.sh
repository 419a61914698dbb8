# Sourced: `whole PACKAGE EXPERIMENT ...` measures an experiment, `slice ...` a part of it (files/slice.py). The documents come
# back every 20 s and at the end. A job that is queued again goes on.
export TORCHINDUCTOR_COMPILE_THREADS=8
mkdir -p "$JOB_OUT/results" out
if [ -n "${NANOGPT:-}" ]; then ln -sfn "$NANOGPT" nanoGPT; fi # so that results name no path of this machine
cp -r "$JOB_OUT/results/." out/
copy() { (cd out && find . -name '*.json' -exec cp --parents {} "$JOB_OUT/results/" \;); }
(while sleep 20; do copy; done) &
copier=$!
trap 'kill $copier; copy' EXIT
trap 'exit 143' TERM
tiny=${TRY:+--tiny}
whole() { python -m "$@" --results out --budget $((JOB_LIMIT - 40))s $tiny & wait $!; }
slice() { python .ci/gpu/files/slice.py "$@" --results out $tiny & wait $!; }
