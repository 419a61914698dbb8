# race.sh PART SEED [SECONDS]: files/race.py; after a kernel that hangs or breaks the CUDA context, on with the others
if [ -n "${TRY:-}" ]; then export TRITON_INTERPRET=1; fi
end=$(($(date +%s) + ${3:-$JOB_LIMIT - 25}))
for _ in 1 2 3 4 5; do
  python .ci/gpu/files/race.py "$1" "$2" $end
  status=$?
  if [ $status != 77 ]; then break; fi
done
exit $status
