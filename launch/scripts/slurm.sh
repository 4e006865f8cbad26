#!/usr/bin/env bash
# An example for Slurm: one task per node starts the ranks of that node.
#   sbatch launch/scripts/slurm.sh run --config deepseek_v3
#SBATCH --job-name=moe_runtime
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:15:00
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NODES=$SLURM_NNODES RENDEZVOUS="$first:29500" JOB=$SLURM_JOB_ID
# Slurm runs a copy of this script from its spool: the others are found from where sbatch was called.
here=${MOE_RUNTIME_LAUNCH:-$SLURM_SUBMIT_DIR/launch}/scripts
exec srun bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"' "$here/several_hosts.sh" "$@"
