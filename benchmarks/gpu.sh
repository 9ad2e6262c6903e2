#!/usr/bin/env bash
# The correctness ladder, tok/s and MFU of the trainer on one GPU: benchmarks/gpu.sh [--smoke] [--blocks FILE.npy].
# Needs a Python with PyTorch, numpy and pyarrow; no network, no installation. Writes $OUT/gpu.json, or
# benchmarks/results/gpu.json, after every measurement, and ends within 8 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
python="${PYTHON:-$(command -v python3 || command -v python)}"
exec "$python" -m benchmarks.gpu "$@"
