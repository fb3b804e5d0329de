"""Turns a growing list of token ids into text that can be shown as it comes."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Text of one answer so far: holds back half characters and whatever may become a stop text.

    `text` is what may be shown; it only grows, until `finish` adds what was held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._whole = ""
        self.text = ""
        self.stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """All ids so far -> the text that is new since the last call. Sets `stopped` at a stop text (left out)."""
        self._whole = self._decode(token_ids)
        cut = min((i for i in (self._whole.find(text) for text in self._stop) if i >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            self._whole = self._whole[:cut]
            return self._show(len(self._whole))
        return self._show(len(self._whole) - self._held_back())

    def finish(self) -> str:
        """The text that was held back, now that no more comes."""
        return self._show(len(self._whole))

    def _show(self, length: int) -> str:
        new = self._whole[len(self.text) : length]
        self.text += new
        return new

    def _held_back(self) -> int:
        whole = self._whole
        if whole.endswith(_INCOMPLETE):
            return len(whole) - len(whole.rstrip(_INCOMPLETE))
        longest = max((len(text) for text in self._stop), default=1) - 1
        starts = range(max(0, len(whole) - longest), len(whole))
        return next((len(whole) - i for i in starts if any(text.startswith(whole[i:]) for text in self._stop)), 0)
