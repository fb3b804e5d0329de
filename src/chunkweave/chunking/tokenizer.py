"""What chunkweave needs of a tokenizer."""

from collections.abc import Sequence
from typing import Protocol


class TextTokenizer(Protocol):
    """Text to token ids and back. Implementations may be called from several threads."""

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """Token ids of `text`, without BOS or EOS.

        With `control_tokens=False` text that spells a control token (`</s>`, `<|im_end|>`) is encoded as the
        ordinary characters that it is, so that a document cannot end a turn or open another.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; special tokens are left out."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """What the model expects at the head of every prompt (BOS), or nothing."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What a base model ends a text with (EOS), or nothing."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: EOS and the end of the assistant's turn."""

    def render_chat(self, messages: list[dict[str, str]]) -> str | None:
        """`messages` ({"role", "content"}) through the chat template, with the header of the assistant's turn.

        None if the tokenizer has no chat template.

        Raises:
            UsageError: the template refuses these messages, for example a system role.
        """
