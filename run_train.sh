#!/usr/bin/env bash
# Train: ./run_train.sh [--config NAME] [--section.key value ...]
#
# Sets up .venv on first use, then starts one process per GPU, or 2 gloo processes on a machine without one.
#
#   NPROC          processes on this machine
#   NNODES         machines (default 1, or SLURM_NNODES); then also, on each:
#   NODE_RANK      this machine's number from 0 (default SLURM_NODEID)
#   MASTER_ADDR    host name or address of machine 0, MASTER_PORT a free port there (default 29500)
#   MAX_RESTARTS   how often a failed job starts again by itself (default 0); with checkpoint.enable it resumes
#   MATRIXTITAN_PYTHON   the interpreter to build .venv with
#
# On several networks, NCCL_SOCKET_IFNAME (rendezvous, and data without InfiniBand) and GLOO_SOCKET_IFNAME (CPU traffic)
# name the interface to use, NCCL_IB_HCA the InfiniBand adapters. They are passed on as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup_env.sh
ensure_environment requirements.lock

for argument in "$@"; do
  case "$argument" in
    -h | --help | --print-config) exec "$PYTHON" train.py "$@" ;;
  esac
done
"$PYTHON" train.py "$@" --print-config >/dev/null # a mistake stops here, before any process starts

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
nproc="${NPROC:-$((gpus > 0 ? gpus : 2))}"
nnodes="${NNODES:-${SLURM_NNODES:-1}}"
if [ "$gpus" -eq 0 ]; then
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores
fi

if [ "$nnodes" -gt 1 ]; then
  : "${MASTER_ADDR:?set MASTER_ADDR to the host name of machine 0}"
  rendezvous=(
    --nnodes "$nnodes" --node-rank "${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK to the number of this machine}}"
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
  )
else
  if [ "$gpus" -eq 0 ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" # one machine: no need for its host name to resolve
  fi
  rendezvous=(--nnodes 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0) # port 0: any free one
fi

# exec: Ctrl-C and SIGTERM reach torchrun itself, which passes them on to every rank
exec "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$nproc" \
  --max-restarts "${MAX_RESTARTS:-0}" train.py "$@"
