#!/usr/bin/env bash
# Runs a program of moe_runtime with one rank per GPU of this host (or RANKS ranks, where there is no GPU):
#   launch/scripts/one_host.sh run --config deepseek_v3 --format nvfp4
#   RANKS=4 launch/scripts/one_host.sh bench layer --config tiny_cpu
set -euo pipefail
program=${1:?usage: [RANKS=N] one_host.sh run|bench|doctor [its options]}
shift
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node="$ranks" \
    -m "moe_runtime.launch.$program" "$@"
