"""Preparation of requests without weights: the tokenizer and the method chooser."""

from collections.abc import Mapping
from pathlib import Path

from chunkweave.config import is_hub_name
from chunkweave.errors import ModelNotFoundError, one_line
from chunkweave.models.adapters import Adapter
from chunkweave.models.gguf import models_folder
from chunkweave.models.hub import hub_folder
from chunkweave.planning.calibration import CALIBRATION_FILE, CalibrationRecord, stored_calibration
from chunkweave.planning.method_choice import MethodChooser, MethodRequest
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer


def load_tokenizer(source: str, flags: Mapping[str, str | None]) -> HuggingFaceTokenizer:
    """Load the tokenizer of a folder or hub name, without weights. One in the hub's cache needs no network.

    Args:
        source: folder or hub name.
        flags: `revision` and `chat_template` (a file or the template itself), as given to vLLM; None: vLLM's default.

    Raises:
        ModelNotFoundError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer, GenerationConfig

    if is_hub_name(source):
        source = str(hub_folder(source, revision=flags.get("revision"), weights=False))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"the tokenizer of {source} cannot be loaded: {one_line(error)}") from error
    if template := flags.get("chat_template"):
        file = Path(template)
        tokenizer.chat_template = file.read_text(encoding="utf-8") if file.is_file() else template
    try:
        ended = GenerationConfig.from_pretrained(source).eos_token_id
    except (OSError, ValueError):
        ended = None
    stops = ended if isinstance(ended, list) else [] if ended is None else [ended]
    return HuggingFaceTokenizer(tokenizer, stop_ids=stops)


def chooser_for(
    source: str,
    *,
    method: str | None,
    quality: str | None,
    dtype: str | None,
    adapter: Adapter | None = None,
) -> MethodChooser:
    """The method chooser, from the operator's settings and a calibration record.

    The record is the one in the model's or adapter's folder, or a shipped one for the bundled models. A record is valid
    for weights and dtype; weights are read only if there is a record to compare with.

    Raises:
        UsageError: `quality` without a record.
    """
    record = _calibration(Path(source), dtype, adapter)
    how = f"chunkweave calibrate {source}" + ("" if adapter is None else f" --adapter {adapter.folder}")
    chooser = MethodChooser(MethodRequest.of(method, quality), record=record, how_to_calibrate=how)
    chooser.choose_usual()
    return chooser


def _calibration(folder: Path, dtype: str | None, adapter: Adapter | None) -> CalibrationRecord | None:
    home = folder if adapter is None else adapter.folder
    if not (home / CALIBRATION_FILE).is_file() and (adapter is not None or folder.parent != models_folder()):
        return None
    from transformers import AutoConfig

    from chunkweave.models.fingerprint import fingerprint_folder

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    meant = dtype if dtype not in (None, "auto") else str(getattr(config, "dtype", None) or "float32")
    key = "" if adapter is None else adapter.key
    return stored_calibration(None, home, fingerprint_folder(folder, config, str(meant).removeprefix("torch."), key))
