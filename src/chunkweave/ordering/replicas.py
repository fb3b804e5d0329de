"""Several engines that share a tier: one global tree and count of requests, and what each engine is told of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread

from chunkweave.errors import StoreError, UsageError
from chunkweave.ordering.arrangement import AccessTable
from chunkweave.trees.chunk_prefix_tree import ChunkPrefixTree, Location
from chunkweave.trees.knowledge_tree import KnowledgeTree
from chunkweave.types import ChunkId


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine process: its name, and the tiers of its own, from fast to slow."""

    name: str
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """News of a replica: the last chunk of `path` lies at `location`, with its tokens, or does so no longer (None)."""

    path: tuple[ChunkId, ...]
    location: Location
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """News of a replica: it was asked for these chunks."""

    replica: str
    chunks: tuple[ChunkId, ...]


class ReplicaDirectory:
    """What all replicas know together, and a compact local view for each (CRAFT §4.1).

    A replica's store and access table tell the directory what changed; they only put it into a queue. Whoever runs the
    directory (`apply_pending`, or a thread by `running`) brings it into the global tree and passes it on: what lies on
    a replica's own tier to that replica's view, what lies on a shared tier to all of them, requests to the access
    tables of the others. So views are late, never in anybody's way, and no truth: an engine's store looks for itself.

    A replica says of a shared tier what it has put or seen there itself; a path is there as long as one says so.
    """

    def __init__(
        self, replicas: Sequence[Replica], shared: Sequence[str] = (), *, window: int = 1000, threshold: int = 2
    ) -> None:
        """A directory of `replicas` that know nothing yet.

        Args:
            replicas: all there will be.
            shared: tiers that all of them read and write.
            window: requests of all replicas together that chunks are counted over.
            threshold: count from which a chunk is promoted.

        Raises:
            UsageError: no replica, two of one name, or a tier is shared and own.
        """
        own = [Location(tier, replica.name) for replica in replicas for tier in replica.tiers]
        common = [Location(tier, replica.name) for replica in replicas for tier in shared]
        if {location.tier for location in own} & set(shared):
            raise UsageError(f"a tier is shared or a replica's own, not both: {', '.join(shared)}")
        self.table: AccessTable[ChunkId] = AccessTable(window)
        self.tree: ChunkPrefixTree[ChunkId] = ChunkPrefixTree([*own, *common], self.table.count, threshold=threshold)
        self.views: Mapping[str, KnowledgeTree[ChunkId]] = {
            replica.name: KnowledgeTree(
                [
                    str(location)
                    for location in (*own, *common)
                    if location in common or location.replica == replica.name
                ]
            )
            for replica in replicas
        }
        self._shared = frozenset(shared)
        self._tables: dict[str, AccessTable[ChunkId]] = {}
        self._news: SimpleQueue[Placement | Asked] = SimpleQueue()

    def join(self, replica: str, stored: KnowledgeTree[ChunkId], table: AccessTable[ChunkId]) -> KnowledgeTree[ChunkId]:
        """Follow what a replica's store shows in `stored` and what its `table` counts; returns its local view.

        Raises:
            UsageError: there is no such replica, or it has joined already.
        """
        if replica not in self.views or replica in self._tables:
            raise UsageError(f"no replica {replica!r} is expected")
        self._tables[replica] = table
        stored.follow(lambda path, tier, tokens: self._news.put(Placement(path, Location(tier, replica), tokens)))
        table.on_note = lambda chunks: self._news.put(Asked(replica, chunks))
        return self.views[replica]

    def apply_pending(self) -> int:
        """Bring in what was said so far; returns how many pieces of news that were. One caller at a time."""
        applied = 0
        while True:
            try:
                self._apply(self._news.get_nowait())
            except Empty:
                return applied
            applied += 1

    @contextmanager
    def running(self, interval_s: float = 0.005) -> Iterator[None]:
        """Meanwhile a thread applies what comes, every `interval_s` seconds."""
        ended = Event()

        def work() -> None:
            while not ended.wait(interval_s):
                self.apply_pending()

        thread = Thread(target=work, name="chunkweave-replicas", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.apply_pending()

    def check(self) -> None:
        """Audit the trees, and that each view has exactly its part of the global one.

        Raises:
            StoreError: they disagree.
        """
        self.tree.check()
        self.table.check()
        for view in self.views.values():
            view.check()
            for name in view.tiers:
                if set(view.paths(name)) != set(self.tree.tree.paths(name)):
                    raise StoreError(f"a local view differs from the global tree on {name}")

    def _apply(self, news: Placement | Asked) -> None:
        if isinstance(news, Asked):
            self.table.note(news.chunks)
            for replica, table in self._tables.items():
                if replica != news.replica:
                    table.note(news.chunks, elsewhere=True)
            return
        name = str(news.location)
        concerned = self.views.values() if news.location.tier in self._shared else [self.views[news.location.replica]]
        for tree in (self.tree.tree, *concerned):
            if news.tokens is None:
                tree.displaced(news.path, name)
            else:
                tree.placed(news.path, name, news.tokens)
