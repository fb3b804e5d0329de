"""The connector that vLLM makes: one in the scheduler, one in each worker. A facade: the two sides do the work."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from chunkweave.config import StoreConfig, parse_bytes
from chunkweave.errors import ModelError, UsageError
from chunkweave.models.fingerprint import fingerprint_folder, fingerprint_shape
from chunkweave.models.inspection import geometry_of
from chunkweave.vllm import gate
from chunkweave.vllm.messages import StepOrders, StepResults
from chunkweave.vllm.plugin import loaded_model
from chunkweave.vllm.request import SETTINGS, Defaults
from chunkweave.vllm.scheduler_side import SchedulerSide
from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.vllm.worker_side import WorkerSide

logger = logging.getLogger("vllm.chunkweave")  # vLLM shows what is logged below its own name

_OWN_KEYS = {"host_budget", "policy", "max_variants", "layers_per_step"}


class ChunkweaveConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has no types
    """Brings chunks' KV into vLLM's blocks, by plans of chunkweave's reuse methods.

    `kv_connector_extra_config` may hold `host_budget` (bytes of segments in each worker's memory, `4GiB`), `policy`
    (eviction, `lru`), `max_variants`, `layers_per_step` (layers woven in a step that computes other requests too) and
    what requests get that do not say: `method`, `recompute_ratio`, `check_layers`, `seed`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        unknown = sorted(set(extra) - SETTINGS - _OWN_KEYS)
        if unknown:
            known = ", ".join(sorted(SETTINGS | _OWN_KEYS))
            raise UsageError(f"unknown keys of kv_connector_extra_config: {', '.join(unknown)}; there are: {known}")
        self._extra = extra
        self._layers_per_step = _layers_per_step(extra)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._blocks_failed: set[int] = set()
        self._results: StepResults | None = None
        if role is KVConnectorRole.SCHEDULER:
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            bos = getattr(vllm_config.model_config.hf_config, "bos_token_id", None)
            fingerprint = model_fingerprint(vllm_config)
            layers = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
            self._scheduler = SchedulerSide(fingerprint, bos, Defaults.from_config(extra), layers)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is saved here: it is a cache."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        assert self._scheduler is not None
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        assert self._scheduler is not None
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.note(connector_output.kv_connector_worker_meta, connector_output.finished_recving or set())

    def request_finished(self, request: Any, _block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    def register_kv_caches(self, _kv_caches: dict[str, Any]) -> None:
        """The caches exist: look the model over, try it, and switch weaving on, or log why not."""
        try:
            layers = StockLayers(loaded_model(), self._vllm_config, self._kv_cache_config)
            gate.check(layers)
        except ModelError as error:
            logger.error("chunkweave weaves nothing, requests are served by vLLM alone: %s", error)
            return
        self._worker = WorkerSide(
            layers,
            geometry_of(self._vllm_config.model_config.hf_config),
            model_fingerprint(self._vllm_config),
            StoreConfig(
                budget_bytes=parse_bytes(str(self._extra.get("host_budget", "4GiB"))),
                policy=self._extra.get("policy", "lru"),
                max_variants=self._extra.get("max_variants", StoreConfig().max_variants),
            ),
            layers_per_step=self._layers_per_step,
        )
        logger.info("chunkweave weaves: %s passed the start-up gate", type(loaded_model()).__name__)

    def start_load_kv(self, _forward_context: Any, **_kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.step(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests are scheduled after their weave."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing here: whole parts are saved from the blocks, see `wait_for_save`."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._worker.forget(finished_req_ids)
        arrived, self._blocks_failed, results = self._worker.take_outcome()
        self._results = results if results.has_news else None
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._blocks_failed

    def build_connector_worker_meta(self) -> StepResults | None:
        return self._results

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _layers_per_step(extra: Mapping[str, Any]) -> int:
    layers = extra.get("layers_per_step", 4)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise UsageError(f"layers_per_step must be a whole number from 1 on, not {layers!r}")
    return layers


def model_fingerprint(config: VllmConfig) -> str:
    """The fingerprint that chunkweave's own engine gives the same checkpoint; with dummy weights, of shape and seed."""
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if config.load_config.load_format == "dummy":
        return fingerprint_shape(model.hf_config, dtype, model.seed or 0)
    folder = Path(model.model)
    if not folder.is_dir():  # a name on a hub: by now its files lie in the hub's own cache
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    return fingerprint_folder(folder, model.hf_config, dtype)
