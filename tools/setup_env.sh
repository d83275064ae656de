# Sourced by run_train.sh and tools/test.sh, which set $ROOT. Leaves $PYTHON: an interpreter with the needed packages.
#
# ensure_environment LOCK_FILE [EXTRA ...]
#   An active environment that has torch is used as it is (clusters), if it has the dependencies and extras that
#   pyproject.toml names. Otherwise .venv is built from LOCK_FILE, by one process while others wait. What it was built
#   from is written last: an interrupted set-up starts clean, and a changed lock file is installed.
#   MATRIXTITAN_PYTHON names the interpreter to build .venv with, and builds it whatever environment is active.

ensure_environment() {
  local lock_file="$1" active
  shift
  if [ -z "${MATRIXTITAN_PYTHON:-}" ] && active="$(active_python_with_torch)"; then
    PYTHON="$active"
    "$PYTHON" "$ROOT/tools/check_environment.py" "$@"
    return
  fi
  PYTHON="$ROOT/.venv/bin/python"
  if ! is_installed "$lock_file"; then
    build_venv "$lock_file"
  fi
}

active_python_with_torch() {
  local candidate
  for candidate in python python3; do
    if "$candidate" -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

lock_hash() {
  cat "$ROOT"/requirements*.lock | sha256sum | cut -d' ' -f1
}

is_installed() { # LOCK_FILE; the development lock holds everything of the other one
  local name
  [ -x "$ROOT/.venv/bin/python" ] || return 1
  for name in "$1" requirements-dev.lock; do
    if [ "$(cat "$ROOT/.venv/installed-$name" 2>/dev/null)" = "$(lock_hash)" ]; then
      return
    fi
  done
  return 1
}

find_python() {
  local candidate
  for candidate in ${MATRIXTITAN_PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  echo "matrixtitan needs Python 3.11 or newer, and ${MATRIXTITAN_PYTHON:-none on PATH} is;" \
    "install one, or set MATRIXTITAN_PYTHON to its path" >&2
  return 1
}

build_venv() ( # LOCK_FILE; a subshell: the lock is released when it ends, however it ends
  set -euo pipefail
  lock_file="$1"
  venv="$ROOT/.venv"
  base="$(find_python)"
  flock 9
  if is_installed "$lock_file"; then
    exit 0 # by the process that we waited for
  fi
  if [ -e "$venv/unfinished" ] || { [ -e "$venv" ] && ! [ -x "$venv/bin/python" ]; }; then
    echo "an earlier set-up of .venv was interrupted, or its Python is gone: starting clean" >&2
    rm -rf "$venv"
  fi
  echo "setting up .venv from $lock_file with $base (first use, or a lock file changed) ..." >&2
  mkdir -p "$venv"
  touch "$venv/unfinished"
  rm -f "$venv"/installed-*
  if ! [ -x "$venv/bin/python" ]; then
    "$base" -c 'import venv, ensurepip' ||
      { echo "$base lacks the module above, which makes virtual environments (Debian: apt install python3-venv)" >&2; exit 1; }
    "$base" -m venv "$venv"
  fi
  quiet=()
  [ -t 2 ] || quiet=(--quiet) # progress bars are for terminals
  "$venv/bin/python" -m pip install "${quiet[@]}" --no-input --disable-pip-version-check -r "$ROOT/$lock_file" >&2
  lock_hash >"$venv/installed-$lock_file"
  rm "$venv/unfinished"
) 9>"$ROOT/.venv.lock"
