#!/usr/bin/env bash
# Example: sbatch tools/slurm_train.sh --config llama_8b --training.steps 1000
#SBATCH --job-name=matrixtitan
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=TERM@120
set -euo pipefail
# `sbatch` runs a copy of this script elsewhere; the job's working directory is where it was submitted.
export MASTER_ADDR MASTER_PORT=29500
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# One task a machine; each starts the processes of its GPUs. SLURM_NNODES and SLURM_NODEID say which machine it is.
exec srun --kill-on-bad-exit=1 ./run_train.sh "$@"
