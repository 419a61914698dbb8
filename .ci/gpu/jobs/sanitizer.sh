# compute-sanitizer over the cases of tests.kernels.sanitizer, in six processes. First without it, which fills the caches
# and says what fails by itself.
if [ -n "${TRY:-}" ]; then echo "needs a GPU"; exit; fi
mapfile -t names < <(python -c 'from tests.kernels.sanitizer import cases; print(*cases(), sep="\n")')
share=$(((${#names[@]} + 5) / 6))
together() { # a name, then what the program runs under
  label=$1; shift
  for ((at = 0; at < ${#names[@]}; at += share)); do
    "$@" python -m tests.kernels.sanitizer "${names[@]:at:share}" > "$JOB_OUT/$label.$at.txt" 2>&1 &
  done
  wait
  ran=$(cat "$JOB_OUT/$label".*.txt | grep -cxFf <(printf '%s\n' "${names[@]}"))
  echo "$label: $ran of ${#names[@]} cases were run"
  grep -hE "ERROR SUMMARY|Error:|Invalid" "$JOB_OUT/$label".*.txt | sort | uniq -c
  if [ "$ran" != ${#names[@]} ] || grep -qE "ERROR SUMMARY: [1-9]" "$JOB_OUT/$label".*.txt; then failed=1; fi
}
failed=$((${#names[@]} == 0)) # nothing to run: they could not be imported
together plain
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
together memcheck compute-sanitizer --tool memcheck
exit $failed
