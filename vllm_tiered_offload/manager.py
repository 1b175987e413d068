# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiering manager with promotions that end.

A subclass, nothing is patched. It adds pins, patience and batched promotions
(`room.py` and `pins.py` decide, this file carries it out), a reset after which requests that
were alive store nothing, and callbacks that may come late, twice or for a
request that is gone. Everything else, above all the cascade and the job
tracking, is vLLM's own.

All methods run in the scheduler, under vLLM's manager lock where it has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from vllm_tiered_offload.compat import call
from vllm_tiered_offload.pins import Admission, PinBook, PinSettings
from vllm_tiered_offload.pool_metrics import PoolMetrics
from vllm_tiered_offload.promotion import enlist, free_chunks, group_count, ready, reserve
from vllm_tiered_offload.room import Room, Verdict
from vllm_tiered_offload.transfers import OpenTransfers

__all__ = ["PinSettings", "PinnedTieringManager"]

# vLLM 0.30 to 0.32 do not say when copies in flight at a reset have landed. Any
# transfer that ends afterwards proves it (workers flush before they start new
# ones); without one, this many steps are more than any pipeline holds.
_FENCE_STEPS = 16


class PinnedTieringManager(TieringOffloadingManager):  # type: ignore[misc]
    """TieringOffloadingManager whose promotions are pinned, patient and batched.

    Args:
        primary_tier: vLLM's CPU tier.
        secondary_tiers: vLLM's or our own tiers, in order of preference.
        pins: bounds of the promotions.
        clock: seconds, monotonic.
        vllm_kwargs: what the installed vLLM's manager takes besides; None and
            unknown keywords are left out.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: list[Any] | None = None,
        *,
        pins: PinSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        **vllm_kwargs: Any,
    ) -> None:
        # Before super().__init__, which may start a thread that looks keys up.
        self._book = PinBook(pins or PinSettings(), clock)
        groups = group_count(secondary_tiers)
        self._room = Room(primary_tier._num_chunks, self._book, groups)
        row_bytes = primary_tier.get_kv_memoryview().strides[0]
        self._pool_metrics = PoolMetrics(self._book, row_bytes, self._room.most)
        self._transfers = OpenTransfers()
        self._asking: Admission | None = None
        self._told_to_wait = False
        self._fence = 0
        self._shut = False
        given = {k: v for k, v in vllm_kwargs.items() if v is not None}
        call(TieringOffloadingManager.__init__, self, primary_tier, secondary_tiers, **given)

    # --- look-ups and promotions ---

    def lookup(
        self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> LookupResult:
        book = self._book
        if key in book.queued:
            return LookupResult.HIT_PENDING
        admission = self._asking
        if admission is None or admission.request is not req_context:
            admission = self._asking = book.find(req_context.req_id, req_context)
            if admission is None:
                return self._resident(key, req_context)
        self._told_to_wait = False
        result = super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)
        if result is LookupResult.HIT:
            book.saw_hit(admission, key)
        elif result is LookupResult.HIT_PENDING and key in book.stuck:
            return LookupResult.MISS
        elif result is LookupResult.MISS and self._told_to_wait:
            return LookupResult.RETRY
        return result

    def _resident(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """For a request that is gone: nothing is promoted or recorded for it."""
        if self._shut:
            return LookupResult.MISS
        return self.primary_tier.lookup(key, req_context)

    def _initiate_promotion(
        self, tier_idx: int, key: OffloadKey, req_context: ReqContext
    ) -> bool:
        """Queue a chunk; the rows are taken once per request at the step's end."""
        admission = self._asking
        if self._fence or admission is None:
            return False
        position_of = getattr(req_context, "get_offload_key_position", None)  # 0.31 on
        free = free_chunks(self.primary_tier)
        verdict = self._room.ask(admission, key, tier_idx, free, position_of)
        if verdict is Verdict.FULL:
            self._metrics.on_promotion_allocation_failure()
        self._told_to_wait = verdict is Verdict.WAIT
        return verdict is Verdict.TAKE

    def _flush_pending_promotions(self) -> None:
        pool = self.primary_tier
        for admission in self._book.end_step():
            context = admission.request
            # 0.33 ends the step after its stores: they may have evicted hits and
            # taken room since the look-ups.
            hits = self._room.pinnable_hits(admission)
            self._pin(admission, ready(pool, context, hits))
            tiers = self._book.drop_queue(admission)
            rows = reserve(pool, context, list(tiers)[: max(0, free_chunks(pool))])
            if rows:
                self._book.launched(admission, rows)
                enlist(self._pending_load_submissions, context, rows, tiers)
                self._note_sources(context.req_id, rows, tiers)
        super()._flush_pending_promotions()

    def _note_sources(
        self, req_id: str, keys: Iterable[OffloadKey], tiers: Mapping[OffloadKey, int]
    ) -> None:
        sources = getattr(self, "_request_load_sources", None)
        if sources is not None:  # 0.31 on: which tier a hit is counted for
            of_tier = [tier.cache_hit_source for tier in self.secondary_tiers]
            sources.setdefault(req_id, {}).update((key, of_tier[tiers[key]]) for key in keys)

    def _complete_promotion(self, job_metadata: Any, completed_job: Any) -> None:
        super()._complete_promotion(job_metadata, completed_job)
        job = job_metadata.transfer_job
        ok = job.keys if completed_job.success else completed_job.successful_keys or ()
        context = job.req_context
        admission = self._book.find(context.req_id, context)
        keys = self._book.landed(admission, job.keys, ok)
        if admission is not None:
            self._pin(admission, keys)

    # --- pins ---

    def _pin(self, admission: Admission, keys: list[OffloadKey]) -> None:
        if keys:
            self.primary_tier.prepare_read(keys, admission.request)
            self._book.pin(admission, keys)

    def _unpin(self, admission: Admission, keys: list[OffloadKey]) -> None:
        if keys:
            self.primary_tier.complete_read(keys, admission.request)

    def _end_admission(
        self, req_context: ReqContext, *, gone: bool = False
    ) -> Admission | None:
        """The request has started or ended: its pins go, its next try is a new one."""
        admission = self._book.find(req_context.req_id, req_context)
        if admission is not None:
            self._unpin(admission, self._book.end_admission(admission, gone=gone))
        return admission

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        self._transfers.open_load(req_context.req_id, keys)
        self._end_admission(req_context)
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        open_keys = self._transfers.close_load(req_context.req_id, keys)
        if open_keys:
            self._fence = 0
            super().complete_load(open_keys, req_context)

    # --- stores ---

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        admission = self._end_admission(req_context)
        if admission is None or admission.stale or self._shut:
            # Not None, which the scheduler would report and try again.
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        out = super().prepare_store(keys, req_context)
        if out is not None:
            self._transfers.open_store(req_context, out.keys_to_store)
        return out

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        stored = self._transfers.close_store(keys)
        if not stored:
            return
        self._fence = 0
        state = self._req_state.get(req_context.req_id)
        ours = [key for key, owner in stored.items() if owner is req_context]
        known = state is not None and state.req_context is req_context
        if ours and known and state.pending_primary_stores > 0:
            super().complete_store(ours, req_context, success)
            ours = []
        orphans = [key for key, owner in stored.items() if owner is not req_context]
        if ours or orphans:  # the request is gone: free the rows, cascade nothing
            self.primary_tier.complete_store([*ours, *orphans], req_context, success)

    # --- requests ---

    def on_new_request(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> RequestOffloadingContext:
        if req_context.req_id in self._req_state:
            self._retire(req_context.req_id)
        self._book.admit(req_context.req_id, req_context, may_wait=exclude_tier_idx is None)
        return super().on_new_request(req_context, exclude_tier_idx=exclude_tier_idx)

    def on_request_finished(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> None:
        if self._end_admission(req_context, gone=True) is None:
            return
        self._forget(req_context.req_id)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    def _forget(self, req_id: str) -> None:
        self._book.forget(req_id)
        self._asking = None

    def _retire(self, req_id: str) -> None:
        """Close a request whose id comes again before its last store ended."""
        state = self._req_state[req_id]
        if self._end_admission(state.req_context, gone=True) is not None:
            self._forget(req_id)
            self.primary_tier.on_request_finished(state.req_context)
        state.is_finished = True
        state.pending_primary_stores = 0
        state.pending_cascade_keys.clear()
        self._maybe_finalize_request(req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._shut:
            return
        for req_id in (*context.new_req_ids, *context.preempted_req_ids):
            state = self._req_state.get(req_id)
            if state is not None:
                self._end_admission(state.req_context)
        for admission in self._book.overdue():
            self._unpin(admission, self._book.release(admission))
        super().on_schedule_end(context)
        self._fence = max(0, self._fence - 1)

    # --- reset and shutdown ---

    def reset_cache(self) -> None:
        """Requests alive now store nothing any more: their blocks were computed
        before, and the scheduler offers them again from the first one."""
        if self._shut:
            return
        if len(self._transfers):  # copies may still land in rows that are free now
            self._fence = _FENCE_STEPS
        super().reset_cache()
        self._book.reset()
        self._transfers.clear()

    def on_reset_flushed(self) -> None:
        self._fence = 0
        parent = getattr(super(), "on_reset_flushed", None)  # 0.33 on
        if parent is not None:
            parent()

    def has_pending_work(self) -> bool:
        return not self._shut and super().has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._shut:
            yield from super().take_events()

    def get_stats(self) -> Any:
        if self._shut:
            return None
        stats = super().get_stats() or OffloadingConnectorStats()
        self._pool_metrics.add_to(stats)
        return stats

    def shutdown(self) -> None:
        if self._shut:
            return
        self._shut = True
        try:
            super().shutdown()  # 0.33: ends the thread that may be looking keys up
        finally:
            self._book.close()
            self._asking = None
