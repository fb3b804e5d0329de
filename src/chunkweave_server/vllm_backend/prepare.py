"""Preparation of requests without weights: the tokenizer, the method chooser, and prompts of chats."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from chunkweave.config import ReuseConfig, is_hub_name
from chunkweave.errors import ModelNotFoundError, one_line
from chunkweave.models.adapters import Adapter
from chunkweave.models.gguf import models_folder
from chunkweave.models.hub import hub_folder
from chunkweave.planning.calibration import CALIBRATION_FILE, CalibrationRecord, stored_calibration
from chunkweave.planning.method_choice import MethodChooser, MethodRequest
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.parts import Prompt
from chunkweave.prompt.rendering import Messages, Rendered
from chunkweave.prompt.request import Request
from chunkweave.prompt.template import rendered_exchange, template_for, template_with
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class ChatDetails:
    """Details of a chat besides questions and answers: the adapter's name, and input of the chat template.

    `variables` are the template's: `tools`, `chat_template_kwargs`. `exchanges` are the messages of assistant and tools
    after each question, if tools were called.
    """

    model: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    exchanges: Sequence[Messages] = ()


_BUILDERS = 64
"""Most sets of tools and adapters whose builders are cached."""


class ChatPrompts:
    """Builds prompts of chats with tools, adapters or template variables. Thread-safe."""

    def __init__(self, builder: PromptBuilder, model: str) -> None:
        """`builder` is that of `model`. Chunk ids have its name instead of a fingerprint: for this server only."""
        self._builder = builder
        self._model = model
        self._builder_for = lru_cache(_BUILDERS)(self._alike)

    def build(self, chat: ChatDetails, request: Request, limit: PromptLimit) -> Prompt:
        """The prompt of a request that belongs to no conversation.

        Raises:
            UsageError: an empty question or chunk, or a chat template without tools.
            PromptTooLongError: the prompt is above the `limit`.
        """
        model = None if chat.model == self._model else chat.model
        variables = json.dumps(chat.variables, sort_keys=True)
        limit.check_characters(len(variables) + len(json.dumps(chat.exchanges)), "tools and their messages")
        builder, tokenizer = self._builder_for(model, variables), self._builder.tokenizer
        last = len(chat.exchanges) - 1
        exchanges = [
            rendered_exchange(tokenizer, messages, chat.variables, first=not number, answered=number < last)
            if messages
            else None
            for number, messages in enumerate(chat.exchanges)
        ]
        history: list[tuple[str, str | Rendered]] = list(request.history)
        for number, found in enumerate(exchanges[:-1]):
            history[number] = history[number][0], found or history[number][1]
        return builder.build(
            request.question,
            request.chunks,
            system=request.system,
            history=history,
            history_chunks=request.history_chunks,
            exchange=exchanges[-1] if exchanges else None,
            cache_salt=request.cache_salt,
            limit=limit,
        )

    def _alike(self, adapter: str | None, variables: str) -> PromptBuilder:
        """The builder for an adapter, whose chunk ids differ from the model's, and for a template with `variables`."""
        read = json.loads(variables)
        if adapter is None and not read:
            return self._builder
        template = template_with(self._builder.tokenizer, read) if read else template_for(self._builder.tokenizer)
        return self._builder.alike(template, f"front:{self._model}" + (f"+{adapter}" if adapter else ""))


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
    reuse: ReuseConfig,
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
    chooser = MethodChooser(MethodRequest.of(method, quality), reuse, record, how)
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
