"""Tokenizers of several families, made from the bundled one: its merges, their control tokens and chat templates."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

import chunkweave
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer

ASSETS = Path(chunkweave.__file__).parent / "assets"

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)


def control_ids(tokenizer: HuggingFaceTokenizer) -> frozenset[int]:
    """Ids of the tokens that are no text."""
    added = tokenizer._tokenizer.added_tokens_decoder.items()
    return frozenset(number for number, token in added if token.special or len(token.content.strip()) > 1)


@cache
def bundled() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(PreTrainedTokenizerFast.from_pretrained(ASSETS / "tokenizer"))


def family(
    chat_template: str | None,
    *,
    special: tuple[str | AddedToken, ...] = (),
    added: tuple[str, ...] = (),
    adds_bos: bool = True,
    composed: bool = False,
    folded: bool = False,
    **names: Any,
) -> HuggingFaceTokenizer:
    """The bundled tokenizer with other control tokens, BOS habit and chat template; texts may be `composed` (NFC).

    With `folded` they are NFKC, and control tokens are looked for behind that: other characters may become theirs.
    """
    backend = Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    if not adds_bos:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if composed:
        backend.normalizer = normalizers.NFC()
    if folded:
        backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens(
        [
            token if isinstance(token, AddedToken) else AddedToken(token, special=True, normalized=folded)
            for token in special
        ]
    )
    backend.add_tokens([AddedToken(token, normalized=folded) for token in added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=chat_template, **{"bos_token": "<s>", "eos_token": "</s>"} | names
    )
    return HuggingFaceTokenizer(fast)


@cache
def llama() -> HuggingFaceTokenizer:
    return family(LLAMA_TEMPLATE, special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))


@cache
def chatml() -> HuggingFaceTokenizer:
    return family(
        CHATML_TEMPLATE,
        special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        added=("<think>", "  "),
        adds_bos=False,
        bos_token=None,
        eos_token="<|im_end|>",
    )


@cache
def qwen() -> HuggingFaceTokenizer:
    return family(
        CHATML_TEMPLATE,
        special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        added=("<think>", "</think>", "<tool_call>", "<|fim_prefix|>"),
        adds_bos=False,
        composed=True,
        bos_token=None,
        eos_token="<|im_end|>",
    )


@cache
def phi() -> HuggingFaceTokenizer:
    """Its control tokens swallow white space behind them; one is a control token only as a word of its own."""
    ends = [AddedToken(f"<|{name}|>", special=True, rstrip=True, normalized=False) for name in ("im_start", "im_end")]
    return family(CHATML_TEMPLATE, special=(*ends, AddedToken("<|word|>", special=True, single_word=True)))


@cache
def sentencepiece() -> HuggingFaceTokenizer:
    """As SentencePiece makes them: unigrams over texts whose spaces are a sign, with bytes for unknown characters."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    spaces = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    names = ["<unk>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=1500, special_tokens=[*names, *(f"<0x{byte:02X}>" for byte in range(256))], unk_token="<unk>"
    )
    lines = (ASSETS / "corpus" / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    backend.train_from_iterator([json.loads(line)["text"] for line in lines], trainer)
    made = json.loads(backend.to_str())
    made["model"]["byte_fallback"] = True
    made["added_tokens"] = [one for one in made["added_tokens"] if one["content"] in names]
    backend = Tokenizer.from_str(json.dumps(made))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=LLAMA_TEMPLATE, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return HuggingFaceTokenizer(fast)


@cache
def mistral() -> HuggingFaceTokenizer:
    return family(MISTRAL_TEMPLATE, special=("[INST]", "[/INST]"))


@cache
def without_template() -> HuggingFaceTokenizer:
    return family(None)
