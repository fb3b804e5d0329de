"""What vLLM's model is to the store: its fingerprint, and what prompts for it usually begin with."""

import logging
from pathlib import Path

from vllm.config import ModelConfig, VllmConfig

from chunkweave.chunking.hf_tokenizer import HuggingFaceTokenizer
from chunkweave.models.fingerprint import fingerprint_folder, fingerprint_shape

logger = logging.getLogger("vllm.chunkweave")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def model_fingerprint(config: VllmConfig) -> str:
    """The fingerprint that chunkweave's own engine gives the same checkpoint; with dummy weights, of shape and seed."""
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    folder = model_folder(config)
    if folder is None:
        return fingerprint_shape(model.hf_config, dtype, model.seed or 0)
    return fingerprint_folder(folder, model.hf_config, dtype)


def model_folder(config: VllmConfig) -> Path | None:
    """Where the checkpoint's files are; None for dummy weights, which have none."""
    model = config.model_config
    return None if config.load_config.load_format == "dummy" else _folder(model.model, model.revision)


def usual_start(model: ModelConfig) -> tuple[int, ...]:
    """The token ids that belong to nobody at the beginning of a prompt: START, as the project's own engine makes it.

    That is what the model's tokenizer puts before a text. A config may name a BOS that the tokenizer does not add
    (Qwen2.5); so the config is asked only where there is no tokenizer.
    """
    bos = getattr(model.hf_config, "bos_token_id", None)
    named = (bos,) if isinstance(bos, int) else ()
    try:
        folder = _folder(model.tokenizer or model.model, model.tokenizer_revision)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return named
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
        return HuggingFaceTokenizer(tokenizer).start_ids
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        logger.warning("the tokenizer cannot be read (%s): a prompt is taken to begin with %s", error, named)
        return named


def rank_fingerprint(fingerprint: str, rank: int, size: int) -> str:
    """What one of `size` tensor-parallel ranks keeps its segments under: each has a share of the heads only.

    One alone has them all, and shares its segments with the project's own engine.
    """
    return fingerprint if size == 1 else f"{fingerprint}-tp{rank}of{size}"


def _folder(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint; of a name on a hub the files lie in the hub's own cache by now."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))
