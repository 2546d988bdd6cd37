#!/usr/bin/env bash
# Makes .venv from the lock of one profile: PROFILE=cpu (default) or PROFILE=gpu.
# Up to date already: returns within a second. Interrupted: the next run starts the environment anew.
#
#   scripts/install.sh                 install
#   scripts/install.sh --find-python   only print the Python 3.12 that would be used
#   PYTHON=/path/to/python3.12 ...     use that one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
  printf 'install: %s\n' "$1" >&2
  exit 1
}

# Prints the interpreter behind "$1" if that runs, is 3.12 and can make environments. Being on PATH and executable is not
# enough: a pyenv shim is both, may only answer "command not found", and hides a real one further down PATH.
python312() {
  "$1" -I -c 'import ensurepip, sys, venv
sys.version_info[:2] == (3, 12) or sys.exit(1)
print(sys._base_executable)' 2>/dev/null
}

find_python() {
  local candidate on_path
  if [[ -n ${PYTHON:-} ]]; then
    python312 "$PYTHON" || stop "PYTHON=$PYTHON is not a Python 3.12 with venv: set it to one, or unset it"
    return
  fi
  mapfile -t on_path < <(type -aP python3.12 python3)
  for candidate in "${on_path[@]}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    python312 "$candidate" && return
  done
  stop "no Python 3.12 with venv found: install it ('apt-get install python3.12-venv' or 'pyenv install 3.12'), or set PYTHON"
}

# Nothing of the caller's Python set-up may decide what is installed; where packages come from stays the caller's choice.
unset PYTHONHOME PYTHONPATH UV_CONSTRAINT UV_OVERRIDE UV_SYSTEM_PYTHON
export PIP_CONSTRAINT=/dev/null PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

if [[ ${1:-} == --find-python ]]; then
  find_python
  exit
fi

profile=${PROFILE:-cpu}
[[ $profile == cpu || $profile == gpu ]] || stop "PROFILE=$profile is unknown: use cpu or gpu"
lock=requirements/$profile.lock

stamp=.venv/.installed
wanted=$({ pwd && cat requirements/bootstrap.lock "$lock" pyproject.toml scripts/install.sh; } | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && .venv/bin/python -c ''; then
  exit
fi

python=$(find_python)
if [[ $profile == cpu ]]; then
  "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    stop "vLLM's CPU build needs libnuma.so.1: install it ('apt-get install libnuma1')"
fi

echo "install: making .venv for the $profile profile; the first time this downloads several gigabytes"
# Without its stamp an environment may be half of one, or somebody else's: start from nothing.
[[ -f $stamp ]] || "$python" -m venv --clear .venv
rm -f "$stamp"
.venv/bin/python -m pip install --quiet --require-hashes --requirement requirements/bootstrap.lock
# The lock also constrains what source distributions are built with.
.venv/bin/uv pip sync --python .venv/bin/python --require-hashes --build-constraints "$lock" "$lock"
.venv/bin/uv pip install --python .venv/bin/python --quiet --no-deps --no-build-isolation --editable .
printf '%s' "$wanted" >"$stamp"
