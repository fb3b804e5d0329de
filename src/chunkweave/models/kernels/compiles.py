"""Watches Triton compile this package's kernels: at start-up that is progress, while serving it is a stall."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class KernelCompiles:
    """Counts the kernels of this package that the process compiled, or read from Triton's cache on disk.

    `stalls` are those compiled after start-up, when a request waited for them; `stall_s` are their seconds.
    """

    def __init__(self) -> None:
        self.logger = logging.getLogger(__name__)
        self.stalls = 0
        self.stall_s = 0.0
        self._total = 0
        self._at_start: list[float] = []
        self._began_s = 0.0
        self._hooked = False

    @contextmanager
    def at_start(self, total: int) -> Iterator[None]:
        """Count what is compiled inside, `total` kernels at most, as start-up; logs each, and their number and time."""
        self._hook()
        self._total, self._at_start = total, []
        try:
            yield
        finally:
            self._total = 0
        if self._at_start:
            count = len(self._at_start)
            spent_s = sum(self._at_start)
            self.logger.info("start-up compiled %d attention kernels in %.1f s", count, spent_s)

    def began(self) -> None:
        """Note that Triton begins to compile one of our kernels."""
        self._began_s = time.perf_counter()

    def ended(self, key: object) -> None:
        """Count the kernel whose compilation began last, and log it; `key` is all that it was compiled for."""
        spent_s = time.perf_counter() - self._began_s
        if self._total:
            self._at_start.append(spent_s)
            done = len(self._at_start)
            self.logger.info("attention kernel %d of %d compiled in %.1f s", done, self._total, spent_s)
            return
        self.stalls += 1
        self.stall_s += spent_s
        message = "an attention kernel was compiled after start-up, requests waited %.1f s; please report its key: %s"
        self.logger.warning(message, spent_s, key)

    def _hook(self) -> None:
        """Have Triton call `began` and `ended`, besides the hooks that are there."""
        if self._hooked:
            return
        from triton import knobs

        self._hooked = True
        before = knobs.runtime.jit_cache_hook
        after = knobs.runtime.jit_post_compile_hook

        def on_begin(**event: Any) -> bool | None:
            if _is_ours(event):
                self.began()
            return before(**event) if before is not None else None

        def on_end(**event: Any) -> bool | None:
            if _is_ours(event):
                self.ended(event["key"])
            return after(**event) if after is not None else None

        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = on_begin, on_end


def _is_ours(event: dict[str, Any]) -> bool:
    return str(getattr(event.get("fn"), "module", "")).startswith("chunkweave.")


KERNEL_COMPILES = KernelCompiles()
"""Of this process: Triton's hooks are."""
