# Preparing text beside nanoGPT. It needs thousands of documents: pieces as long as OpenWebText's.
mkdir -p parquet
python - <<'P'
import json, os, pathlib
import pyarrow, pyarrow.parquet
most, length = (10**6, 150) if os.environ.get("TRY") else (60 * 10**6, 5000)
text = ""
for file in sorted(pathlib.Path(os.environ["TEXT"]).glob("*.jsonl")):
    for line in file.open():
        if len(text) < most:
            text += json.loads(line)["text"]
texts = [text[at : at + length] for at in range(0, most, length)]
for n in range(8):
    table = pyarrow.table({"text": texts[n::8]})
    pyarrow.parquet.write_table(table, f"parquet/{n:05d}.parquet", row_group_size=1000)
P
cores=0-15
if [ "$(nproc)" -lt 16 ]; then cores=0-1; fi
taskset -c $cores python -m benchmarks preparation --tokenizer "$TOK" ${NANOGPT:+--nanogpt "$NANOGPT"} --parquet parquet \
  --repeats $((${TRY:+-2} + 3)) --output "$JOB_OUT/prepare.json"
