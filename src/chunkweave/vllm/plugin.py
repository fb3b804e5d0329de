"""The entry point that vLLM loads in every process (`vllm.general_plugins`).

It registers the connector, and keeps a reference to the model that a worker loads, because vLLM creates the connector
later and does not pass the model to it.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from chunkweave.errors import ModelError
from chunkweave.vllm.releases import untested_release

logger = logging.getLogger("vllm.chunkweave")

CONNECTOR = "ChunkweaveConnector"

_loaded_models: list[Any] = []


def register() -> None:
    """Register the connector; called by vLLM in every process, possibly repeatedly. Idempotent.

    On a release of vLLM that was not tested, the connector checks first what it relies on (`untested`).
    """
    untested = untested_release()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR in KVConnectorFactory._registry:
            return
        module = "connector" if untested is None else "untested"
        KVConnectorFactory.register_connector(CONNECTOR, f"chunkweave.vllm.{module}", CONNECTOR)
    except (ImportError, AttributeError, TypeError) as error:
        if untested is None:
            raise
        logger.warning("chunkweave's plug-in is off: it does not know the connectors of vLLM %s (%s)", untested, error)
        return
    with suppress(ImportError, AttributeError):  # then the check of an untested release finds it missing
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        BaseModelLoader.load_model = _keeping_model(BaseModelLoader.load_model)


def loaded_model() -> Any:
    """The last model that this worker loaded.

    Raises:
        ModelError: no model was loaded after the plug-in.
    """
    if not _loaded_models:
        raise ModelError("the plug-in saw no model being loaded; does VLLM_PLUGINS exclude chunkweave's plug-in?")
    return _loaded_models[-1]


def compile_for_logprobs(vocabulary: int, device: Any) -> None:
    """Compile what vLLM would compile for the first request that wants log-probabilities, which can take a minute."""
    import torch
    from vllm.v1.sample.sampler import Sampler

    with torch.inference_mode():
        token = torch.zeros(1, dtype=torch.int64, device=device)
        Sampler.gather_logprobs(torch.zeros(1, vocabulary, device=device), 1, token)


def _keeping_model(load_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, *args, **kwargs)
        _loaded_models[:] = [model]
        return model

    return wrapped
