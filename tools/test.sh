#!/usr/bin/env bash
# Check everything: lint, format, types, then the whole test suite. With arguments: only pytest, with those.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$root"
ensure_environment requirements-dev.lock numpy tensorboard tiktoken tomli torchdata pytest pytest_timeout hypothesis \
  ruff mypy transformers tokenizers safetensors
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -gt 0 ]; then
  exec "$PYTHON" -m pytest "$@"
fi
status=0
"$PYTHON" -m ruff check . || status=1
"$PYTHON" -m ruff format --check . || status=1
"$PYTHON" -m mypy || status=1
"$PYTHON" -m pytest --durations=15 </dev/null || status=1 # last, so that its summary closes the output
exit "$status"
