# Sourced: `run FOLDERS COMMAND ...` runs a command and brings back, every 15 s and at the end, the small files of the runs
# in FOLDERS (a pattern) and the results that it wrote.
began=$(mktemp)
keep() {
  for each in $folders; do
    for file in "$each"/{metrics.csv,facts.json,summary.json,sample.txt,config.yaml,environment.json}; do
      if [ -e "$file" ]; then cp --parents "$file" "$JOB_OUT/"; fi
    done
  done
  find results -newer "$began" -name "*.json" -exec cp --parents {} "$JOB_OUT/" \;
}
run() {
  folders=$1; shift
  "$@" &
  child=$!
  trap 'kill $child 2> /dev/null; sleep 8; keep; exit 143' TERM # a run saves itself; the runner waits for 20 s
  while kill -0 $child 2> /dev/null; do
    for _ in {1..15}; do kill -0 $child 2> /dev/null && sleep 1; done
    keep
  done
  wait $child
}
