#!/usr/bin/env bash
# Runs a program of moe_runtime over several hosts; started once on each of them, with the same arguments but NODE_RANK:
#   NODES=2 NODE_RANK=0 RENDEZVOUS=host0:29500 launch/scripts/several_hosts.sh run --config deepseek_v3
#   NODES=2 NODE_RANK=1 RENDEZVOUS=host0:29500 launch/scripts/several_hosts.sh run --config deepseek_v3
# Ranks of several hosts use the transport `hierarchical`: NVLink inside a host, NCCL between hosts.
# The backend is static, since torchrun's c10d unpickles what it finds in its store.
set -euo pipefail
program=${1:?usage: NODES=N NODE_RANK=i RENDEZVOUS=host:port [RANKS=n] several_hosts.sh run|bench|doctor [its options]}
shift
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
: "${NODES:?how many hosts}" "${NODE_RANK:?which of them this is, from 0}" "${RENDEZVOUS:?host:port of the first}"
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes="$NODES" --node-rank="$NODE_RANK" \
    --nproc-per-node="$ranks" --rdzv-backend=static --rdzv-endpoint="$RENDEZVOUS" --rdzv-id="${JOB:-moe_runtime}" \
    -m "moe_runtime.launch.$program" "$@"
