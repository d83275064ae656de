#!/usr/bin/env bash
# From the repository's folder: sbatch tools/slurm_train.sh --config llama_8b --training.steps 1000
#SBATCH --job-name=matrixtitan
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=TERM@120
# The signal comes 120 s before the time limit. With checkpoint.enable the run then saves and ends.
set -euo pipefail
# Slurm runs a copy of this script, in the folder from which it was submitted.
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# One task per machine starts the processes of all its GPUs. SLURM_NNODES and SLURM_NODEID tell it
# which machine it is on.
# of the 120 s, the seconds in which ranks may finish their step and save
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
exec srun --kill-on-bad-exit=1 ./run_train.sh "$@"
