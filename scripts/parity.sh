#!/usr/bin/env bash
# Compares our policies with LeRobot's, see docs/parity.md. Makes LeRobot's environment the first time (.parity-venv).
# PARITY_PYTHON names its Python, 3.12 or 3.13, which LeRobot 0.6 needs.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.parity-venv
STATE=$VENV/parity-setup    # the fingerprint of what it was made from
LEROBOT_04=$VENV/lerobot-0.4 # packages that stand in front of those of $VENV for GR00T
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error CUDA_VISIBLE_DEVICES=

fingerprint() {
    { pwd && cat scripts/parity/requirements*.txt; } | cksum
}

find_python() {
    local candidate
    for candidate in ${PARITY_PYTHON:-python3.12 python3.13 "$HOME"/.pyenv/versions/3.12*/bin/python3 python3}; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "parity: LeRobot needs Python 3.12 or 3.13; install one and name it: make parity PARITY_PYTHON=/path/to/python3.12" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    rm -f "$STATE"
    "$python" -m venv --clear "$VENV"
    echo "parity: installing LeRobot into $VENV (several GB, some minutes the first time)"
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" install --no-compile -r scripts/parity/requirements.txt
    "${pip[@]}" install --no-compile --no-deps --target "$LEROBOT_04" -r scripts/parity/requirements-groot.txt
    fingerprint >"$STATE"
}

if [[ ! -f $STATE || $(<"$STATE") != "$(fingerprint)" ]]; then make_venv; fi
rm -rf "$VENV/cases"
mkdir -p "$VENV/cases"
theirs() {
    HF_HOME=$PWD/$VENV/hf "$VENV/bin/python" -m "$@" >"$VENV/cases/theirs.log" 2>&1 || {
        tail -n 40 "$VENV/cases/theirs.log" >&2
        echo "parity: LeRobot's side failed, see above" >&2
        return 1
    }
}
theirs_06() { PYTHONPATH=scripts theirs "$@"; }
theirs_04() { PYTHONPATH=$LEROBOT_04:scripts theirs "$@"; }
ours() { PYTHONPATH=scripts .venv/bin/python -m "$@"; }
theirs_06 parity.theirs
theirs_04 parity.theirs_groot
ours parity.exports
theirs_06 parity.theirs_exports
theirs_04 parity.theirs_groot_exports
ours parity.ours
