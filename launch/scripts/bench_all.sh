#!/usr/bin/env bash
# Runs every benchmark on the GPUs of this host, one after the other, and writes JSON, a trace and plots to FOLDER:
#   launch/scripts/bench_all.sh FOLDER
#   PARTS="layer trace plot" RANKS=8 TOKENS="8 128 4096" FORMATS="nvfp4 fp8_block" STEPS=6 launch/scripts/bench_all.sh FOLDER
# A part that fails or takes longer than LIMIT is named at the end, and the others run all the same.
set -uo pipefail
folder=${1:?usage: bench_all.sh FOLDER}
[ -d "$folder" ] || { echo "bench_all: no folder $folder" >&2; exit 2; }
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
default=1; for ((n = 2; n < gpus; n *= 2)); do default+=" $n"; done; ((gpus > 1)) && default+=" $gpus"
PARTS=${PARTS:-links layer few_sms trace gemm ops plot} RANKS=${RANKS:-$default} CONFIG=${CONFIG:-deepseek_v3}
TOKENS=${TOKENS:-1 8 32 128 512 1024 4096 8192} FORMATS=${FORMATS:-nvfp4 fp8_block bf16}
COMBINE_FORMATS=${COMBINE_FORMATS:-bf16 fp8_block} ROUTINGS=${ROUTINGS:-uniform zipf half one}
STEPS=${STEPS:-20} LIMIT=${LIMIT:-3600}
most=${RANKS##* } failed=() child=
trap '[ -z "$child" ] || kill "$child"; exit 143' TERM INT

run() {  # name of the part, files that it writes (removed before), ranks, program and arguments
  local part=$1 files=$2 ranks=$3 start=("${PYTHON:-python3}")
  shift 3
  [[ " $PARTS " == *" $part "* ]] || return 0
  ((ranks == 1)) || start+=(-m torch.distributed.run --standalone "--nproc-per-node=$ranks")
  for file in $files; do rm -f "$folder/$file"; done
  echo "\$ $* ($ranks ranks)"
  timeout "$LIMIT" "${start[@]}" -m "moe_runtime.launch.$1" "${@:2}" & child=$!
  wait "$child" || failed+=("$part: $* (exit code $?)")
  child=
}

((most == 1)) || run links links.json "$most" research.link_bench --json "$folder/links.json"
best='import json, sys; print(max(result["gb_per_s"] for result in json.load(open(sys.argv[1]))["results"]))'
links=(); [ -f "$folder/links.json" ] &&
  links=(--link-gb-per-s "$("${PYTHON:-python3}" -c "$best" "$folder/links.json")")
over=(--config "$CONFIG" --formats $FORMATS "${links[@]}")
for n in $(tr ' ' '\n' <<< "$RANKS" | tac); do
  operations=(dispatch combine layer); ((n == 1)) && operations=(layer)
  routings=(); [ "$n" = "$most" ] && routings=(--routing $ROUTINGS)
  run layer "layer_$n.json" "$n" bench "${operations[@]}" "${over[@]}" --tokens $TOKENS \
      --combine-format $COMBINE_FORMATS "${routings[@]}" --steps "$STEPS" --json "$folder/layer_$n.json"
done
((most == 1)) || run few_sms few_sms.json "$most" bench dispatch combine "${over[@]}" --tokens 4096 --num-sms 16 \
    --steps "$STEPS" --json "$folder/few_sms.json"
run trace "trace.json phases.json" "$most" bench layer "${over[@]}" --tokens $TOKENS --trace "$folder/trace.json" \
    --json "$folder/phases.json"
run gemm gemm.json 1 kernel_bench gemm --steps "$STEPS" --json "$folder/gemm.json"
run ops ops.json 1 kernel_bench ops --steps "$STEPS" --json "$folder/ops.json"
plotted=(); for file in "$folder"/layer_*.json "$folder/phases.json" "$folder/gemm.json"; do
  [ -f "$file" ] && plotted+=("$file"); done
run plot "" 1 report plot "${plotted[@]}" --folder "$folder"
((${#failed[@]} == 0)) || { printf 'FAILED %s\n' "${failed[@]}"; exit 1; }
