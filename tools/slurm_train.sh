#!/usr/bin/env bash
# Example, from the repository's folder: sbatch tools/slurm_train.sh --config llama_8b --training.steps 1000
#SBATCH --job-name=matrixtitan
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=TERM@120
# The signal comes 120 s before the time limit: with checkpoint.enable the run saves and ends well.
set -euo pipefail
# Slurm runs a copy of this script, in the folder where it was submitted.
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# One task a machine: each starts the processes of its GPUs. SLURM_NNODES and SLURM_NODEID say which machine it is.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100 # of those 120 s: what ranks have to finish their step and save
exec srun --kill-on-bad-exit=1 ./run_train.sh "$@"
