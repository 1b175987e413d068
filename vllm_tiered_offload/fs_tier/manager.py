# SPDX-License-Identifier: Apache-2.0
"""ODirectFsTier: vLLM's calls to a secondary tier, answered by the store.

Runs in the scheduler process. Nothing here waits for a disk: look-ups are answered from the
store's index, jobs are queued, and completions are collected once a step. The exceptions are
the two calls by which vLLM asks to wait, `drain_jobs` and `shutdown`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_tiered_offload import compat
from vllm_tiered_offload.fs_tier import banner, wiring
from vllm_tiered_offload.fs_tier.adapters import adapter_of, salted
from vllm_tiered_offload.fs_tier.direct_watch import DirectIoWatch
from vllm_tiered_offload.fs_tier.identity import epoch_namespace
from vllm_tiered_offload.fs_tier.keys import StoreKeys
from vllm_tiered_offload.fs_tier.metrics import TierMetrics, metric_definitions
from vllm_tiered_offload.fs_tier.ordering import PrefixOrder
from vllm_tiered_offload.ratelog import RateLimitedLog

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec

    from vllm_tiered_offload.config import FsTierSettings
    from vllm_tiered_offload.store import Completion

logger = init_logger("vllm.tiered_offload.fs_tier")

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_SHUTDOWN_SECONDS = 5.0


def _never(key: bytes) -> bool:
    return False


class ODirectFsTier(SecondaryTierManager):  # type: ignore[misc]
    """A bounded, checksummed disk tier: one store, one namespace at a time.

    Args:
        offloading_spec: the spec that builds the tiers. Read are its `identity_facts` (absent
            in vLLM's own spec), `kv_events_config` and sizes; never vLLM's global config,
            which does not exist in this process at this time.
        primary_kv_view: the CPU tier's rows, shape (chunks, bytes per chunk).
        tier_type: the name the tier was selected by.
        backpressure_detector: as vLLM's factory made it (0.31 on), or None.
        config: the tier's keys as the user wrote them, and whatever keywords a newer vLLM's
            factory adds (those are ignored).

    Raises:
        ConfigError: a key is unknown or its value bad, or a root cannot be used.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any | None = None,
        **config: Any,
    ) -> None:
        compat.call(
            SecondaryTierManager.__init__,
            self,
            offloading_spec,
            primary_kv_view,
            tier_type,
            backpressure_detector=wiring.with_failure_threshold(backpressure_detector),
        )
        settings = wiring.read_settings(config, offloading_spec)
        self.locality = Locality(settings.locality) if settings.locality else None
        self._keep_on_reset = settings.on_reset == "keep"
        self._emits_events = wiring.emits_events(settings, offloading_spec)
        self._log = RateLimitedLog(logger)
        self._order = PrefixOrder()
        # Jobs handed to the store and not reported yet, each with the adapter its keys are
        # salted with; and results that need no store.
        self._open_jobs: dict[int, int | None] = {}
        self._results: list[JobResult] = []
        # Every reset starts an epoch. A request belongs to the one it was first seen in: what
        # it offers after a reset may have been computed with the weights of before.
        self._epoch = 0
        self._request_epochs: dict[str, int] = {}
        self._off = False  # nothing is served or stored any more
        self._closed = False
        label = wiring.tier_label(tier_type, config, offloading_spec)
        self._open(settings, label, wiring.key_prefix(config, offloading_spec))

    def _open(self, settings: FsTierSettings, label: str, prefix: str) -> None:
        spec, rows = self._offloading_spec, self._primary_kv_view
        row_bytes = wiring.chunk_bytes(rows)
        identity = wiring.resolve_identity(settings, spec, row_bytes)
        self._namespace = identity.namespace
        self._keys = StoreKeys(identity.salt_adapters, remember=self._emits_events)
        self._memory = rows.cast("B")
        self._store = wiring.open_store(
            settings,
            identity.namespace,
            self._memory,
            row_bytes,
            events=self._emits_events,
            prefix=prefix,
        )
        self._contains = self._store.contains
        stats, padding = self._store.stats, wiring.padding_bytes(spec, row_bytes)
        self._metrics = TierMetrics(label, stats, row_bytes, padding)
        self._direct_io = DirectIoWatch(stats, self._log)
        self._info = banner.info(settings, identity)
        banner.log_banner(logger, label, self._store.describe(), identity)

    # --- requests -----------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._request_epochs[req_context.req_id] = self._epoch
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._request_epochs.pop(req_context.req_id, None)
        self._order.forget(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._order.record(req_context, keys)

    # --- look-ups and jobs --------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS at once; what this process does not know yet is a MISS."""
        if self._keys.salts and (adapter := adapter_of(req_context)) is not None:
            key = OffloadKey(salted(key, adapter))
        return _HIT if self._contains(key) else _MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        request_epoch = self._request_epochs.get(job_metadata.req_context.req_id, 0)
        stale = request_epoch != self._epoch
        if stale or self._off:
            self._metrics.store_dropped("reset" if stale else "off", len(job_metadata.keys))
            self._finish(job_metadata.job_id, success=True)
            return
        self._submit(self._store.submit_store, job_metadata, in_prefix_order=True)

    def submit_load(self, job_metadata: TransferJob) -> None:
        if self._off:
            self._finish(job_metadata.job_id, success=False)
            return
        self._metrics.chunks_requested(len(job_metadata.keys))
        self._submit(self._store.submit_load, job_metadata, in_prefix_order=False)

    def _submit(
        self,
        submit: Callable[[int, list[bytes], list[int]], None],
        job: TransferJob,
        *,
        in_prefix_order: bool,
    ) -> None:
        adapter = self._keys.adapter(job.req_context)
        keys, rows = list(job.keys), job.chunk_ids.tolist()
        try:
            if in_prefix_order:
                keys, rows = self._order.sort(keys, rows, job.req_context)
            submit(job.job_id, self._keys.to_store(keys, adapter), rows)
        except Exception as error:
            # An exception would stop the engine; a failed job only costs a recomputation.
            self._log.warning("submit", "job of %d chunks refused: %s", len(keys), error)
            self._finish(job.job_id, success=False)
        else:
            self._open_jobs[job.job_id] = adapter

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Each job once. A load that lost chunks names those that did arrive."""
        results, self._results = self._results, []
        for done in self._store.take_completions():
            if done.job_id in self._open_jobs:
                results.append(self._result(done, self._open_jobs.pop(done.job_id)))
        return results

    def _result(self, done: Completion, adapter: int | None) -> JobResult:
        if done.error is not None:
            direction = "load" if done.is_load else "store"
            self._log.warning(direction, "%s failed: %s", direction, done.error)
        partial = None
        if done.is_load and not done.ok and done.loaded_keys:
            partial = self._keys.from_store(done.loaded_keys, adapter)
        return compat.call(
            JobResult,
            job_id=done.job_id,
            success=done.ok,
            successful_keys=partial,
            transfer_time=done.seconds,
            transfer_bytes=done.bytes,
        )

    def _finish(self, job_id: int, success: bool) -> None:
        self._results.append(
            compat.call(
                JobResult, job_id=job_id, success=success, transfer_time=0.0, transfer_bytes=0
            )
        )

    def has_pending_work(self) -> bool:
        return bool(self._open_jobs or self._results)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._direct_io.tick()

    # --- events and metrics -------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """BlockStored once a chunk is readable from the disk, BlockRemoved when it is not."""
        if not self._emits_events:
            return
        for event in self._store.take_events():
            yield OffloadingEvent(
                keys=self._keys.of_event(event.keys, event.removed),
                medium=self.medium,
                removed=event.removed,
                locality=self.locality,
                # Tells vLLM to keep what it needs to describe the removal that will follow.
                removal_expected=not event.removed,
            )

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return None if self._closed else self._metrics.take()

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return banner.INFO_KEYS

    def config_info(self) -> dict[str, str | int | bool]:
        return self._info

    # --- reset and end ------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait for every job; then, unless `on_reset` is "keep", start a new epoch.

        vLLM calls this from `reset_cache` alone, and that is how a tier learns of a reset in
        vLLM's own spec: what was stored before must not be served after it, and what is stored
        after it goes to a namespace of this process only, since the weights may have changed
        under the fingerprint taken at the start.
        """
        if self._off:
            return
        self._store.drain()
        if self._keep_on_reset:
            return
        self._epoch += 1
        try:
            self._store.switch_namespace(epoch_namespace(self._namespace))
        except Exception as error:
            # To serve what was stored before would be a wrong answer; to serve nothing is slow.
            self._switch_off()
            logger.error("disk tier is off: no namespace after the reset: %s", error)

    def _switch_off(self) -> None:
        self._off = True
        self._contains = _never

    def shutdown(self) -> None:
        """Stop within a bounded time; safe to repeat, and every call is safe after it.

        Raises:
            RuntimeError: a thread is still inside the kernel. vLLM then keeps the CPU pool
                mapped, which that thread may yet read or write.
        """
        self._switch_off()
        self._closed = True
        if not self._store.shutdown(_SHUTDOWN_SECONDS):
            raise RuntimeError(
                f"disk tier: an I/O thread did not end within {_SHUTDOWN_SECONDS:.0f} s; "
                "the CPU pool stays mapped until the kernel returns"
            )
        self._results = list(self.get_finished_jobs())
        for job_id in sorted(self._open_jobs):
            self._finish(job_id, success=False)
        self._open_jobs.clear()
        self._memory.release()
