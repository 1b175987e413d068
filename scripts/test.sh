#!/usr/bin/env bash
# Set everything up and pass all checks and tests. Arguments go to pytest, for
# example: scripts/test.sh -m 'not engine' (everything that starts no engine).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(scripts/setup_env.sh cpu,dev | tail -n 1)"
# The store is tried on XFS too, on loop devices, where that is possible at all.
if [ "$(id -u)" = 0 ] && ! command -v mkfs.xfs >/dev/null && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y xfsprogs; } \
        >/dev/null 2>&1 || echo "test: no xfsprogs; the tests on XFS are skipped" >&2
fi
if [ $# -eq 0 ]; then
    "$python" -m ruff format --check .
    "$python" -m ruff check .
    "$python" -m mypy
fi
exec "$python" -m pytest "$@"
