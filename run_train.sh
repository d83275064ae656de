#!/usr/bin/env bash
# Train: ./run_train.sh [--config NAME] [--section.key value ...]
#
# Sets up .venv on first use, then starts one process per GPU, or 2 gloo processes on a machine without one.
# --help lists every key of the config, --print-config prints what a command line comes to; neither trains.
#
#   NPROC          processes on this machine (default: one per visible GPU, or 2)
#   NNODES         machines (default: those of the Slurm job, or 1); where more than 1, on each of them also
#   NODE_RANK      this machine's number from 0 (default: Slurm's)
#   MASTER_ADDR    host name or address of machine 0 (default: the first of the Slurm job)
#   MASTER_PORT    a free port there (default 29500)
#   MAX_RESTARTS   how often a failed job starts again by itself (default 0); with checkpoint.enable it resumes
#   MATRIXTITAN_PYTHON   the interpreter to build .venv with, in spite of an active environment
#
# Passed on as they are, for machines with several networks: NCCL_SOCKET_IFNAME names the interface of NCCL's rendezvous
# (and of its data, without InfiniBand), NCCL_IB_HCA the InfiniBand adapters, GLOO_SOCKET_IFNAME the interface of CPU
# traffic. If ranks cannot find each other, `ip -br addr` lists the names; NCCL_DEBUG=INFO says what NCCL chose.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # paths in arguments stay relative to where the user is
source "$ROOT/tools/setup_env.sh"
ensure_environment requirements.lock

for argument in "$@"; do
  case "$argument" in
    -h | --help | --print-config) exec "$PYTHON" "$ROOT/train.py" "$@" ;;
  esac
done
"$PYTHON" "$ROOT/train.py" "$@" --print-config >/dev/null # a mistake stops here, before any process starts

gpus=0
if command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ]; then
  gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" # heeds CUDA_VISIBLE_DEVICES
fi
nproc="${NPROC:-$((gpus > 0 ? gpus : 2))}"
if [ "$gpus" -eq 0 ]; then
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores
fi

nnodes="${NNODES:-${SLURM_NNODES:-1}}"
if [ "$nnodes" -gt 1 ]; then
  if [ -z "${MASTER_ADDR:-}" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  fi
  node_rank="${NODE_RANK:-${SLURM_NODEID:-}}"
  : "${node_rank:?set NODE_RANK to the number of this machine, from 0 (or start with srun, one task a machine)}"
  : "${MASTER_ADDR:?set MASTER_ADDR to the host name or address of machine 0}"
  rendezvous=(--nnodes "$nnodes" --node-rank "$node_rank" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
  # loopback, and port 0: any free one. So the host name need not resolve, and several runs fit on one machine.
  rendezvous=(--nnodes 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1)
  if [ -e /sys/class/net/lo ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
  fi
fi

# exec: Ctrl-C and SIGTERM reach torchrun itself, which passes them on to every rank
exec "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$nproc" \
  --max-restarts "${MAX_RESTARTS:-0}" "$ROOT/train.py" "$@"
