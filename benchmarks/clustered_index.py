"""Synthetic vectors distributed like those of text, questions of the same distribution, and an index file over them.

Vectors of different weight (Zipf) around 2000 centres, generated from a seed; questions are further such vectors. As
with text, they fill few of the dimensions: of 899 of them the intrinsic dimension (Levina and Bickel, 20 neighbours) is
12.0 and the median cosine with the nearest other 0.65; of as many passages of MuSiQue, embedded by all-MiniLM-L6-v2,
they are 12.0 and 0.69.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from chunkweave.errors import UsageError
from chunkweave.retrieval.faiss_indexes import FaissIndex, import_faiss, new_faiss_index, wrapped
from chunkweave.retrieval.indexes import IndexConfig, IndexKind, top_hits

BLOCK = 100_000
CENTRES = 2000
LATENT = 24
SPREAD = 0.7
WIDEST = 512


@dataclass(frozen=True)
class World:
    """`count` vectors of a seed, and the index over them."""

    index: str = "ivf"
    vectors: int = 1_000_000
    dimension: int = 384
    lists: int = 1024
    seed: int = 0

    @property
    def config(self) -> IndexConfig:
        """The index without a search ratio."""
        kind = IndexKind(self.index)
        return IndexConfig(kind, lists=self.lists if kind is IndexKind.IVF else 0)

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Its vectors in blocks `[rows, dimension]`."""
        return self._drawn(self.vectors, 0)

    def questions(self, count: int) -> NDArray[np.float32]:
        """`[count, dimension]`, around the same centres and not among the vectors."""
        return np.concatenate(list(self._drawn(count, 1)))

    def _drawn(self, count: int, draw: int) -> Iterator[NDArray[np.float32]]:
        """Unit vectors in a plane of `LATENT` dimensions; a seed and a draw always give the same."""
        fixed, rng = np.random.default_rng(self.seed), np.random.default_rng([self.seed, draw])
        plane = fixed.standard_normal((LATENT, self.dimension), dtype=np.float32)
        centres = fixed.standard_normal((CENTRES, LATENT), dtype=np.float32)
        weights = 1.0 / np.arange(1, CENTRES + 1) ** 0.6
        for start in range(0, count, BLOCK):
            rows = min(BLOCK, count - start)
            latent = SPREAD * rng.standard_normal((rows, LATENT), dtype=np.float32)
            latent += centres[rng.choice(CENTRES, size=rows, p=weights / weights.sum())]
            block = latent @ plane
            block /= np.linalg.norm(block, axis=1, keepdims=True)
            yield block


@dataclass(frozen=True)
class Built:
    """An index, and the seconds to build it, in this run and earlier ones."""

    index: FaissIndex
    build_s: float


def open_index(world: World, file: Path | None = None) -> Built:
    """The index of a world: continued from `file`, which is written after every block.

    So a graph over a million vectors, which takes long to build, can be built in several runs.

    Raises:
        UsageError: the file has the index of another world.
    """
    built = None if file is None else _read(world, file)
    index, build_s = (None, 0.0) if built is None else (built.index, built.build_s)
    rows, number = 0, -(-world.vectors // BLOCK)
    for block in track(world.blocks(), "indexing", number, console=Console(stderr=True), transient=True):
        rows += len(block)
        if index is not None and rows <= len(index):
            continue
        started = time.perf_counter()
        if index is None:
            index = new_faiss_index(world.config.resolved(world.vectors), [block], world.dimension)
        index.add(block)
        build_s += time.perf_counter() - started
        if file is not None and (world.index == "hnsw" or rows == world.vectors):
            _write(world, Built(index, build_s), file)
    assert index is not None, "a world has vectors"
    return Built(index, build_s)


def at_ratio(index: FaissIndex, ratio: float, stages: int) -> FaissIndex:
    """The same index, searched at another ratio: the share of IVF's lists, or of the widest queue of HNSW."""
    settings = index.config.as_dict()
    if index.config.kind is IndexKind.IVF:
        settings |= {"probes": max(1, round(index.config.lists * ratio))}
        index.faiss_index.nprobe = settings["probes"]
    else:
        settings |= {"width": max(1, round(WIDEST * ratio)), "probe_width": max(1, round(WIDEST * ratio / 8))}
    return wrapped(index.faiss_index, IndexConfig.from_dict(settings | {"stages": stages}))


def exact_rows(world: World, questions: NDArray[np.float32], k: int) -> list[tuple[int, ...]]:
    """The true top-k of every question, by brute force over the blocks."""
    scores: list[list[NDArray[np.float32]]] = [[] for _ in questions]
    rows: list[list[NDArray[np.int64]]] = [[] for _ in questions]
    start = 0
    for block in world.blocks():
        products = questions @ block.T
        best = np.argpartition(-products, k, axis=1)[:, :k]
        for number in range(len(questions)):
            scores[number].append(products[number, best[number]])
            rows[number].append(best[number] + start)
        start += len(block)
    return [top_hits(np.concatenate(r), np.concatenate(s), k).rows for r, s in zip(rows, scores, strict=True)]


def _note(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def _write(world: World, built: Built, file: Path) -> None:
    partial = file.with_name(f".{file.name}.partial")
    import_faiss().write_index(built.index.faiss_index, str(partial))
    _note(file).unlink(missing_ok=True)
    partial.replace(file)
    note = {"world": asdict(world), "config": built.index.config.as_dict(), "build_s": built.build_s}
    _note(file).write_text(json.dumps(note), encoding="utf-8")


def _read(world: World, file: Path) -> Built | None:
    if not file.exists() or not _note(file).exists():
        return None
    note = json.loads(_note(file).read_text(encoding="utf-8"))
    if note["world"] != asdict(world):
        raise UsageError(f"{file} has the index of another world ({note['world']}): name another file, or remove it")
    index = wrapped(import_faiss().read_index(str(file)), IndexConfig.from_dict(note["config"]))
    return Built(index, note["build_s"])
