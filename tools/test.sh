#!/usr/bin/env bash
# Check everything: lint, format, types, and the whole test suite. Arguments go to pytest instead of the defaults.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh
ensure_environment requirements-dev.lock
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -gt 0 ]; then
  exec "$PYTHON" -m pytest "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest --durations=15
