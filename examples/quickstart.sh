#!/usr/bin/env bash
# From nothing to a prefix that survives a restart: makes an environment with the
# real vLLM for CPUs and this package, makes a small model, runs the main job and
# prints what happened. Needs Python 3.10 or newer, about 6 GB of disk and 8 GB of
# memory; no GPU and no download of weights.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(scripts/setup_env.sh cpu | tail -n 1)"
exec "$python" examples/quickstart.py "$@"
