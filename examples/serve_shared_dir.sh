#!/usr/bin/env bash
# usage: serve_shared_dir.sh MODEL SHARED_DIR [vllm arguments]
#
# A directory shared by several hosts (NFS, Lustre, an RWX volume). Every host must mount
# it with locks that work between hosts.
#   KV_CPU   size of the CPU pool, default 32GiB
#   KV_DISK  bound on SHARED_DIR, for all hosts together, default 2TiB
#   MODE     read_write, the default, or read on hosts that store nothing
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
kv_dir="$(directory SHARED_DIR "${2:-}")"
mode="${MODE:-read_write}"
[[ "$mode" =~ ^read(_write)?$ ]] || die "MODE: '$mode' is neither read_write nor read"
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
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-2TiB}"'",
           "mode": "'"$mode"'", "locality": "REMOTE", "refresh_interval": 2}
        ]}}'
