# scaling.sh 1|2|4|8|long_1|long_2|long_4|long_8|whole_4|whole_8: `python -m benchmarks scaling`, a file for each launch; merge.py joins them.
# As many steps of a model everywhere: losses then compare.
source .ci/gpu/jobs/end.sh
scale() { # a name, then the command's own
  name=$1; shift
  python -m benchmarks scaling --out "$JOB_OUT/$name.json" "$@"
  status=$?
  if [ $status != 0 ]; then failed=1; fi
  echo "$name: status $status at $(date -u +%H:%M:%S)"
}
failed=0
if [ -n "${TRY:-}" ]; then
  scale small --gpus 2 --models tiny --layouts full --steps 2 -- trainer.device=cpu attention=naive data.workers=1
  exit $failed
fi
case $1 in
1)
  scale small --gpus 1 --models small --steps 15 --minutes 2
  scale long --gpus 1 --models 32k 64k 128k --steps 6 --minutes 2.5
  scale xl --gpus 1 --models xl --steps 5 --minutes 3.5 ;;
2)
  layouts=("whole, CUDA graphs" whole full optimizer "whole, CUDA graphs, bf16 gradients")
  scale small --gpus 2 --models small --layouts "${layouts[@]}" --steps 15 --minutes 3
  scale xl --gpus 2 --models xl --layouts full "full, blocks again" "whole, CUDA graphs" --steps 5 --minutes 4.2
  scale 7b --gpus 2 --models 7b --layouts "full, blocks again" --steps 4 --minutes 3.7 ;; # its weights take a minute
4)
  scale small --gpus 4 --models small --layouts "whole, CUDA graphs" full --steps 15 --minutes 1.3
  scale parts --gpus 4 --models xl 7b --layouts full "full, blocks again" --steps 5 --minutes 2.8 ;;
8)
  scale small --gpus 8 --models small --layouts "whole, CUDA graphs" full --steps 15 --minutes 1.9
  scale xl --gpus 8 --models xl --layouts full "full, blocks again" --steps 5 --minutes 2
  scale 7b --gpus 8 --models 7b --layouts "full, blocks again" --steps 5 --minutes 2 ;;
whole_*) # two minutes were not enough to compile it on four
  scale whole --gpus ${1#whole_} --models xl --layouts "whole, CUDA graphs" --steps 5 --minutes 4.5 ;;
long_1) scale long --gpus 1 --models 256k --steps 6 --minutes 4.5 ;;
long_2) scale long --gpus 2 --models 32k 64k 128k --steps 6 --minutes 8 ;;
long_4 | long_8)
  layouts=("context, keys gathered, CUDA graphs" context "context, keys gathered" "context, CUDA graphs")
  scale long --gpus ${1#long_} --models 32k 64k 128k 256k --layouts "${layouts[@]}" --steps 6 --minutes 8.5 ;;
esac
exit $failed
