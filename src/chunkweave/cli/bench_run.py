"""The frame of every benchmark: from samples to a table and a file, also if it is interrupted."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Output, stderr
from chunkweave.eval.results import BenchmarkResult

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine

SampleT = TypeVar("SampleT")


class Row(Protocol):
    """One line of a result."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""


RowT = TypeVar("RowT", bound=Row)


class BenchmarkRun(ABC, Generic[SampleT, RowT]):
    """One measurement. `samples` grow while it goes on, by whole questions or steps: they are what a result covers."""

    def __init__(self, name: str, engine: "Engine", config: dict[str, Any], seed: int) -> None:
        self.engine = engine
        self.samples: list[SampleT] = []
        self._name = name
        self._config = config
        self._seed = seed

    @abstractmethod
    def summarize(self) -> list[RowT]:
        """The samples, summed up: one row a contender."""

    @abstractmethod
    def more(self) -> dict[str, Any]:
        """What this benchmark's result has beside its rows."""

    @abstractmethod
    def table(self, rows: Sequence[RowT], result: dict[str, Any]) -> Table:
        """The rows for people; `result` says how they came about."""

    def draw(self, rows: Sequence[RowT]) -> None:
        """Draw what was asked for beside the table."""

    def result(self, rows: Sequence[RowT], *, complete: bool = True) -> dict[str, Any]:
        """The JSON object that docs/benchmarks.md describes; what was "auto" is resolved in it."""
        import torch

        model = self.engine.loaded.model
        resolved = {
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        return BenchmarkResult(
            benchmark=self._name,
            command=options.command_line(),
            seed=self._seed,
            config={**self._config, **resolved},
            rows=[row.as_dict() for row in rows],
            more=self.more(),
            complete=complete,
        ).as_dict()

    def show(self, output: Output, *, complete: bool = True) -> dict[str, Any]:
        """Print the table and draw what is to be drawn; the result is returned."""
        rows = self.summarize()
        result = self.result(rows, complete=complete)
        output.show(self.table(rows, result))
        self.draw(rows)
        return result

    @contextmanager
    def reported(self, output: Output) -> Iterator[None]:
        """Show the result when the block ends; if it ends early, what there is by then."""
        complete = False
        try:
            yield
            complete = True
        except KeyboardInterrupt:
            if self.samples:
                stderr().print("interrupted: the result covers what was measured so far")
            raise
        finally:
            if self.samples:
                output.finish(self.show(output, complete=complete))
