"""vLLM's connector class: one instance in the scheduler and one in each worker, delegating to its two halves."""

import logging
from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

from chunkweave.errors import ModelError
from chunkweave.models.kernels.compiles import KERNEL_COMPILES
from chunkweave.planning.calibration import stored_calibration
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.vllm.model_check import (
    check_store,
    checked_layers,
    finder_of,
    measured_cost,
    model_fingerprint,
    model_folder,
    room_for_weaves,
    spare_bytes,
    usual_start,
)
from chunkweave.vllm.orders import Holdings, StepOrders, StepResults
from chunkweave.vllm.plugin import compile_for_logprobs, loaded_model
from chunkweave.vllm.releases import copy_before_sleep, untested_release
from chunkweave.vllm.report_socket import ReportSender
from chunkweave.vllm.request import Defaults
from chunkweave.vllm.scheduler import ConnectorScheduler
from chunkweave.vllm.settings import LOAD_TIMEOUT_S, PluginSettings
from chunkweave.vllm.waiting import Pace, PartWaits
from chunkweave.vllm.weave_queue import Alone, RankAgreement
from chunkweave.vllm.worker import ConnectorWorker

logger = logging.getLogger("vllm.chunkweave")  # vLLM shows what is logged below its own name

_MEASURED_TOKENS = 2048
"""Most tokens of a prompt whose prefill is timed at start-up."""


_BESIDE_OTHERS = (
    "it is one of several connectors (MultiConnector). Another one may keep woven KV under its tokens alone, or load "
    "KV that would then be stored as exact; and vLLM fails a request whose weave fails"
)


class ChunkweaveConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types
    """Loads chunks' KV into vLLM's blocks, by plans of chunkweave's reuse methods.

    `SupportsHMA`: layers may have blocks for their window only (hybrid memory allocation).

    `kv_connector_extra_config` holds the keys of `PluginSettings`. A calibration record is read from `cache_dir`, from
    beside the model, or from those shipped.
    """

    _scheduler: ConnectorScheduler
    """Only in vLLM's scheduler; `_worker` only in workers that weave."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._settings = PluginSettings.from_config(extra, most_tokens=most_tokens)
        self._reports = ReportSender()
        self._worker: ConnectorWorker | None = None
        self._results: StepResults | None = None
        if role is KVConnectorRole.SCHEDULER:
            events = vllm_config.kv_events_config
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            fingerprint = model_fingerprint(vllm_config)
            self._scheduler = ConnectorScheduler(
                fingerprint,
                usual_start(vllm_config.model_config),
                _defaults(self._settings, vllm_config, fingerprint),
                ranks=vllm_config.parallel_config.tensor_parallel_size,
                window=_window(kv_cache_config),
                lasting=self._settings.store.cache_dir is not None or self._settings.store.remote_url is not None,
                waits=PartWaits(Pace(most_tokens, self._settings.step_tokens), most_s=LOAD_TIMEOUT_S),
                events=events is not None and events.enable_kv_cache_events,
                finds=self._settings.finding.find_chunks,
                make_finder=partial(finder_of, vllm_config.model_config),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """No: saved KV is a cache, and no request waits for it."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Holdings]) -> None:
        """At start-up: the contents of every worker's store, by rank. Another connector's metadata is ignored."""
        self._scheduler.begin_with(
            {rank: holdings for rank, holdings in metadata.items() if isinstance(holdings, Holdings)}
        )

    def get_handshake_metadata(self) -> Holdings | None:
        """At start-up: the contents of this worker's store; None if it does not weave."""
        return None if self._worker is None else self._worker.holdings()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.note(connector_output.kv_connector_worker_meta, connector_output.finished_recving or set())

    def request_finished(self, request: Any, _block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held, report = self._scheduler.finished(request)
        self._reports.send(request.request_id, report)
        return held, report

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the stores hold since the last step, or no longer, in vLLM's form."""
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        """Make all stored KV unusable; vLLM calls it before it sleeps and when weights are replaced."""
        self._scheduler.reset()
        return True

    def register_kv_caches(self, _kv_caches: dict[str, Any]) -> None:
        """Check and try the model once its caches exist; enable weaving, or log why not."""
        KERNEL_COMPILES.logger = logger
        config = self._vllm_config
        room = inf
        expected = ModelError if untested_release() is None else Exception  # an untested release may fail in any way
        ranks = RankAgreement() if config.parallel_config.tensor_parallel_size > 1 else Alone()
        try:
            if has_kv_transfer_group() and get_kv_transfer_group() is not self:
                raise ModelError(_BESIDE_OTHERS)
            layers, backend_bytes = checked_layers(loaded_model(), config, self._kv_cache_config)
            check_store(layers, self._settings.store)
            if layers.device.type == "cuda":
                spare, backend_bytes = ranks.least([spare_bytes(config, layers.device), -backend_bytes])
                room = room_for_weaves(layers, config, self._settings.store, kept=-backend_bytes, spare=spare)
        except expected as error:
            logger.error("chunkweave weaves nothing, requests are served by vLLM alone: %s", error)
            self._reports.send_off(str(error))
            return
        compile_for_logprobs(config.model_config.get_vocab_size(), layers.device)
        number = self._vllm_config.parallel_config.data_parallel_index
        fingerprint = model_fingerprint(self._vllm_config)
        most_tokens = min(self._vllm_config.scheduler_config.max_num_batched_tokens, _MEASURED_TOKENS)
        measure = partial(measured_cost, layers, fingerprint, most_tokens, lambda more: bool(ranks.least([more])[0]))
        self._worker = ConnectorWorker(
            layers, fingerprint, self._settings, ranks, replica=number, room_bytes=room, measure=measure
        )
        worker_class = resolve_obj_by_qualname(config.parallel_config.worker_cls)
        copy_before_sleep(KVConnectorBase_V1, worker_class, self._worker.before_sleep)
        logger.info("chunkweave weaves: %s passed the start-up check", type(loaded_model()).__name__)

    @classmethod
    def supports_sleep_mode(cls, _kv_transfer_config: Any) -> bool:
        """Yes: nothing is registered by a block's address."""
        return True

    def unregister_kv_caches(self) -> None:
        """Copy all KV to be saved: vLLM is about to free the blocks."""
        if self._worker is not None:
            self._worker.before_sleep()

    def restore_kv_caches(self) -> None:
        """No effect: the tensors of blocks are read from vLLM's layers at each use."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, _forward_context: Any, **_kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.step(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No effect: requests are scheduled after their weave."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """No effect: whole parts are saved from the blocks (see `wait_for_save`)."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        self._worker.forget(finished_req_ids)
        arrived, results = self._worker.take_outcome()
        released = self._worker.take_released()
        self._worker.end()
        self._results = results or None
        return KVConnectorTransferResults(
            finished_sending=released, finished_recving=arrived, failed_recving=results.failed
        )

    def build_connector_worker_meta(self) -> StepResults | None:
        return self._results

    def shutdown(self) -> None:
        self._reports.close()
        if self._worker is not None:
            self._worker.close()


def _window(kv_cache_config: KVCacheConfig) -> int | None:
    """The smallest window of layers that keep only blocks in their window; None without such layers."""
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return min((spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)), default=None)


def _defaults(settings: PluginSettings, config: VllmConfig, fingerprint: str) -> Defaults:
    """Defaults for requests without a method, from the settings and the model's calibration record, if any."""
    folder = model_folder(config)
    record = stored_calibration(settings.store.cache_dir, folder, fingerprint)
    where = f"{config.model_config.model} --cache-dir DIR" if folder is None else str(folder)
    num_layers = getattr(config.model_config.hf_text_config, "num_hidden_layers", None)
    defaults = Defaults.from_config(settings.requests, record, f"chunkweave calibrate {where}", num_layers)
    usual = defaults.chooser.choose(MethodRequest())
    logger.info("requests that name no method are answered by %s (%s)", usual.method, usual.why)
    return defaults
