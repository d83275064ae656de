# Sourced by run_train.sh and tools/test.sh. Leaves $PYTHON: an interpreter that has the locked packages.
#
# ensure_environment LOCKFILE: uses an active environment that has torch as it is (clusters); otherwise builds .venv once,
# under a lock while others wait. The stamp is written last and holds the lock file's hash, so an interrupted set-up starts
# again, and a changed lock file is installed.

find_python() {
  local candidate
  for candidate in "${MATRIXTITAN_PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$candidate"
      return
    fi
  done
  echo "matrixtitan needs Python 3.11 or newer; set MATRIXTITAN_PYTHON to one" >&2
  return 1
}

ensure_environment() {
  local lock_file="$1" stamp wanted base
  if command -v python >/dev/null && python -c 'import torch' >/dev/null 2>&1; then
    PYTHON="$(command -v python)"
    python -c 'import numpy, tensorboard, tiktoken, tomli, torchdata' || {
      echo "the active environment ($PYTHON) has torch but lacks the package above: pip install it there" >&2
      return 1
    }
    return
  fi
  PYTHON="$PWD/.venv/bin/python"
  stamp=".venv/installed-$lock_file"
  wanted="$(cat requirements*.lock | sha256sum | cut -d' ' -f1)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  base="$(find_python)"
  (
    flock 9 # released when this subshell ends, however it ends
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
      exit 0
    fi
    echo "setting up .venv from $lock_file (first use, or the lock file changed) ..." >&2
    "$base" -c 'import venv' || { echo "python's venv module is missing (Debian: apt install python3-venv)" >&2; exit 1; }
    "$base" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$lock_file"
    echo "$wanted" >"$stamp"
  ) 9>.venv.lock
}
