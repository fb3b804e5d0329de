"""What vLLM and tests would spawn is forked from a process that has imported vLLM, and starts some ten seconds sooner.

A process has the environment that its parent has when it makes it, as a spawned one does.
"""

import multiprocessing
import os
from multiprocessing import context
from typing import Any

PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]


class _Process(context.ForkServerProcess):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def fork_instead_of_spawning() -> None:
    """From now on, in this process. Its own `fork` would take threads and engines of earlier tests along."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context._concrete_contexts["spawn"] = _Context()
