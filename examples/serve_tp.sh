#!/usr/bin/env bash
# usage: serve_tp.sh MODEL KV_DIR TP [vllm arguments]
#
# Tensor parallelism over TP GPUs of one host.
#   KV_CPU   size of the CPU pool, of all GPUs together, default 128GiB
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
[[ "${3:-}" =~ ^[1-9][0-9]*$ ]] || die "TP: '${3:-}' is not a number of GPUs"
model="$1" tp="$3"
shift 3
exec vllm serve "$model" --tensor-parallel-size "$tp" --shutdown-timeout 30 "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-128GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-500GiB}"'"}
        ]}}'
