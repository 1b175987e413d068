#!/usr/bin/env bash
# usage: serve_stock_spec.sh MODEL KV_DIR NAMESPACE [vllm arguments]
#
# Our disk tier in vLLM's own tiering spec (GPUs only: vLLM's spec refuses the CPU
# platform). The tier cannot see the model there, so a cache that is to survive a
# restart needs a cache_namespace that you change with the weights.
#   KV_CPU_BYTES  size of the CPU pool as plain bytes, default 34359738368
#   KV_DISK       bound on KV_DIR, default 500GiB
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
[[ "${3:--}" =~ ^[^\"\\-][^\"\\]*$ ]] || die "NAMESPACE: '${3:-}' is not a name"
model="$1" namespace="$3"
shift 3
exec vllm serve "$model" --shutdown-timeout 30 "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": '"${KV_CPU_BYTES:-34359738368}"',
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-500GiB}"'",
           "cache_namespace": "'"$namespace"'"}
        ]}}'
