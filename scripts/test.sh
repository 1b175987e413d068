#!/usr/bin/env bash
# Set everything up and pass all checks and tests. Arguments go to pytest, for
# example: scripts/test.sh -m 'not engine' (everything that starts no engine).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(scripts/setup_env.sh cpu,dev | tail -n 1)"
if [ $# -eq 0 ]; then
    "$python" -m ruff format --check .
    "$python" -m ruff check .
    "$python" -m mypy
fi
exec "$python" -m pytest "$@"
