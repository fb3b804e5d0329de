"""From `--model` or `--shape` to an engine. PyTorch and transformers are imported here, when they are needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from chunkweave.cli.console import status, stderr
from chunkweave.config import ComputeConfig
from chunkweave.errors import UsageError

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.engine.engine_options import EngineOptions


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A checkpoint folder or a shape, and how to compute with it.

    Raises:
        UsageError: both were given, or neither.
    """

    folder: Path | None
    shape: str | None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.shape is None):
            raise UsageError("give either --model FOLDER or --shape NAME")

    @property
    def name(self) -> str:
        """What to call the model on screen."""
        return self.shape if self.folder is None else str(self.folder)  # type: ignore[return-value]

    @property
    def random_weights(self) -> bool:
        """Whether the weights are random, so that only times mean something."""
        return self.folder is None

    @contextmanager
    def open(self, **options: "Unpack[EngineOptions]") -> Iterator["Engine"]:
        """An engine that is closed afterwards, Ctrl-C and errors included: what was computed is written by then.

        Raises:
            ModelError: the model cannot be loaded or driven.
            UsageError: no such shape, method, quality, ordering or codec, a quality that was not calibrated, or a
                remote URL that cannot be used.
        """
        engine = self.load(**options)
        try:
            yield engine
        finally:
            with status("writing segments"):
                engine.close()
            stats = engine.store.stats
            if unwritten := stats.writes_failed + stats.writes_skipped:
                stderr().print(f"[yellow]{unwritten} writes of segments to disk or remote were not done.[/yellow]")

    def load(self, **options: "Unpack[EngineOptions]") -> "Engine":
        """Load the model and put an engine around it.

        Raises:
            ModelError: the model cannot be loaded or driven.
            UsageError: no such shape, method, quality or ordering, or a quality that was not calibrated.
        """
        options.setdefault("compute", self.compute)
        with status(f"loading {self.name}"):
            _quiet_transformers()
            from chunkweave.engine.engine import Engine

            if self.folder is not None:
                return Engine.load(self.folder, device=self.device, dtype=self.dtype, **options)
            shape = self.shape or ""
            return Engine.load_shape(shape, device=self.device, dtype=self.dtype, seed=self.seed, **options)


def _quiet_transformers() -> None:
    """No weight-loading bars and no advice from transformers between a command's own lines."""
    logging: Any = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
