#!/usr/bin/env bash
# Sets up everything that the demo and the tests need: the simulators' system libraries, and .venv with pinned versions.
# With everything in place it only looks, without the network. PYTHON chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
EXTRAS=maniskill,libero,dev,docs
STATE=.venv/vla-async-setup # "incomplete" while .venv is being made, then the fingerprint of what it was made from

fail() {
    echo "setup: $*" >&2
    exit 1
}

fingerprint() {
    { pwd && cat pyproject.toml constraints.txt scripts/setup.sh; } | cksum
}

is_complete() {
    [[ -f $STATE && $(<"$STATE") == "$(fingerprint)" ]] && .venv/bin/python -c pass 2>/dev/null
}

check_python() {
    command -v "$PYTHON" >/dev/null || fail "there is no '$PYTHON'; install Python 3.10 or newer, or name one: make PYTHON=python3.11 ..."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "'$PYTHON' is $("$PYTHON" --version 2>&1); Python 3.10 or newer is needed: make PYTHON=python3.11 ..."
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$PYTHON' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
}

make_venv() {
    # An interrupted set-up leaves packages half-installed, which pip would take for installed: start again from nothing.
    if [[ -f $STATE && $(<"$STATE") == incomplete ]] || ! .venv/bin/python -c pass 2>/dev/null; then
        check_python
        mkdir -p .venv
        echo incomplete >"$STATE"
        find .venv -mindepth 1 -maxdepth 1 ! -name 'vla-async-*' -exec rm -rf {} +
        "$PYTHON" -m venv .venv
    fi
    echo incomplete >"$STATE"
    local quiet=(--quiet)
    [[ -t 1 ]] && quiet=()
    echo "setup: installing the Python packages into .venv (some minutes the first time)"
    .venv/bin/python -m pip install --disable-pip-version-check --no-input "${quiet[@]}" -c constraints.txt -e ".[$EXTRAS]"
    fingerprint >"$STATE.new"
    mv "$STATE.new" "$STATE"
}

if .venv/bin/python -c pass 2>/dev/null; then
    python=.venv/bin/python
else
    check_python
    python=$PYTHON
fi
"$python" -S scripts/system_libraries.py
if ! is_complete; then
    mkdir -p .venv
    exec 9>.venv/vla-async-lock # a second make waits here instead of taking the first one's .venv for a broken one
    if command -v flock >/dev/null; then flock 9; fi
    is_complete || make_venv
fi
