"""The index of a corpus on disk, so that the graph or the lists need not be made again when it is opened."""

import json
import logging
from typing import Any

import numpy as np

from chunkweave.errors import CorpusError, EmbedderMismatchError, UsageError
from chunkweave.retrieval.corpus_files import CorpusFiles, Manifest, digest_of
from chunkweave.retrieval.faiss_indexes import FaissIndex, import_faiss, wrapped
from chunkweave.retrieval.indexes import IndexConfig

logger = logging.getLogger(__name__)

INDEX_FILE, INDEX_NOTE = "index.faiss", "index.json"
_INDEX_FORMAT = 1


def save_index(files: CorpusFiles, manifest: Manifest, index: FaissIndex) -> None:
    """Write the index, then the note that says what it is an index of.

    Raises:
        CorpusError: they cannot be written.
    """
    data = import_faiss().serialize_index(index.faiss_index).tobytes()
    note = {
        "format": _INDEX_FORMAT,
        "fingerprint": manifest.fingerprint,
        "dimension": index.dimension,
        "rows": len(index),
        "vectors_digest": manifest.vectors_digest,
        "asked": dict(manifest.index),
        "config": index.config.as_dict(),
        "digest": digest_of(data),
    }
    files.write({INDEX_FILE: data, INDEX_NOTE: (json.dumps(note, indent=1) + "\n").encode()})


def stored_index(files: CorpusFiles, manifest: Manifest) -> FaissIndex | None:
    """The index on disk, if it is one of exactly these vectors with these settings; None if it has to be made.

    An index that is damaged or of other vectors is left out, with a line in the log: it can be made again.

    Raises:
        EmbedderMismatchError: it was made by another embedder: somebody put it there.
        UsageError: faiss is not installed.
    """
    try:
        note: dict[str, Any] = json.loads((files.folder / INDEX_NOTE).read_text(encoding="utf-8"))
        if note["format"] != _INDEX_FORMAT:
            return None
        if note["fingerprint"] != manifest.fingerprint or note["dimension"] != manifest.dimension:
            raise EmbedderMismatchError(
                f"{files.folder / INDEX_FILE} was made by the embedder {note['fingerprint']} with {note['dimension']} "
                f"dimensions, the corpus by {manifest.fingerprint} with {manifest.dimension}: remove the index"
            )
        if note["vectors_digest"] != manifest.vectors_digest or note["asked"] != dict(manifest.index):
            return None
        data = (files.folder / INDEX_FILE).read_bytes()
        if digest_of(data) != note["digest"]:
            raise CorpusError("its checksum is wrong")
        faiss_index = import_faiss().deserialize_index(np.frombuffer(data, dtype=np.uint8))
        return wrapped(faiss_index, IndexConfig.from_dict(note["config"]))
    except FileNotFoundError:
        return None
    except (EmbedderMismatchError, UsageError):
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, CorpusError) as error:
        logger.warning("%s is not used, the index is made again: %s", files.folder / INDEX_FILE, error)
        return None
