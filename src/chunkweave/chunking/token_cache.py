"""Token ids of chunk texts, kept because the same chunks come back request after request."""

from collections import OrderedDict
from threading import Lock


class TokenCache:
    """Least recently used texts leave first when more than `max_tokens` ids are held. Safe to share by threads."""

    def __init__(self, max_tokens: int = 500_000) -> None:
        self._max_tokens = max_tokens
        self._held_tokens = 0
        self._ids_by_text: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str) -> tuple[int, ...] | None:
        """The ids of `text`, which becomes the most recently used; None if it is not held."""
        with self._lock:
            token_ids = self._ids_by_text.get(text)
            if token_ids is not None:
                self._ids_by_text.move_to_end(text)
            return token_ids

    def put(self, text: str, token_ids: tuple[int, ...]) -> None:
        """Hold the ids of `text`, unless they are more than the whole bound."""
        with self._lock:
            self._held_tokens -= len(self._ids_by_text.pop(text, ()))
            if len(token_ids) > self._max_tokens:
                return
            self._ids_by_text[text] = token_ids
            self._held_tokens += len(token_ids)
            while self._held_tokens > self._max_tokens:
                _, dropped = self._ids_by_text.popitem(last=False)
                self._held_tokens -= len(dropped)

    def __len__(self) -> int:
        return len(self._ids_by_text)

    @property
    def held_tokens(self) -> int:
        """Number of ids held."""
        return self._held_tokens
