# perplexity.sh PARTS RUNS: runs of `python -m reproduce perplexity`, on from what results/ has of this card
source .ci/gpu/jobs/run.sh
# By relative paths: the settings that the results record name them.
ln -sfn "$TEXT" text; ln -sfn "$CODE" code; ln -sf "$TOK" gpt2.tiktoken; ln -sf "$TOK8K" gpt2_8k.tiktoken
mkdir -p data; ln -sfn "$CACHE" data/cache
words=(parts="$1" only="$2" "text=text/*.jsonl" "code=code/*.jsonl" tokenizer=gpt2.tiktoken code_tokenizer=gpt2_8k.tiktoken)
if [ -n "${TRY:-}" ]; then words+=(--tiny --device cpu); else words+=(--device cuda:0 --budget $((JOB_LIMIT - 40))s); fi
run "runs/perplexity/*" python -m reproduce perplexity "${words[@]}" --results results
