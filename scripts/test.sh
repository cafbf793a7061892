#!/usr/bin/env bash
# Lint, types and tests, in the venv that scripts/venv.sh builds or reuses.
#
#   scripts/test.sh               everything (CI runs this; about 20 minutes on two cores)
#   scripts/test.sh tests/unit    any pytest arguments: only those tests, after lint and types
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/venv.sh)
base_bin=$("$python" -c 'import ruff, pathlib; print(pathlib.Path(ruff.__file__).parents[4] / "bin")')

step() { echo "[nightjar] $*" >&2; }

step "lint"
"$base_bin/ruff" check .
"$base_bin/ruff" format --check .
step "types"
"$python" -m mypy
step "tests"
# Two files at a time, each whole in one process: its servers are shared by its tests, and a server that
# boots or waits leaves a core to the other file. Order kept: those with servers come first and last longest.
# Test processes must not fight the servers they start over two cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NUMBA_NUM_THREADS=${NUMBA_NUM_THREADS:-2}
"$python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15 "$@"
