#!/usr/bin/env bash
# What one NVIDIA GPU does with this project, in at most eight minutes and without a network:
#     scripts/gpu_check.sh --out gpu_check.json --smollm2 .cache/smollm2
#     scripts/gpu_check.sh --device cpu --tiny            # the same script, small, on any machine
# Python: $PYTHON, else this clone's .venv, else python3. `--help` lists the options.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-}"
if test -z "$python"; then
    if test -x "$root/.venv/bin/python"; then python="$root/.venv/bin/python"; else python=python3; fi
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "$python" "$root/scripts/gpu_check.py" "$@"
