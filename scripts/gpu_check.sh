#!/usr/bin/env bash
# Checks on one GPU, in under 10 minutes, what elsewhere could only be tested over a fake driver:
#
#   scripts/gpu_check.sh --json gpu_check.json
#   scripts/gpu_check.sh --model DIR --draft DIR     also with servers: evict and reload under load
#
# Its first four parts need torch, triton, numba and cuda-bindings; SGLang is needed only with models. Where such a
# Python is there already, NIGHTJAR_PYTHON names it; else the project's own is used, and built if missing.
# docs/gpu.md says how to read the table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for word in "$@"; do
  case $word in -h | --help) exec "${NIGHTJAR_PYTHON:-python3}" bench/gpu_check.py --help ;; esac
done
if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/nvidia0 ] && [ ! -e /dev/dxg ]; then
  echo "gpu_check: there is no NVIDIA GPU here, so nothing was checked; run it on a machine with one" >&2
  exit 1
fi
python=${NIGHTJAR_PYTHON:-$(scripts/venv.sh)}
exec timeout --signal=INT --kill-after=20 590 "$python" bench/gpu_check.py "$@"
