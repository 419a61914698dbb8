# Sourced: when a job ends, nothing that it started is left on a GPU. torchrun's ranks have sessions of their own, which
# the runner's signals do not reach.
end() {
  for each in /proc/[0-9]*; do
    pid=${each#/proc/}
    if [ "$pid" = $$ ] || [ "$pid" = $PPID ] || [ "$pid" = $BASHPID ]; then continue; fi
    if grep -qzx "JOB_OUT=$JOB_OUT" "$each/environ"; then kill -9 "$pid"; fi
  done 2> /dev/null
}
trap end EXIT
trap 'exit 143' TERM
export OMP_NUM_THREADS=8 TORCHINDUCTOR_COMPILE_THREADS=8 PYTHONPATH=$PWD:${PYTHONPATH:-} NCCL_DEBUG=WARN
if [ -n "${TRY:-}" ]; then export OMP_NUM_THREADS=1; fi
