"""Writes what `tests/integration/test_written_before.py` reads; run with the version that is to be read.

    PYTHONPATH=<that version>/src python write.py <empty folder>

The calibration record comes from its command line, see the README beside this.
"""

import sys
from pathlib import Path

from chunkweave import Chunk, Engine, StoreConfig
from chunkweave.store.shared_folder import PinFile, Tombstones

TOWERS = [Chunk("The Ger Tower has 200 steps.", source="ger"), Chunk("The Sel Tower has 201 steps.", source="sel")]
GONE = Chunk("Gone.", source="gone")
QUESTION = "How many steps has the Sel Tower?"


def load(**store: object) -> Engine:
    """The bundled reader over a store."""
    return Engine.load("reader", device="cpu", dtype="float32", store=StoreConfig(**store))


def ask(engine: Engine, chunks: list[Chunk]) -> None:
    """What is computed for it is stored."""
    engine.generate(QUESTION, chunks, system="Answer.", max_new_tokens=1, method="prefix")


def write(folder: Path) -> None:
    """A cache folder with pins and with a segment that could not be deleted, and a remote with segments in int8."""
    cache = folder / "cache"
    with load(cache_dir=cache) as engine:
        ask(engine, TOWERS)
        ask(engine, [GONE])
        stored = engine.store.records()
    [fingerprint] = (path.name for path in cache.iterdir())
    PinFile(cache).add(fingerprint, [record.id for record in stored if record.source == "sel"])
    Tombstones(cache, fingerprint, "disk").add([record for record in stored if record.source == "gone"])
    with load(remote_url=f"file://{folder}/remote", codec="int8") as engine:
        ask(engine, TOWERS)


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
