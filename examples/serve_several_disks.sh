#!/usr/bin/env bash
# Several NVMe drives: stores rotate over them, each has its own bound, and one that
# fails leaves the others working. Usage: examples/serve_several_disks.sh MODEL DIR DIR...
set -euo pipefail
model="${1:?usage: $0 MODEL DIR DIR...}"
shift
dirs="$(printf '"%s",' "$@")"
exec vllm serve "$model" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-64GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": ['"${dirs%,}"'], "max_bytes": "'"${KV_DISK:-500GiB}"'"}
        ]}}'
