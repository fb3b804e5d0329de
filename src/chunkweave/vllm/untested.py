"""The connector on a release of vLLM that was not tested: ours, or if something that it needs is missing, an idle one.

vLLM loads the class `ChunkweaveConnector` of this module there (see `plugin.register`), once in each process.
"""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from chunkweave.planning.method_choice import FIELD
from chunkweave.vllm.contract import broken_contract
from chunkweave.vllm.releases import TESTED, vllm_version
from chunkweave.vllm.report_socket import ReportSender

logger = logging.getLogger("vllm.chunkweave")


class _Idle:
    """A connector's methods with which vLLM serves alone; a request with our field gets the reason in its report."""

    reason: str
    requires_kv_delivery = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reports = ReportSender()
        self._reports.send_off(self.reason)
        logger.error("chunkweave weaves nothing, requests are served by vLLM alone: %s", self.reason)

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, *_: Any) -> Any:
        return base.KVConnectorMetadata()

    def request_finished(self, request: Any, *_: Any) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or params.get(FIELD) is None:
            return False, None
        report = {FIELD: {"error": f"nothing is woven: {self.reason}"}}
        self._reports.send(request.request_id, report)
        return False, report

    request_finished_all_groups = request_finished


def idle_connector(reason: str) -> type:
    """A connector class that does nothing, whatever methods this release's connectors must have."""
    kinds = (base.KVConnectorBase_V1, *filter(None, [getattr(base, "SupportsHMA", None)]))
    required = {name for kind in kinds for name in getattr(kind, "__abstractmethods__", ())}
    methods = {name: _nothing for name in required if not hasattr(_Idle, name)}
    return type("ChunkweaveConnector", (_Idle, *kinds), {**methods, "reason": reason})


def _nothing(self: Any, *_args: Any, **_kwargs: Any) -> None:  # noqa: ARG001
    return None


def _chosen() -> type:
    installed = vllm_version()
    tested = " and ".join(TESTED)
    broken = broken_contract()
    if broken is not None:
        where = f"this is vLLM {installed}, where chunkweave's plug-in does not work"
        return idle_connector(f"{where} ({broken}); it was tested with {tested}")
    from chunkweave.vllm.connector import ChunkweaveConnector

    logger.warning("chunkweave was tested with vLLM %s, not with %s; what it relies on is there", tested, installed)
    return ChunkweaveConnector


ChunkweaveConnector = _chosen()
