#!/usr/bin/env bash
# usage: serve_dp.sh MODEL KV_DIR DP [vllm arguments]
#
# Data parallelism: each of DP replicas has a CPU pool of its own, and all share one
# directory on disk, where each finds the others' chunks within refresh_interval.
#   KV_CPU   size of the CPU pool of each replica, default 32GiB
#   KV_DISK  bound on KV_DIR, default 500GiB
set -euo pipefail

die() {
    echo "${0##*/}: $1; --help says more" >&2
    exit 2
}
directory() { # NAME VALUE: its absolute path, fit for JSON
    case "$2" in
    "" | -*) die "$1 is missing" ;;
    *[\"\\]*) die "$1: $2 holds a quote or a backslash" ;;
    esac
    [ ! -e "$2" ] || [ -d "$2" ] || die "$1: $2 is not a directory"
    realpath -m -- "$2"
}

case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
"" | -*) die "MODEL is missing" ;;
esac
kv_dir="$(directory KV_DIR "${2:-}")"
[[ "${3:-}" =~ ^[1-9][0-9]*$ ]] || die "DP: '${3:-}' is not a number of replicas"
model="$1" dp="$3"
shift 3
exec vllm serve "$model" --data-parallel-size "$dp" --shutdown-timeout 30 "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-32GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-500GiB}"'"}
        ]}}'
