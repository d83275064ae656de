#!/usr/bin/env bash
# Check everything: lint, format, types, and the whole test suite. With arguments: pytest alone, with these.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/tools/setup_env.sh"
ensure_environment requirements-dev.lock test tools plots
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # many processes share the cores
if [ $# -gt 0 ]; then
  exec "$PYTHON" -m pytest "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest --durations=15
