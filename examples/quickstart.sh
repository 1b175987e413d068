#!/usr/bin/env bash
# usage: quickstart.sh [--work DIR]
#
# From nothing to a prefix that survives a restart: makes an environment with the
# real vLLM for CPUs and this package, makes a small model, runs the main job and
# prints what happened. Needs Python 3.10 or newer, about 6 GB of disk and 8 GB of
# memory; no GPU and no download of weights.
#   --work DIR  keep model, cache and logs in this folder
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(scripts/setup_env.sh cpu | tail -n 1)"
exec "$python" examples/quickstart.py "$@"
