# SPDX-License-Identifier: Apache-2.0
"""Placing a worker's pages on its NUMA node.

Linux puts a page on the node of the thread that touches it first. On a host
with several nodes each worker therefore pre-faults its own slots, from threads
that inherit its CPU affinity, rather than an equal share of the whole.
"""

from __future__ import annotations

from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def node_count(nodes: Path = _NODES) -> int:
    """NUMA nodes with memory on this host; 1 where the kernel does not say."""
    return max(1, sum(1 for _ in nodes.glob("node[0-9]*")))
