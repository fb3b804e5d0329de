"""Who waits for which paths: found by any prefix that the paths share."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
WatcherT = TypeVar("WatcherT", bound=Hashable)


class _Place(Generic[KeyT, WatcherT]):
    __slots__ = ("below", "watchers")

    def __init__(self) -> None:
        self.below: dict[KeyT, _Place[KeyT, WatcherT]] = {}
        self.watchers: set[WatcherT] = set()


class PrefixWatch(Generic[KeyT, WatcherT]):
    """Watchers by path. Whatever is said about a node concerns those whose path runs through it. Not thread-safe."""

    def __init__(self) -> None:
        self._root: _Place[KeyT, WatcherT] = _Place()

    def add(self, path: Sequence[KeyT], watcher: WatcherT) -> None:
        """`watcher` is concerned by every prefix of `path`."""
        place = self._root
        for key in path:
            place = place.below.setdefault(key, _Place())
        place.watchers.add(watcher)

    def remove(self, path: Sequence[KeyT], watcher: WatcherT) -> None:
        """Undo an `add`; unknown watchers are ignored."""
        places = [self._root]
        for key in path:
            place = places[-1].below.get(key)
            if place is None:
                return
            places.append(place)
        places[-1].watchers.discard(watcher)
        for key, place, above in zip(reversed(path), reversed(places), reversed(places[:-1]), strict=False):
            if place.watchers or place.below:
                return
            del above.below[key]

    def below(self, path: Sequence[KeyT]) -> Iterator[WatcherT]:
        """Everyone whose path begins with `path`."""
        place = self._root
        for key in path:
            found = place.below.get(key)
            if found is None:
                return
            place = found
        pending = [place]
        while pending:
            place = pending.pop()
            yield from place.watchers
            pending.extend(place.below.values())
