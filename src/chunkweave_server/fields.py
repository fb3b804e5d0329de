"""Fields of a completion request that are not in the schema: which are ignored, which the engine backend refuses."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields of OpenAI's API that change no answer here, accepted with any value and not passed on.

`user` and `parallel_tool_calls`, which are in the schema, change nothing either (the latter without tools).
"""

_OF_MESSAGES = frozenset({"annotations", "index", "parsed", "parsed_arguments", "refusal"})
"""Fields of answers that no prompt has, ignored with any value; clients send answers back with them."""

_CONTENTS = frozenset(
    {
        *("attachments", "audio", "audio_url", "experimental_attachments", "file", "files", "function_call"),
        *("image", "image_url", "images", "input_audio", "video", "video_url", "videos"),
    }
)
"""Fields in messages with contents other than text, refused unless they are empty."""

_NO_VALUE = object()

OF_ANSWERS: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "allowed_token_ids": _NO_VALUE,
    "audio": _NO_VALUE,
    "bad_words": [],
    "chat_template": _NO_VALUE,
    "continue_final_message": False,
    "function_call": _NO_VALUE,
    "functions": [],
    "guided_choice": _NO_VALUE,
    "guided_grammar": _NO_VALUE,
    "guided_json": _NO_VALUE,
    "guided_regex": _NO_VALUE,
    "ignore_eos": False,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "kv_transfer_params": _NO_VALUE,
    "length_penalty": 1.0,
    "logit_bias": {},
    "logprob_token_ids": _NO_VALUE,
    "min_p": 0.0,
    "min_tokens": 0,
    "modalities": ["text"],
    "no_stop_trim": False,
    "prediction": _NO_VALUE,
    "priority": 0,
    "prompt_embeds": _NO_VALUE,
    "prompt_logprobs": _NO_VALUE,
    "reasoning_effort": _NO_VALUE,
    "repetition_penalty": 1.0,
    "return_hidden_states": False,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": False,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_token_ids": [],
    "stream_reasoning": True,
    "structured_outputs": _NO_VALUE,
    "suffix": "",
    "thinking_token_budget": _NO_VALUE,
    "top_k": -1,
    "truncate_prompt_tokens": _NO_VALUE,
    "use_beam_search": False,
    "verbosity": "medium",
    "watermarking": _NO_VALUE,
    "web_search_options": _NO_VALUE,
}
"""Fields of OpenAI, vLLM and SGLang that change answers, each with the only value that the engine backend accepts.

vLLM's router writes many of these into every request.
"""

UNKNOWN_HEADER = "x-chunkweave-unknown-fields"
"""Header of an answer that names the request's unknown fields."""

CAPPED_HEADER = "x-chunkweave-max-tokens"
"""Header of an answer whose `max_tokens` was lowered to this number."""

_MOST_NAMED = 16
_MOST_CHARACTERS = 64


def refused_by_engine(extra: Mapping[str, Any]) -> list[str]:
    """The names of fields whose values only vLLM supports."""
    return [name for name, value in extra.items() if name in OF_ANSWERS and value != OF_ANSWERS[name]]


def unknown_fields(extra: Mapping[str, Any]) -> list[str]:
    """The names of fields that neither OpenAI's API nor vLLM's is known to have."""
    return [name for name in extra if name not in OF_ANSWERS and name not in WITHOUT_EFFECT]


def unread_fields(extra: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names of further fields in a message: those with contents that cannot be read, and other unknown ones."""
    contents = [name for name, value in extra.items() if name in _CONTENTS and value]
    return contents, [name for name in extra if name not in _OF_MESSAGES and name not in contents]


def as_header(names: Iterable[str]) -> str:
    """Paths of fields as the value of a header: at most 16, each of at most 64 characters; others become `?`."""
    names = list(names)
    listed = [re.sub(r"[^][A-Za-z0-9_.-]", "?", name[:_MOST_CHARACTERS]) for name in names[:_MOST_NAMED]]
    more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join((*listed, *more))
