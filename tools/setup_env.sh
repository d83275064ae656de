# Sourced by run_train.sh and tools/test.sh. Leaves $PYTHON: an interpreter that has the packages.
#
# ensure_environment LOCK_FILE MODULE...
#
# An active environment that has torch is used as it is (clusters), and must have the modules.
# Nothing is installed into it. Without one, or if MATRIXTITAN_PYTHON names an interpreter, .venv is
# built once, under a lock while other processes wait. Its stamp, .venv/installed, holds the hashes
# of the lock files and of pyproject.toml, so that a changed file is installed. The stamp is written
# last, so that an interrupted set-up starts again from nothing.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
  echo "matrixtitan: $*" >&2
  exit 2
}

find_python() {
  local candidate
  for candidate in "${MATRIXTITAN_PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
    if [ -n "$candidate" ] && [ "$candidate" = "${MATRIXTITAN_PYTHON:-}" ]; then
      fail "MATRIXTITAN_PYTHON is $candidate, which is no Python 3.11 or newer"
    fi
  done
  fail "no Python 3.11 or newer found; install one, or set MATRIXTITAN_PYTHON to its path"
}

find_active_python() {
  local candidate
  for candidate in python python3; do
    if "$candidate" -c 'from importlib.util import find_spec; exit(find_spec("torch") is None)' \
      2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

check_active_environment() {
  "$PYTHON" - "$@" <<'PROGRAM' || fail "the active environment ($PYTHON) has torch, so it is" \
    "used, but it lacks the packages named above: install them there, or set" \
    "MATRIXTITAN_PYTHON=python3.11 to build .venv instead"
import importlib.metadata, importlib.util, sys
lacks = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if sys.version_info < (3, 11):
    lacks.insert(0, "python >= 3.11 (it is %d.%d)" % sys.version_info[:2])
version = importlib.metadata.version("torch")
if tuple(int(part) for part in version.split(".")[:2]) < (2, 11):
    lacks.insert(0, "torch >= 2.11 (it is %s)" % version)
if lacks:
    sys.exit("missing: " + ", ".join(lacks))
PROGRAM
}

# is_set_up WANTED: every line of WANTED is in the stamp
is_set_up() {
  local stamp="$root/.venv/installed"
  [ -x "$PYTHON" ] && [ -f "$stamp" ] && ! grep -qvxFf "$stamp" <<<"$1"
}

ensure_environment() {
  local lock_file="$1" packages ours base
  shift
  if [ -z "${MATRIXTITAN_PYTHON:-}" ] && PYTHON="$(find_active_python)"; then
    check_active_environment "$@"
    return
  fi
  PYTHON="$root/.venv/bin/python"
  # the lock file with the tools includes the other one, so either way that is installed
  packages="$(cd "$root" && for file in requirements.lock "$lock_file"; do sha256sum "$file"; done)"
  # with the whole path, so that a clone that was moved is installed again
  ours="$(sha256sum "$root/pyproject.toml")"
  if is_set_up "$packages"$'\n'"$ours"; then
    return
  fi
  base="$(find_python)"
  ( # the lock is released when this subshell ends, after errors too
    flock --nonblock 9 || {
      echo "waiting for another process that sets up .venv ..." >&2
      flock 9
    }
    is_set_up "$packages" || build_environment "$base" "$lock_file" "$packages"
    is_set_up "$ours" || install_this_clone "$ours"
  ) 9>"$root/.venv.lock"
}

build_environment() {
  local base="$1" lock_file="$2" packages="$3" clear=--clear
  cd "$root"
  echo "setting up .venv from $lock_file (first use, or the file changed): takes minutes ..." >&2
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$base lacks the venv module (on Debian and Ubuntu: apt install python3-venv)"
  if [ -f .venv/installed ] && [ -x "$PYTHON" ]; then
    clear= # it is complete, so only the differences are installed
  fi
  rm -f .venv/installed
  "$base" -m venv $clear .venv
  install -r "$lock_file" ||
    fail "pip could not install $lock_file (see above); run this again, or activate an" \
      "environment with torch"
  echo "$packages" >.venv/installed
}

# The package itself, editable, for `matrixtitan NAME`. Takes seconds and no network.
install_this_clone() {
  install --no-deps --no-build-isolation --no-index --editable "$root" ||
    fail "pip could not install the package of $root into .venv (see above); delete .venv and" \
      "run this again"
  echo "$1" >>"$root/.venv/installed"
}

install() {
  local quiet=--quiet # progress bars are for terminals
  [ ! -t 2 ] || quiet=
  "$PYTHON" -m pip install $quiet --no-input --disable-pip-version-check "$@"
}
