#!/usr/bin/env bash
# usage: P2P_CONFIG='{"type": "p2p", ...}' serve_with_p2p.sh MODEL KV_DIR [vllm arguments]
#
# Several hosts without a shared volume: our disk tier first, then vLLM's own p2p tier,
# which fetches from other engines what this host does not have.
#   P2P_CONFIG  JSON object of the p2p (or obj) tier; its keys are in vLLM's documentation
#   KV_CPU      size of the CPU pool, default 32GiB
#   KV_DISK     bound on KV_DIR, default 500GiB
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
[[ "${P2P_CONFIG:-}" == "{"*"}" ]] || die "P2P_CONFIG: '${P2P_CONFIG:-}' is not a JSON object"
model="$1"
shift 2
exec vllm serve "$model" --shutdown-timeout 30 "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-32GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-500GiB}"'"},
          '"$P2P_CONFIG"'
        ]}}'
