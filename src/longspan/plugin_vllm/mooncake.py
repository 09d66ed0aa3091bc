"""vLLM's connector to a Mooncake Store, the pool of prefixes that servers share, on a CPU.

The parent waits with an event of CUDA until a step has written what is to be stored. A step of a CPU has
written it when it returns, and there is no such event.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector
from vllm.platforms import current_platform


class LongspanMooncakeStoreConnector(MooncakeStoreConnector):
    """`MooncakeStoreConnector` under its own name; elsewhere than on a CPU it is the parent, unchanged."""

    def wait_for_save(self) -> None:
        if not current_platform.is_cpu():
            super().wait_for_save()
            return
        worker = self.connector_worker
        assert worker is not None
        if worker.kv_send_thread is None:  # a server that only reads
            return
        metadata = self._get_connector_metadata()
        for request in metadata.requests:  # pyright: ignore[reportAttributeAccessIssue]
            if request.can_save:
                worker.kv_send_thread.add_request(request)
