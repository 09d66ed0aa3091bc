"""vLLM's NIXL connector over caches whose pages lie side by side in a block, and within leases.

It pulls the memory of a prompt from the server that prefilled it. In our layout (BLNHC) a block is a row:

    a block of a group of KDA layers              [window | state][window | state] ..
    a block of the group of full attention        [latents | keys][latents | keys] ..

vLLM 0.32 registers a region per place where a page begins. It fails without an error, so that the text is
wrong, in 1, 3 and 5, and has no end in 4:

1. It takes the page of a KDA layer for the distance between blocks, unless a page of full attention begins at
   the same place: states are read from, and written to, the rows of others. Here the distance is the row's.
2. It copies a block of full attention through all regions, those of KDA pages too, which is most of the bytes
   and writes the same ones twice. Here the block goes through its own regions only.
3. The prefill server gives blocks free when their lease is over, and a decode server that comes later reads
   what others have written there since. Here the answer of prefill tells the end of the lease, and decode
   does not use what it read later: kv_load_failure_policy says whether it recomputes or fails.
4. Neither NIXL nor vLLM notices a peer that stands still. Here a transfer has the seconds that
   kv_connector_extra_config gives as "transfer_timeout".
5. Blocks are given free when one request has read them, but several may come with the same parameters: the
   answers of `n`, and a client that sends again. Here the first has them, and the others do without.

Peers whose pages are not ours are refused: vLLM cuts a page into smaller blocks by bytes, which holds for
tokens outermost, but a page of ours is all latents, then all keys.
"""

from __future__ import annotations

import os
import time

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlPullConnector,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta

from longspan.errors import ConfigError
from longspan.plugin_vllm.policy import is_longspan

TRANSFER_TIMEOUT_S = 120


class LongspanNixlConnector(NixlPullConnector):
    """`NixlConnector` under its own name; for other models it is the parent, unchanged."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        if not is_longspan(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
            return
        # The grandparent: another worker would be another agent, with the memory registered twice.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = LongspanNixlScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = LongspanNixlWorker(vllm_config, self.engine_id, kv_cache_config)


class LongspanNixlScheduler(NixlPullConnectorScheduler):
    def request_finished(self, request, block_ids):
        """What the parent answers, and until when the blocks are kept unless decode asks for longer."""
        keep, answer = super().request_finished(request, block_ids)
        if keep and answer is not None:
            answer["remote_blocks_expiry_time"] = self._reqs_need_send[request.request_id]
        return keep, answer


class LongspanNixlWorker(NixlPullConnectorWorker):
    def __init__(self, vllm_config, engine_id, kv_cache_config) -> None:
        # The parent moves this thread to the last core, for its own threads to start there. It computes, too.
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        os.sched_setaffinity(0, cores)
        self._renewals: dict[tuple[str, str], tuple[float, float]] = {}  # (engine, request) -> first, last
        self._readers: dict[tuple[str, str], tuple[str, ReqMeta]] = {}  # (engine, request) -> who reads it
        self._started: dict[str, float] = {}  # when the transfers of a request were first seen
        self._limit_s = self.kv_transfer_config.get_from_extra_config("transfer_timeout", TRANSFER_TIMEOUT_S)

    def register_local_xfer_handler(self, block_size: int) -> tuple[int, np.ndarray]:
        """Called as soon as all regions are known, before the peer is told of them."""
        row = self.block_stride_per_layer[self._region_is_mla.index(True)]
        self.block_stride_per_layer[:] = [row] * len(self.block_stride_per_layer)
        return super().register_local_xfer_handler(block_size)

    def _compute_desc_ids(self, block_ids, dst_num_blocks, *args, **options) -> np.ndarray:
        """The blocks' descriptors, those of full attention in the regions of its own pages."""
        ids = super()._compute_desc_ids(block_ids, dst_num_blocks, *args, **options)
        # First a descriptor per region and block, then those of the states.
        own = np.append(np.array(self._region_is_mla), True)
        return ids[own[np.minimum(ids // dst_num_blocks, self.num_regions)]]

    def _validate_remote_agent_handshake(
        self, nixl_agent_meta: NixlAgentMetadata, remote_tp_size: int, remote_dcp_size: int = 1
    ) -> None:
        """Raises ConfigError, and the request fails, unless the peer's pages are ours."""

        def pages(block_size, lengths, states, ranks):
            own = [length for length, own in zip(lengths, self._region_is_mla, strict=False) if own]
            return block_size, own, list(states), ranks

        peer = nixl_agent_meta
        ours = pages(self.block_size, self.block_len_per_layer, self._mamba_ssm_size, self.dcp_size)
        theirs = pages(peer.block_size, peer.block_lens, peer.ssm_sizes, remote_dcp_size)
        if ours != theirs:
            form = "{} tokens a block, pages of {} bytes, window and state of {} bytes, tokens over {} ranks"
            raise ConfigError(
                f"The pages of the prefill server are of {form.format(*theirs)}; here they are of "
                f"{form.format(*ours)}.",
                remedy="Start both with the same model, --dtype, --block-size, --tensor-parallel-size and "
                "--decode-context-parallel-size.",
            )
        super()._validate_remote_agent_handshake(nixl_agent_meta, remote_tp_size, remote_dcp_size)

    def _send_heartbeats(self, metadata: NixlConnectorMetadata) -> None:
        """Notes since when, and when last, the lease of a request was renewed without a gap."""
        super()._send_heartbeats(metadata)
        now = time.perf_counter()
        for engine, info in metadata.heartbeat_by_engine.items():
            for request in info.req_ids if engine in self._remote_agents else ():
                first, last = self._renewals.get((engine, request), (now, now))
                self._renewals[engine, request] = (first if now < last + self._lease_extension else now, now)
        if metadata.heartbeat_by_engine:
            kept = {k: v for k, v in self._renewals.items() if now < v[1] + self._lease_extension}
            self._renewals = kept

    def _is_leased(self, meta: ReqMeta) -> bool:
        """Whether the prefill server still keeps the blocks for us. A second is left for clocks and wires."""
        remote = meta.remote
        if remote is None or remote.blocks_expiry_time is None or not any(meta.local_block_ids):
            return True
        now = time.perf_counter() + 1
        end = remote.blocks_expiry_time - self._engine_clock_offset[remote.engine_id]
        first, last = self._renewals.get((remote.engine_id, remote.request_id), (now, now))
        return now < end or (first + 1 < end and now < last + self._lease_extension)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        known = meta.remote is not None and meta.remote.engine_id in self._remote_agents
        if known and not self._is_leased(meta):
            self._refuse(req_id, meta, "lease_over")
        elif known and not self._is_first(req_id, meta):
            self._refuse(req_id, meta, "read_by_another")
        else:
            super()._read_blocks_for_req(req_id, meta)

    def _is_first(self, req_id: str, meta: ReqMeta) -> bool:
        """Whether no other request reads, or has read, these blocks."""
        remote = meta.remote
        if remote is None or not any(meta.local_block_ids):
            return True
        while self._readers:  # the eldest come first; what is no longer leased is refused anyway
            (engine, request), (_, eldest) = next(iter(self._readers.items()))
            if engine in self._remote_agents and self._is_leased(eldest):
                break
            del self._readers[engine, request]
        return self._readers.setdefault((remote.engine_id, remote.request_id), (req_id, meta))[0] == req_id

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        now = time.perf_counter()
        self._started = {req_id: self._started.get(req_id, now) for req_id in transfers}
        for req_id in [r for r, started in self._started.items() if now - started > self._limit_s]:
            self._log_failure(failure_type="transfer_too_slow", req_id=req_id)
            transfers[req_id] = [
                handle
                for handle in transfers[req_id]
                if not self._handle_failed_transfer(req_id, handle, failed)
            ]
            if not transfers[req_id]:
                del transfers[req_id]
                done.add(req_id)
        for req_id in done - failed:
            meta = self._recving_metadata.get(req_id)
            if meta is not None and not self._is_leased(meta):
                self._refuse(req_id, meta, "lease_over")
        return done, failed

    def _refuse(self, req_id: str, meta: ReqMeta, why: str) -> None:
        """The request fails as with a transfer that failed, but the peer is not taken for broken."""
        message = "The prefill server may have reused the blocks."
        self._log_failure(failure_type=why, msg=message, req_id=req_id, meta=meta)
        self.xfer_stats.record_kv_expired_req()
        self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)
