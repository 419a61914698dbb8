# The same kernels from every assembler there is (triton's ptxas, its ptxas-blackwell, nvcc's), in turns: A B C C B A
source .ci/gpu/jobs/verify.sh
bin=$(python -c 'import pathlib, triton; print(pathlib.Path(triton.__file__).parent / "backends/nvidia/bin")')
declare -A path=([own]=$bin/ptxas [blackwell]=$bin/ptxas-blackwell)
nvcc=$(command -v ptxas || echo /usr/local/cuda/bin/ptxas)
if [ -x "$nvcc" ]; then path[nvcc]=$nvcc; fi
names=(own blackwell ${path[nvcc]:+nvcc})
if [ -n "${TRY:-}" ]; then names=(own); fi
for name in "${names[@]}"; do echo "$name: $(${path[$name]} --version | grep -o 'release.*')"; done | tee "$JOB_OUT/assemblers.txt"
backwards=$(printf '%s\n' "${names[@]}" | tac)
turn=0
for name in "${names[@]}" $backwards; do
  turn=$((turn + 1))
  # A cache of its own, so that nothing that another one made is taken.
  TRITON_PTXAS_PATH=${path[$name]} TRITON_CACHE_DIR=$PWD/cache_$name bash .ci/gpu/jobs/race.sh ours $turn 60
  mv "$JOB_OUT/ours.$turn.json" "$JOB_OUT/$turn.$name.json"
done
python - "$JOB_OUT" <<'P'
import json, pathlib, statistics, sys
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("[0-9]*.json")):
    for sample in json.loads(path.read_text())["samples"]:
        for kernels, phases in sample["ms"].items():
            for phase, ms in phases.items():
                where = (kernels, sample["head_dim"], sample["length"], phase)
                found.setdefault(where, {}).setdefault(path.name.split(".")[1], []).append(statistics.median(ms))
print("time over that of triton's own ptxas, and the milliseconds of both processes")
for where, each in sorted(found.items()):
    own = statistics.mean(each["own"])
    print(*where, *(f"{name} {statistics.mean(ms) / own:.3f} {[round(x, 4) for x in ms]}" for name, ms in each.items()))
P
