#!/usr/bin/env bash
# Sets up everything that the demo and the tests need: the simulators' system libraries, and .venv with pinned versions.
# With everything in place it only looks, without the network. PYTHON names the interpreter of a new .venv; by default it is
# the first suitable one.
set -euo pipefail
cd "$(dirname "$0")/.."

EXTRAS=maniskill,libero,vla,dev,docs
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

# The pinned versions exist for these Pythons: NumPy's for 3.11 and newer, those of ManiSkill's planner up to 3.12.
is_suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if is_suitable "$candidate"; then
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
                fail "'$candidate' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 is needed, but ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 || true);" \
        "install one and name it: make setup PYTHON=/path/to/python3.12"
}

make_venv() {
    # An interrupted set-up leaves packages half-installed, which pip would take for installed: start again from nothing.
    if [[ -f $STATE && $(<"$STATE") == incomplete ]] || ! .venv/bin/python -c pass 2>/dev/null; then
        echo incomplete >"$STATE"
        find .venv -mindepth 1 -maxdepth 1 ! -name 'vla-async-*' -exec rm -rf {} +
        "$python" -m venv .venv
    fi
    echo incomplete >"$STATE"
    local quiet=(--quiet)
    [[ -t 1 ]] && quiet=()
    echo "setup: installing the Python packages into .venv (some minutes the first time)"
    .venv/bin/python -m pip install --disable-pip-version-check --no-input "${quiet[@]}" -c constraints.txt -e ".[$EXTRAS]"
    fingerprint >"$STATE.new"
    mv "$STATE.new" "$STATE"
}

# An interrupted set-up's own Python may be broken, so that one is not asked.
if [[ -f $STATE && $(<"$STATE") != incomplete ]] && .venv/bin/python -c pass 2>/dev/null; then
    python=.venv/bin/python
else
    python=$(find_python)
fi
"$python" -S scripts/system_libraries.py
if ! is_complete; then
    mkdir -p .venv
    exec 9>.venv/vla-async-lock # a second make waits here instead of taking the first one's .venv for a broken one
    if command -v flock >/dev/null; then flock 9; fi
    is_complete || make_venv
fi
