#!/usr/bin/env bash
# A directory shared by several hosts (NFS, Lustre, an RWX volume). `max_bytes` bounds
# all hosts together; every host must mount it with locks that work between hosts.
# One host writes and the others only read with MODE=read.
# Usage: examples/serve_shared_dir.sh MODEL SHARED_DIR [more vllm arguments]
set -euo pipefail
model="${1:?usage: $0 MODEL SHARED_DIR [more vllm arguments]}"
kv_dir="${2:?usage: $0 MODEL SHARED_DIR [more vllm arguments]}"
shift 2
exec vllm serve "$model" "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-32GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-2TiB}"'",
           "mode": "'"${MODE:-read_write}"'", "locality": "REMOTE", "refresh_interval": 2}
        ]}}'
