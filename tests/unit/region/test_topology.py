# SPDX-License-Identifier: Apache-2.0
"""More than one host is refused with the reason; anything else is let through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_tiered_offload.region.numa import node_count
from vllm_tiered_offload.region.settings import RegionError
from vllm_tiered_offload.region.topology import refuse_other_hosts


def parallel(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**({"world_size": 4} | fields))


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        SimpleNamespace(),
        parallel(nnodes=1, distributed_executor_backend="mp"),
        parallel(nnodes=4, nnodes_within_dp=1),  # data parallelism over hosts
        parallel(world_size=1, nnodes=2),
        parallel(world_size=1, distributed_executor_backend="external_launcher"),
    ],
)
def test_one_host(allowed: object) -> None:
    refuse_other_hosts(allowed)


def test_workers_on_several_hosts() -> None:
    with pytest.raises(RegionError, match="4 workers of this engine run on 2 hosts"):
        refuse_other_hosts(parallel(nnodes=2))
    with pytest.raises(RegionError, match="2 hosts"):
        refuse_other_hosts(parallel(nnodes=4, nnodes_within_dp=2))


def test_an_external_launcher_has_many_schedulers() -> None:
    with pytest.raises(RegionError, match=r"external_launcher.*use 'mp'"):
        refuse_other_hosts(parallel(distributed_executor_backend="external_launcher"))


def test_numa_nodes(tmp_path: Path) -> None:
    assert node_count(tmp_path) == 1
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    assert node_count(tmp_path) == 2
