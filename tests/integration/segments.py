"""Segments of random KV that follows from their number, for the tests of tiers."""

from pathlib import Path

import torch

from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.prompt.parts import chunk_id
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.segment_file import DiskSegment, read_header

FINGERPRINT = "f" * 32


def make_segment(
    number: int,
    *,
    layers: int = 3,
    tokens: int = 6,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    contexts: int = 1,
) -> tuple[SegmentRecord, SegmentKV]:
    generator = torch.Generator().manual_seed(number)
    kv = SegmentKV(torch.randn(layers, 2, tokens, kv_heads, head_dim, generator=generator).to(dtype))
    ids = tuple(torch.randint(0, 100_000, (tokens,), generator=generator).tolist())
    context = tuple(chunk_id(FINGERPRINT, "", (number, i)) for i in range(contexts))
    chunk = chunk_id(FINGERPRINT, "", (number, *ids))
    record = SegmentRecord.of(chunk, context, ids, exact=bool(number % 2), nbytes=kv.nbytes, source=f"Ä {number}.md")
    return record, kv


def open_segment(path: Path) -> DiskSegment:
    return DiskSegment(path, read_header(path))


def layers_of(source: SegmentSource | None, layers: int = 3) -> torch.Tensor:
    assert source is not None
    return torch.stack([source.layer(layer) for layer in range(layers)])


def files_under(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir())
