#!/usr/bin/env bash
# Check lint, format and types, then run the whole test suite. With arguments, run pytest alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$root"
ensure_environment requirements-dev.lock numpy tensorboard tiktoken tomli torchdata pytest \
  pytest_timeout hypothesis ruff mypy transformers tokenizers safetensors build \
  pyproject_hooks setuptools
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -gt 0 ]; then
  exec "$PYTHON" -m pytest "$@"
fi
status=0
"$PYTHON" -m ruff check . || status=1
"$PYTHON" -m ruff format --check . || status=1
"$PYTHON" -m mypy || status=1
# last, so that its summary ends the output
"$PYTHON" -m pytest --durations=15 </dev/null || status=1
exit "$status"
