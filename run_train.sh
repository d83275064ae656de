#!/usr/bin/env bash
# Train: ./run_train.sh [--config NAME] [--section.key value ...]     (--help lists every key)
#
# Sets up .venv on first use, then starts one process per GPU. A machine without a GPU gets 2 gloo
# processes.
#
#   NPROC          processes on this machine
#   NNODES         machines (default SLURM_NNODES, or 1); if more than one, then also, on each:
#   NODE_RANK      this machine's number from 0 (default SLURM_NODEID)
#   MASTER_ADDR    host name or address of machine 0 (default the first of the Slurm job)
#   MASTER_PORT    a free port there (default 29500)
#   MAX_RESTARTS   how often a failed job starts again by itself (default 0); it resumes with
#                  checkpoint.enable
#   MATRIXTITAN_PYTHON   the interpreter to build .venv with, in spite of an active environment
#
# On machines with several networks, NCCL_SOCKET_IFNAME (rendezvous, and data without InfiniBand)
# and GLOO_SOCKET_IFNAME (CPU traffic) name the interface to use, and NCCL_IB_HCA names the
# InfiniBand adapters. They are passed on unchanged. On SIGTERM the ranks save before they end;
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT (default 30) is the number of seconds that they have.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tools/setup_env.sh" # sets root
ensure_environment requirements.lock numpy tensorboard tiktoken tomli torchdata

for argument in "$@"; do
  case "$argument" in
    -h | --help | --print-config) exec "$PYTHON" "$root/train.py" "$@" ;;
  esac
done

gpus=0
# nvidia-smi first, since importing torch takes seconds; torch respects CUDA_VISIBLE_DEVICES
if nvidia-smi --list-gpus >/dev/null 2>&1; then
  gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
fi
# whole VALUE LOW HIGH: whether VALUE is a whole number in that range
whole() { [[ "$1" =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "$1" -ge "$2" ] && [ "$1" -le "$3" ]; }

nproc="${NPROC:-$((gpus > 0 ? gpus : 2))}"
whole "$nproc" 1 1024 ||
  fail "NPROC is '$nproc'; it must be a number of processes, from 1 to 1024"
[ "$gpus" -eq 0 ] || [ "$nproc" -le "$gpus" ] ||
  fail "NPROC is $nproc, but this machine has $gpus GPUs (as CUDA_VISIBLE_DEVICES allows): set" \
    "NPROC to at most $gpus"
if [ "$gpus" -eq 0 ]; then
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores
fi

nnodes="${NNODES:-${SLURM_NNODES:-1}}"
whole "$nnodes" 1 100000 ||
  fail "NNODES is '$nnodes'; it must be a number of machines, from 1 to 100000"
[ "${SLURM_LOCALID:-0}" -eq 0 ] ||
  fail "start one Slurm task per machine (--ntasks-per-node=1); it starts a process per GPU"
if [ "$nnodes" -gt 1 ]; then
  node_rank="${NODE_RANK:-${SLURM_NODEID:-}}"
  [ -n "$node_rank" ] || fail "NNODES is $nnodes: set NODE_RANK to this machine's number, from 0"
  whole "$node_rank" 0 $((nnodes - 1)) ||
    fail "NODE_RANK is '$node_rank'; it must be this machine's number, from 0 to $((nnodes - 1))"
  port="${MASTER_PORT:-29500}"
  whole "$port" 1 65535 ||
    fail "MASTER_PORT is '$port'; it must be a port that is free on machine 0, from 1 to 65535"
  if [ -z "${MASTER_ADDR:-}" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  fi
  [ -n "${MASTER_ADDR:-}" ] ||
    fail "NNODES is $nnodes: set MASTER_ADDR to the host name or address of machine 0"
  rendezvous=(
    --nnodes "$nnodes" --node-rank "$node_rank"
    --master-addr "$MASTER_ADDR" --master-port "$port"
  )
else
  if [ "$gpus" -eq 0 ]; then
    # on one machine the host name need not resolve
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
  fi
  # port 0: any free port
  rendezvous=(--nnodes 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1)
fi

max_restarts="${MAX_RESTARTS:-0}"
whole "$max_restarts" 0 1000000 ||
  fail "MAX_RESTARTS is '$max_restarts'; it must be a number of restarts, from 0 to 1000000"
if [ "$max_restarts" -ne 0 ]; then
  # After a restart, ranks must not find dead ranks' addresses in a store that outlived them, so the
  # ranks make a store of their own. Without restarts they share the launcher's store, because the
  # port of a second store may no longer be free when the ranks start.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
fi

# exec, so that Ctrl-C and SIGTERM reach torchrun itself, which passes them on to every rank
exec "$PYTHON" "$root/tools/launch.py" "${rendezvous[@]}" --nproc-per-node "$nproc" \
  --max-restarts "$max_restarts" "$root/train.py" "$@"
