# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests and the systemd unit: they parse, and their numbers fit together."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_offload.config import FsTierSettings, SpecSettings, parse_size

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
UNIT = EXAMPLES / "systemd" / "vllm.service"
GIB = 1 << 30


def quantity(text: str) -> int:
    """Bytes of a Kubernetes or systemd quantity such as "56Gi" or "64G"."""
    return parse_size(text if text.endswith("i") else f"{text}iB")


def settings(transfer_config: str) -> tuple[SpecSettings, FsTierSettings]:
    config = json.loads(transfer_config)
    assert config["kv_connector"] == "OffloadingConnector"
    assert config["kv_role"] == "kv_both"
    extra = config["kv_connector_extra_config"]
    assert extra["spec_name"] == "AlignedTieringOffloadingSpec"
    spec = SpecSettings.parse(extra, tiering=True)
    return spec, FsTierSettings.parse(extra["secondary_tiers"][0])


class Manifest:
    def __init__(self, path: Path) -> None:
        self.documents = [d for d in yaml.safe_load_all(path.read_text()) if d]
        (self.workload,) = (d for d in self.documents if d["kind"] not in self.OTHERS)
        self.pod: dict[str, Any] = self.workload["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]

    OTHERS = ("Service", "PersistentVolumeClaim")

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [d for d in self.documents if d["kind"] == kind]

    @property
    def volumes(self) -> dict[str, dict[str, Any]]:
        found = {v["name"]: v for v in self.pod["volumes"]}
        for claim in self.workload["spec"].get("volumeClaimTemplates", ()):
            found[claim["metadata"]["name"]] = claim
        return found

    @property
    def settings(self) -> tuple[SpecSettings, FsTierSettings]:
        arguments = self.container["args"]
        return settings(arguments[arguments.index("--kv-transfer-config") + 1])

    def size_of(self, name: str) -> int:
        volume = self.volumes[name]
        if "emptyDir" in volume:
            return quantity(volume["emptyDir"]["sizeLimit"])
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            (volume,) = (
                c for c in self.named("PersistentVolumeClaim") if c["metadata"]["name"] == claim
            )
        return quantity(volume["spec"]["resources"]["requests"]["storage"])


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.stem)
def manifest(request: pytest.FixtureRequest) -> Manifest:
    return Manifest(request.param)


def test_the_three_shapes_are_there() -> None:
    kinds = {path.stem: Manifest(path).volumes["kv"] for path in MANIFESTS}
    assert "emptyDir" in kinds["node-local"]
    assert kinds["private-pvc"]["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert "persistentVolumeClaim" in kinds["shared-pvc"]
    (claim,) = Manifest(EXAMPLES / "kubernetes/shared-pvc.yaml").named("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_cache_fits_its_volume_with_room_to_spare(manifest: Manifest) -> None:
    _, tier = manifest.settings
    mounts = {m["name"]: Path(m["mountPath"]) for m in manifest.container["volumeMounts"]}
    (root,) = tier.root_dir
    # Below the mount point: its own directory is 0700, the mount point is the group's.
    assert mounts["kv"] in root.parents
    assert tier.max_bytes is not None
    assert tier.max_bytes <= 0.95 * manifest.size_of("kv")


def test_the_memory_limit_covers_pool_and_shm(manifest: Manifest) -> None:
    spec, _ = manifest.settings
    resources = manifest.container["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    limit = quantity(resources["limits"]["memory"])
    assert limit >= spec.cpu_bytes_to_use + manifest.size_of("shm") + 8 * GIB


def test_the_node_is_asked_for_the_disk_of_its_volumes(manifest: Manifest) -> None:
    volumes = [v["emptyDir"] for v in manifest.pod["volumes"] if "emptyDir" in v]
    on_disk = sum(quantity(v["sizeLimit"]) for v in volumes if v.get("medium") != "Memory")
    requests = manifest.container["resources"]["requests"]
    assert on_disk <= quantity(requests["ephemeral-storage"]) <= 1.2 * on_disk


def test_an_update_needs_no_spare_gpu(manifest: Manifest) -> None:
    spec = manifest.workload["spec"]
    if manifest.workload["kind"] == "Deployment":
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    else:  # an ordered update takes one away before it brings one
        assert manifest.workload["kind"] == "StatefulSet"


def test_what_vllm_is_started_with(manifest: Manifest) -> None:
    assert manifest.container["command"][:2] == ["vllm", "serve"]
    assert not any(a.startswith("--model") for a in manifest.container["args"])
    port = manifest.container["ports"][0]
    assert f"--port={port['containerPort']}" in manifest.container["args"]
    for probe in ("startupProbe", "readinessProbe"):
        assert manifest.container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    # A service named vllm would otherwise set VLLM_PORT to something that is no port.
    assert manifest.pod["enableServiceLinks"] is False
    # PyTorch asks for the name of the user, and this one is in no /etc/passwd.
    assert {"name": "USER", "value": "vllm"} in manifest.container["env"]


def test_the_image_is_built_from_this_checkout() -> None:
    lines = (EXAMPLES / "kubernetes" / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "vllm_tiered_offload"} <= set(copied)
    assert all((EXAMPLES.parent / name).exists() for name in copied)
    (tag,) = (line.rpartition(":v")[2] for line in lines if line.startswith("FROM"))
    for path in MANIFESTS:
        assert Manifest(path).container["image"] == f"vllm-tiered-offload:{tag}"


def test_it_runs_without_privileges_on_a_read_only_root(manifest: Manifest) -> None:
    pod, own = manifest.pod["securityContext"], manifest.container["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["fsGroup"] == pod["runAsGroup"]
    assert pod["fsGroupChangePolicy"] == "OnRootMismatch"
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounts = {m["mountPath"] for m in manifest.container["volumeMounts"]}
    written = {e["value"] for e in manifest.container["env"] if e["value"].startswith("/")}
    for path in {"/tmp", *written}:
        assert any(path == m or path.startswith(f"{m}/") for m in mounts), path


def test_every_mount_has_a_volume_and_labels_agree(manifest: Manifest) -> None:
    mounted = {m["name"] for m in manifest.container["volumeMounts"]}
    assert mounted == set(manifest.volumes)
    labels = manifest.workload["spec"]["template"]["metadata"]["labels"]
    assert manifest.workload["spec"]["selector"]["matchLabels"] == labels
    for service in manifest.named("Service"):
        assert service["spec"]["selector"] == labels


def test_there_is_time_to_drain_before_the_kill(manifest: Manifest) -> None:
    grace = manifest.pod["terminationGracePeriodSeconds"]
    (timeout,) = (a for a in manifest.container["args"] if a.startswith("--shutdown-timeout="))
    assert grace > int(timeout.split("=")[1])


# --- systemd -------------------------------------------------------------------------------


def unit_lines() -> dict[str, list[str]]:
    """Values by key; a key may come several times."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_what_it_says() -> None:
    lines = unit_lines()
    command = shlex.split(lines["ExecStart"][0])
    spec, tier = settings(command[command.index("--kv-transfer-config") + 1])
    assert quantity(lines["MemoryMax"][0]) >= spec.cpu_bytes_to_use + 8 * GIB
    # ProtectSystem=strict leaves nothing writable but the directories named here.
    assert str(tier.root_dir[0]).startswith(f"/var/cache/{lines['CacheDirectory'][0]}/")
    for setting in lines["Environment"]:
        name, _, path = setting.partition("=")
        if path.startswith("/") and name != "PATH":
            assert path.startswith(f"/var/lib/{lines['StateDirectory'][0]}/"), name
    assert (lines["UMask"], lines["CacheDirectoryMode"]) == (["0077"], ["0700"])
    drain = int(command[command.index("--shutdown-timeout") + 1])
    assert int(lines["TimeoutStopSec"][0]) > drain
    assert lines["KillMode"] == ["mixed"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # The environment of the example is not here: any executable stands for its vllm.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/vllm/bin/vllm", "/bin/true"))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        check=False,
        capture_output=True,
        text=True,
    )
    complaints = [line for line in result.stderr.splitlines() if unit.name in line]
    assert result.returncode == 0, result.stderr
    assert not complaints
