#!/usr/bin/env bash
# Set everything up and pass all checks and tests. Arguments go to pytest in place
# of the checks, for example:
#   scripts/test.sh -m 'not engine'     everything that starts no engine
#   scripts/test.sh -m 'slow'           more engines than CI has time for, and long stresses
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(scripts/setup_env.sh cpu,dev | tail -n 1)"
# The store is tried on XFS and btrfs too, on loop devices, where that is possible at all.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null \
    && ! { command -v mkfs.xfs && command -v mkfs.btrfs; } >/dev/null; then
    { apt-get update -qq \
        && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y xfsprogs btrfs-progs; } \
        >/dev/null 2>&1 || echo "test: some tests on XFS and btrfs are skipped" >&2
fi
if [ $# -eq 0 ]; then
    "$python" -m ruff format --check .
    "$python" -m ruff check .
    "$python" -m mypy
fi
if [ $# -eq 0 ]; then
    set -- -m 'not (slow and engine)'
fi
exec "$python" -m pytest "$@"
