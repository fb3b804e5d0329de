"""The connector's half in vLLM's scheduler: which requests to weave, what to save, which blocks to separate.

It makes no plans, because only the workers know the stores. It keeps a mirror of the chunks that they reported as
stored, to decide whether weaving a prompt pays or vLLM should prefill it. If other servers fill a tier too, a request
with chunks missing in the mirror waits until the workers have looked them up there. A request whose chunks another one
is computing waits for these if that is sooner (`PartWaits`).

Positions. All positions are places in the prompt. They split into `[0, local)` in vLLM's own prefix cache, `[local,
stop)` loaded by a weave, and the rest, which vLLM computes. `shared` <= prompt length bounds the blocks that other
requests may find under the client's salt: their KV must be exact. From `shared` on, blocks are hashed with a salt that
names the plan's inputs, so that approximate KV is found only by equal requests.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile
from typing import Any
from uuid import uuid4

from chunkweave.conversation.answer import PrefillReport
from chunkweave.conversation.weave_request import StoredPart, WeaveRequest
from chunkweave.errors import UsageError
from chunkweave.planning.method import reuses_nothing
from chunkweave.planning.method_choice import EXACT_METHODS, FIELD, checked_flag, refuse_unknown_keys
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.find_chunks import ChunkFinder
from chunkweave.prompt.runs import RunIndex
from chunkweave.scheduling.in_progress import Wanted
from chunkweave.store.prefix_trie import PathMatch
from chunkweave.store.records import RemovedTexts, segment_id
from chunkweave.types import ChunkId, SegmentId, Span
from chunkweave.vllm.block_hashes import keep_apart
from chunkweave.vllm.block_owners import BlockOwners
from chunkweave.vllm.inventory import STORED, asked_chunks, inventory_report
from chunkweave.vllm.kv_events import KVEvents
from chunkweave.vllm.lora import AdapterKeys
from chunkweave.vllm.orders import (
    PLACED_PER_COMPUTED,
    AskedOrder,
    Holdings,
    LookupOrder,
    SaveOrder,
    StepOrders,
    StepResults,
    WeaveOrder,
    report_fields,
)
from chunkweave.vllm.removal import (
    FIRST_PASSES,
    FORGET,
    RemovalAnswers,
    RemovalOrder,
    Removed,
    removed_chunks,
    removed_texts,
)
from chunkweave.vllm.request import FIND, Defaults, from_wire, reads_only_of, with_found_chunks
from chunkweave.vllm.store_events import StoredMirror
from chunkweave.vllm.waiting import Computation, PartToStore, PartWaits

logger = logging.getLogger("vllm.chunkweave")


_REMEMBERED = 4096
"""Most woven prompts whose reports are kept, for requests that find their blocks in vLLM's own cache; some kilobytes
each.
"""

_REMEMBERED_POSITIONS = 1 << 20
"""Most recomputed positions in all these reports, about 40 bytes each; with long prompts, fewer reports are kept."""

_MOST_REFUSAL_CHARACTERS = 1000
"""Most characters of the reason why a request is served without reuse: it may quote the request."""


@dataclass(slots=True)
class _Saving:
    """A pending save order: what it will store, and the number of ranks that have not finished it."""

    request_id: str
    stored: tuple[ChunkId | SegmentId, ...]
    ranks: int


@dataclass(slots=True)
class _Tracked:
    """One request with chunks, from arrival until it is finished.

    `local` is the number of its tokens found in vLLM's own prefix cache when it was last scheduled, `found` that of the
    first time: after preemption the cached tokens are its own. Positions below `saved` need no saving. `in_flight`:
    workers write into its blocks; `failed`: they could not. `adapter` is the number of its LoRA adapter. `counted`:
    workers count it, or no client requested it. `lookups` is the number of workers whose remote lookup has not ended.
    `parts` are those that can be stored, in order; `segments` are their ids if exact, `begun` those of exact
    segments that begin with them. Blocks below position `shared`
    are exact and shared with others. `saving` are the numbers of save orders that still read its blocks. `outdated`: it
    uses removed KV, so nothing of it is stored.
    """

    request: WeaveRequest
    parts: tuple[StoredPart, ...] = field(init=False)
    segments: tuple[SegmentId, ...] = field(init=False)
    begun: tuple[SegmentId | None, ...] = field(init=False)
    shared: int = 0
    local: int = 0
    found: int | None = None
    saved: int = 0
    woven: bool = False
    adapter: int = 0
    in_flight: bool = False
    failed: bool = False
    lookups: int = 0
    counted: bool = False
    outdated: bool = False
    saving: set[int] = field(default_factory=set)
    report: PrefillReport | None = None

    def __post_init__(self) -> None:
        self.parts = tuple(self.request.stored_parts())
        self.segments = tuple(segment_id(part.id, part.context) for part in self.parts)
        self.begun = tuple(_begun(part) for part in self.parts)
        self.counted = not self.request.counts_as_request

    @property
    def exact_method(self) -> bool:
        return self.request.method in EXACT_METHODS

    @property
    def behind_exact(self) -> bool:
        """Whether everything found in vLLM's own cache is exact."""
        return self.local <= self.shared

    def count_exact(self, mirror: StoredMirror) -> int:
        """Number of leading parts that are stored exactly, or are the beginning of a run that is."""
        pairs = zip(self.segments, self.begun, strict=True)
        return sum(1 for _ in takewhile(lambda pair: any(key in mirror for key in pair if key is not None), pairs))

    def missing(self, part: StoredPart) -> int:
        """Number of a part's tokens that are not in vLLM's own cache."""
        return max(0, part.span.stop - max(part.span.start, self.local))

    @property
    def saved_to(self) -> int:
        """Position up to which nothing must be saved. Exact KV in vLLM's own cache may be missing in the stores."""
        return self.saved if self.behind_exact else max(self.saved, self.local)

    @property
    def all_saved(self) -> bool:
        """Whether nothing of its prompt must be saved; true for most steps of its life."""
        nothing = not self.request.kept.kv or self.request.mean is not None
        return self.outdated or nothing or self.saved_to >= self.parts[-1].span.stop


@dataclass(frozen=True, slots=True)
class _StoredOf:
    """The mirror's view of one request's parts; implements `Stored` for `saving_of`."""

    tracked: _Tracked
    mirror: StoredMirror

    @property
    def tree(self) -> "_StoredOf":
        return self

    def match(self, keys: Iterable[ChunkId]) -> PathMatch:  # noqa: ARG002  (they are the request's own)
        """The length of the stored part of its exact path."""
        nodes = self.tracked.count_exact(self.mirror)
        return PathMatch(nodes, sum(map(self.tracked.missing, self.tracked.parts[:nodes])))

    def chunk_tokens(self, chunk: ChunkId) -> int:
        """1 if a segment of a chunk is stored in any context, else 0."""
        return int(chunk in self.mirror)


class ConnectorScheduler:
    """Owns the state of requests with chunks. Called from the scheduler's thread only."""

    def __init__(
        self,
        fingerprint: str,
        start: tuple[int, ...],
        defaults: Defaults,
        *,
        ranks: int = 1,
        window: int | None = None,
        lasting: bool = False,
        waits: PartWaits | None = None,
        events: bool = False,
        finds: bool = False,
        make_finder: Callable[[RunIndex], ChunkFinder] | None = None,
    ) -> None:
        """`fingerprint` is the model's, part of every chunk id; `start` is the beginning of prompts, see `from_wire`.

        `ranks` is the number of workers that share the heads, `window` the smallest one of layers whose blocks leave
        it. `lasting`: stores outlive their process. `waits` records what is being computed. `events`: make KV events.
        `finds`: chunks are found in prompts that name none, by the result of `make_finder` (None: by tokens alone); a
        request may also ask for it.
        """
        self._named = self._fingerprint = fingerprint
        """`_named` is that of the loaded checkpoint, by which slow tiers are named; `_fingerprint` is the current one.
        """
        self._adapter_keys = AdapterKeys()
        self._start = start
        self._defaults = defaults
        self._ranks = ranks
        self._window = window
        self._lasting = lasting
        self._manager: Any = None
        self._owners: BlockOwners
        self._removals = RemovalAnswers()
        self._inventories: dict[str, list[ChunkId]] = {}
        self._forgotten: set[str] | None = set()
        """Salts whose blocks are forgotten with the next orders; None: all."""
        self._requests: dict[str, _Tracked] = {}
        self._saving: dict[int, _Saving] = {}
        self._save_numbers = count()
        self._stored = StoredMirror(ranks)
        self._events = KVEvents(self._stored.held, enabled=events)
        self._waits = PartWaits() if waits is None else waits
        self._weaves = True
        self._stores = ranks
        """Number of workers with a store, that is, those that weave."""
        self._shared = False
        self._orders = StepOrders()
        self._refused: dict[str, str] = {}
        self._arrived: set[str] = set()
        """Requests without blocks that the workers do not know yet."""
        self._reports: OrderedDict[str, PrefillReport] = OrderedDict()
        """Reports of woven blocks in vLLM's own cache, by their salt."""
        self._positions = 0
        self._finds = finds
        self._make_finder = make_finder or partial(ChunkFinder, None)
        self._runs = RunIndex(self._stored.__contains__)
        self._finder = self._make_finder(self._runs) if finds else None

    def reset(self) -> None:
        """Make all KV unusable, in the stores and in vLLM's own cache, because the weights may be replaced.

        Chunks get new ids from now on. So even if a worker has not dropped a segment, no later request finds it.
        Requests that have arrived are computed by vLLM, and nothing of them is stored.
        """
        self._fingerprint = f"{self._named}+{uuid4().hex}"
        for request_id, tracked in self._requests.items():
            tracked.outdated = tracked.failed = True
            self._waits.withhold(request_id)
        self._owners.forget(None)
        self._events.clear()
        self._shared = False
        self._arrived.clear()
        self._orders.reset = True

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Set the scheduler's block bookkeeping, from which block ids are read; before the first request."""
        self._manager = manager
        self._owners = BlockOwners(manager)

    def begin_with(self, holdings: Mapping[int, Holdings]) -> None:
        """Set the initial contents of the workers' stores, by rank. Unless all workers weave, weaving is off."""
        for worker_holdings in holdings.values():
            self._stored.add(worker_holdings.stored)
        self._stores = len(holdings)
        self._weaves = self._stores == self._ranks
        self._shared = self._weaves and any(worker_holdings.shared for worker_holdings in holdings.values())

    def add(self, request: Any) -> None:
        """Add a new request. One without our field is not changed, unless chunks are found in prompts.

        A wrong field is logged and reported with the answer, and the request is served without reuse: raising here
        would end the engine.
        """
        self._owners.begin(request)
        params = self._params(request)
        if params is None:
            return
        try:
            woven = self._woven(request, params)
        except UsageError as error:
            reason = str(error)[:_MOST_REFUSAL_CHARACTERS]
            logger.warning("request %s is served without reuse: %s", request.request_id, reason)
            self._refused[request.request_id] = reason
            return
        if woven is None:
            return
        adapter = 0 if request.lora_request is None else int(request.lora_request.lora_int_id)
        tracked = self._requests[request.request_id] = _Tracked(woven, adapter=adapter)
        self._events.add(request, tracked.parts, tracked.segments, self._manager.block_pool.hash_block_size)
        self._salt_blocks(request, tracked)
        if self._shared and not reuses_nothing(woven.choice.made):
            self._arrived.add(request.request_id)
            if any(key not in self._stored for key in self._wanted(tracked)):
                self._orders.lookups.append(LookupOrder(request.request_id, woven.prompt))
                tracked.lookups = self._ranks

    def _woven(self, request: Any, params: Any) -> WeaveRequest | None:
        """The request for the workers; None if it names no chunks, or is a command, which is done here.

        Raises:
            UsageError: a field is wrong.
        """
        if isinstance(params, Mapping) and FORGET in params:
            self._remove(request, params)
            return None
        if isinstance(params, Mapping) and STORED in params:
            refuse_unknown_keys(params, {STORED})
            self._inventories[request.request_id] = asked_chunks(
                params[STORED], fingerprint=self._key(request), salt=request.cache_salt or "", start=self._start
            )
            return None
        return self._parsed(request, params)

    def _salt_blocks(self, request: Any, tracked: "_Tracked") -> None:
        """Let the request find only those blocks in vLLM's own cache that it may use."""
        woven = tracked.request
        # Three cases must find no blocks at all, so their salt is unique. The first round of a method that asks again
        # must not see finished blocks. What only reads must leave none to others either. And if KV that left a window
        # cannot be read back, a weave must begin at 0, or its answer would depend on the contents of vLLM's own cache.
        long = self._weaves and self._window is not None and len(woven.prompt) > self._window
        # A method that reuses nothing ignores vLLM's own cache too: it is the reference for all others.
        nothing = reuses_nothing(woven.choice.made)
        exact = nothing or tracked.exact_method
        tracked.shared = len(woven.prompt) if exact else 0
        own_salt = f"{woven.salt}|{uuid4().hex}"
        if nothing or woven.reads_only or (long and not exact):
            keep_apart(request, own_salt)
        elif not exact:
            tracked.shared = self._exact_stop(tracked)
            salt = woven.salt if woven.mean is None else own_salt  # KV found in vLLM's blocks could not be captured
            keep_apart(request, salt, start=tracked.shared, block_tokens=self._manager.block_pool.hash_block_size)

    def _params(self, request: Any) -> Any:
        """Our field of a request, or what applies without it; None: the request is not ours."""
        transfer_params = request.kv_transfer_params
        params = transfer_params.get(FIELD) if isinstance(transfer_params, Mapping) else None
        return {FIND: True} if params is None and self._finds and _is_plain(request) else params

    def _parsed(self, request: Any, params: Any) -> WeaveRequest | None:
        """The request for the workers; None if it names no chunks and none are found.

        Raises:
            UsageError: a field is wrong, or the prompt is not only text.
        """
        if request.mm_features:
            raise UsageError("its prompt has parts that are not text, such as images")
        read: Callable[..., WeaveRequest | None] = from_wire
        if isinstance(params, Mapping) and "chunks" not in params:
            finds = checked_flag(params.get(FIND, self._finds), FIND)
            if not finds and FIND in params:
                return None
            if finds and not _is_plain(request):
                raise UsageError(f"{FIND} needs a prompt of tokens that may be read from a cache")
            if finds:
                self._finder = self._finder or self._make_finder(self._runs)
                read = partial(with_found_chunks, finder=self._finder)
        woven = read(
            params,
            request.prompt_token_ids or (),
            fingerprint=self._key(request),
            salt=request.cache_salt or "",
            start=self._start,
            defaults=self._defaults,
        )
        if woven is None and reads_only_of(params):  # a short prompt: vLLM would keep its blocks
            keep_apart(request, uuid4().hex)
        return woven

    def matched(self, request: Any, computed: int) -> int | None:
        """Number of tokens after `computed` that the workers can load into the request's blocks.

        None during a remote lookup or a removal, while it waits for parts that others compute, and if vLLM must ask
        again after its hashes have changed.
        """
        if request.request_id in self._removals:
            return None if self._removals.waits(request.request_id) else 0
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.lookups:
            return None
        tracked.local = computed
        if tracked.failed:
            return 0
        if self._waits.is_still_waiting(request.request_id):
            return None
        stop = self._weavable_stop(tracked, request.num_tokens - 1)
        if self._is_to_wait(request.request_id, tracked, stop):
            return None
        if computed and self._window is not None and stop > self._window:
            # vLLM would drop blocks that have left the window but that a weave after them must read. So it is woven
            # from the start, unless the rest is exact and quickly computed.
            if tracked.exact_method and (stop - computed) * PLACED_PER_COMPUTED <= stop:
                return 0
            keep_apart(request, request.request_id)  # unique, or blocks rewoven by another request would be found next
            return None
        return max(0, stop - computed)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Record the request's blocks; with `external_tokens`, order its weave into them. Counts it the first time."""
        self._arrived.discard(request.request_id)
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        counted, tracked.counted = tracked.counted, True
        if request.request_id not in self._waits:
            self._begin(request.request_id, tracked, external_tokens)
        if tracked.found is None:
            tracked.found = tracked.local
        if not external_tokens:
            if not counted and self._weaves:
                woven = None if tracked.behind_exact else tracked.request
                order = AskedOrder(request.request_id, tracked.request.prompt, tracked.local, woven)
                self._orders.asked.append(order)
            return
        stop = tracked.local + external_tokens
        block_ids = tuple(map(tuple, blocks.get_block_ids()))
        shared = tracked.shared
        adapter = tracked.adapter
        self._orders.weaves.append(
            WeaveOrder(request.request_id, tracked.request, block_ids, tracked.local, stop, shared, adapter)
        )
        tracked.saved = max(tracked.saved, stop)
        tracked.woven = tracked.in_flight = True

    def _begin(self, request_id: str, tracked: _Tracked, external_tokens: int) -> None:
        """Record what a request with new blocks computes: which parts others may wait for, and their cost."""
        local = tracked.local
        stop = tracked.local + external_tokens
        ratio = max(tracked.request.reuse.recompute_ratio, 1 / PLACED_PER_COMPUTED)
        exact = tracked.exact_method or (not external_tokens and tracked.behind_exact)
        stored_to = self._kept(tracked) if self._weaves and not tracked.outdated else 0
        parts: list[PartToStore] = []
        weave_tokens = 0.0
        # Positions in the prompt, not in what is left to compute: a part below `local` is in vLLM's cache, one that
        # ends in (local, stop] is woven, one that ends above `stop` is prefilled by vLLM and saved from its blocks.
        for number, part in enumerate(tracked.parts):
            span = part.span
            woven = external_tokens and local < span.stop <= stop
            if woven:
                weave_tokens += len(span) * (ratio if self._is_stored(part) and not part.in_place else 1)
            saved = span.start >= local if woven else span.stop > max(tracked.saved_to, stop if external_tokens else 0)
            if saved and number < stored_to:
                parts.append(PartToStore(part.id, part.context, span.stop, exact))
        profiles = tracked.request.kept.profiles and bool(external_tokens)
        self._waits.begin(request_id, Computation(parts, local, round(weave_tokens), stop, profiles))

    def orders(self, scheduler_output: Any) -> StepOrders:
        """The orders for the workers in this step; call it once per step."""
        orders, self._orders = self._orders, StepOrders()
        if self._forgotten is None or self._forgotten:
            self._owners.forget(self._forgotten)
            self._forgotten = set()
        waiting = {request_id for request_id in self._arrived if not self._requests[request_id].lookups}
        orders.waiting.update({request_id: self._requests[request_id].request for request_id in waiting})
        self._arrived -= waiting
        orders.idle = not scheduler_output.total_num_scheduled_tokens
        self._waits.step(scheduler_output.total_num_scheduled_tokens)
        if self._requests and self._weaves:
            orders.preempted = frozenset(scheduler_output.preempted_req_ids or ()) & self._requests.keys()
            for request_id in orders.preempted:
                self._requests[request_id].saving.clear()
                self._waits.end(request_id)
            orders.saves.extend(self._saves(scheduler_output))
        return orders

    def note(self, results: StepResults | None, arrived: set[str]) -> None:
        """Apply the workers' results, and note the requests whose KV has arrived."""
        for request_id in arrived & self._requests.keys():
            self._requests[request_id].in_flight = False
            self._waits.woven(request_id)
        if results is None:
            return
        self._stored.note(results.copies)
        self._events.changed(results.copies)
        self._removals.note(results.removed)
        self._note_saved(results.saved)
        for request_id in results.answered.keys() & self._requests.keys():
            self._requests[request_id].lookups -= results.answered[request_id]
        for request_id in results.failed & self._requests.keys():
            tracked = self._requests[request_id]
            tracked.failed, tracked.woven, tracked.saved = True, False, 0
            self._waits.end(request_id)
        for request_id in results.reports.keys() & self._requests.keys():
            tracked = self._requests[request_id]
            if tracked.report is None:  # later reports, after preemption, cover only the rest
                tracked.report = results.reports[request_id]
                if not tracked.exact_method and tracked.request.mean is None:
                    self._remember(tracked.request.salt, tracked.report)

    def finished(self, request: Any) -> tuple[bool, dict[str, object] | None]:
        """Remove an ended request, and cancel its weave.

        Returns whether its blocks must be kept until the workers release them, and the report for its answer.
        """
        self._owners.finish(request)
        refused = self._refused.pop(request.request_id, None)
        if refused is not None:
            return False, {FIELD: {"error": refused}}
        if request.request_id in self._removals:
            return False, {FIELD: self._removals.finish(request.request_id).report}
        if (chunks := self._inventories.pop(request.request_id, None)) is not None:
            return False, {FIELD: inventory_report(chunks, self._stored.__contains__)}
        tracked = self._requests.pop(request.request_id, None)
        self._arrived.discard(request.request_id)
        self._waits.end(request.request_id)
        if tracked is None:
            return False, None
        if tracked.in_flight:
            self._orders.cancelled.append(request.request_id)
        elif tracked.saving:
            self._orders.held.append(request.request_id)
        report = tracked.report or self._unreported(tracked)
        return bool(tracked.saving) and not tracked.in_flight, {FIELD: report_fields(tracked.request, report)}

    def take_events(self) -> Sequence[Any]:
        """KV events about the stores since the last call; none if vLLM publishes none."""
        return self._events.take()

    def _remove(self, request: Any, params: Mapping[str, Any]) -> None:
        """Order a removal, stop storing for running requests that use it, and forget vLLM's own blocks.

        Blocks of the whole salt are forgotten, because requests without chunks do not record which chunks their blocks
        hold.

        Raises:
            UsageError: the command is wrong.
        """
        refuse_unknown_keys(params, {FORGET})
        command = params[FORGET]
        salt = request.cache_salt or ""
        keys = [self._key(request, model) for model in {self._named, self._fingerprint}]
        named = [removed_chunks(command, fingerprint=key, salt=salt, start=self._start) for key in keys]
        chunks = None if named[0] is None else frozenset[ChunkId]().union(*filter(None, named))
        first_passes = checked_flag(command.get(FIRST_PASSES, False), FIRST_PASSES)
        texts: RemovedTexts | None = None
        if chunks is not None and not first_passes:
            texts = removed_texts(command, fingerprints=keys, salt=salt, start=self._start)
            chunks |= self._runs.forget(texts.are_in)
        concerned = set()
        for request_id, tracked in () if first_passes else self._requests.items():
            if chunks is None or any(_is_removed(part, chunks, texts) for part in tracked.parts):
                tracked.outdated = True
                concerned.add(request_id)
                self._waits.withhold(request_id)
        if chunks is None:
            self._runs.clear()
            self._forgotten = None
        elif self._forgotten is not None and not first_passes:
            self._forgotten.add(salt)
        silent = self._ranks - self._stores if self._lasting and not first_passes else 0
        removed = Removed(unasked=("disk or remote tier of a worker that weaves nothing",) if silent else ())
        self._removals.begin(request.request_id, self._stores, removed)
        self._orders.removals.append(
            RemovalOrder(request.request_id, chunks, frozenset(concerned), first_passes, texts)
        )

    def _unreported(self, tracked: _Tracked) -> PrefillReport:
        """The report of a request that no worker wove: vLLM computed what its own cache did not have.

        The cached part is exact, or was woven for the same prompt: then the report of that weave describes it. If that
        report is gone, it counts as reused.
        """
        request = tracked.request
        local_tokens = tracked.found or 0
        tokens = len(request.prompt)
        exact = local_tokens <= tracked.shared
        report = None if exact else self._reports.get(request.salt)
        if report is None:
            spans = {KVSource.EXACT: [Span(0, tracked.shared)], KVSource.REUSED: [Span(tracked.shared, tokens)]}
            report = PrefillReport(spans, parameters=request.choice.parameters)
        if (
            exact and not tracked.exact_method and request.mean is None
        ):  # requests that find these blocks under this salt find what vLLM computed
            computed = PrefillReport({KVSource.EXACT: [Span(0, tokens)]}, parameters=request.choice.parameters)
            self._remember(request.salt, computed)
        hit_tokens = sum(len(part.span.within(0, local_tokens)) for part in tracked.parts)
        hits = {"vllm": hit_tokens} if hit_tokens else {}
        return replace(report.clipped(0, local_tokens, tokens), hits=hits, local_tokens=local_tokens)

    def _remember(self, salt: str, report: PrefillReport) -> None:
        self._forget_report(salt)
        self._reports[salt] = report
        self._positions += len(report.recomputed)
        while len(self._reports) > _REMEMBERED or self._positions > _REMEMBERED_POSITIONS:
            self._forget_report(next(iter(self._reports)))

    def _forget_report(self, salt: str) -> None:
        report = self._reports.pop(salt, None)
        if report is not None:
            self._positions -= len(report.recomputed)

    def _key(self, request: Any, fingerprint: str = "") -> str:
        """The fingerprint, by default the current one, with the adapter's key if the request names one."""
        fingerprint = fingerprint or self._fingerprint
        lora = request.lora_request
        return fingerprint if lora is None else f"{fingerprint}+{self._adapter_keys.of(lora)}"

    def _weavable_stop(self, tracked: _Tracked, most: int) -> int:
        """End of the last part of which something is stored, at most `most`; vLLM computes what follows.

        With an exact method it is the end of the exact path, because vLLM computes faster than a weave that saves
        nothing. That end is rounded down to a whole block: vLLM's own prefix cache would leave the same tokens to
        compute, and another number of tokens would round sums differently. Captured requests are woven even if nothing
        is stored, because attention can only be read there. A method that reuses nothing is vLLM's own prefill.
        """
        request = tracked.request
        parts = tracked.parts
        if reuses_nothing(request.choice.made) or not self._weaves:
            return 0
        exact = tracked.count_exact(self._stored)
        captured = request.kept.profiles or request.mean is not None
        if captured and (exact < len(parts) or not tracked.exact_method):
            return min(parts[-1].span.stop, most)
        if tracked.exact_method:
            stop = min(parts[exact - 1].span.stop if exact else 0, most)
            return stop - stop % int(self._manager.coordinator.scheduler_block_size)
        usable = [part for part in parts[exact:] if self._is_stored(part) and not part.in_place]
        return min(max((part.span.stop for part in (*parts[:exact], *usable)), default=0), most)

    def _is_stored(self, part: StoredPart) -> bool:
        """Whether anything is stored of a part's chunk, or of a run that it can be cut out of."""
        return part.id in self._stored or (part.view is not None and part.view.run in self._stored)

    def _exact_stop(self, tracked: _Tracked) -> int:
        """Start of the first part that may be reused approximately: the end of the exact path.

        The last part of a mean's context is computed even if it is stored.
        """
        most = len(tracked.parts) - (tracked.request.mean is not None)
        exact = min(tracked.count_exact(self._stored), most)
        return tracked.parts[exact].span.start if exact < len(tracked.parts) else len(tracked.request.prompt)

    def _kept(self, tracked: _Tracked) -> int:
        """Number of leading parts that may be stored, by the mirror."""
        if not tracked.request.kept.kv:
            return 0
        return len(tracked.request.kept_parts(lambda part: segment_id(part.id, part.context) in self._stored))

    def _is_to_wait(self, request_id: str, tracked: _Tracked, weavable: int) -> bool:
        """Whether a request waits for parts that are not stored and that others compute.

        A request for a mean never waits: few of these parts would serve it (`prefer_least_read`), and its sender has
        sent them.
        """
        request = tracked.request
        local = tracked.local
        if not len(self._waits) or not self._weaves or reuses_nothing(request.choice.made):
            return False
        if request.mean is not None:
            return False
        share = request.choice.recomputed_share
        wanted = Wanted(
            [part.id for part in tracked.parts],
            [tracked.missing(part) for part in tracked.parts],
            len(request.prompt) - local,
            None if share is None else 1 - share,
        )
        stored = _StoredOf(tracked, self._stored)
        woven = [part.id for part in tracked.parts if part.span.stop <= weavable]
        return self._waits.waits(request_id, wanted, stored, woven=woven, profiles=request.kept.profiles)

    def _wanted(self, tracked: _Tracked) -> Iterable[ChunkId | SegmentId]:
        """What is useful of each part: anything of its chunk, or its segment if only that is reused."""
        pairs = zip(tracked.parts, tracked.segments, strict=True)
        return (segment if tracked.exact_method or part.in_place else part.id for part, segment in pairs)

    def _saves(self, output: Any) -> list[SaveOrder]:
        computed_before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed_before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        saves = []
        for request_id, start in computed_before.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.all_saved:
                continue
            # vLLM reports tokens computed before this step. The orders are read by the workers after its forward, so
            # the KV below `computed` is in the blocks then.
            computed = start + output.num_scheduled_tokens[request_id]
            self._waits.progress(request_id, computed)
            done = [at for at, part in enumerate(tracked.parts) if tracked.saved_to < part.span.stop <= computed]
            windowed = self._window is not None
            if not done and not windowed:
                continue
            blocks = tuple(map(tuple, self._manager.get_block_ids(request_id)))
            exact = not tracked.woven and tracked.behind_exact
            readable = start if windowed else 0
            number = self._expect(request_id, tracked, done, exact=exact or tracked.exact_method)
            order = SaveOrder(
                request_id, tracked.request, blocks, tracked.saved, computed, exact, readable, windowed, number
            )
            saves.append(replace(order, adapter=tracked.adapter))
            tracked.saved = max((tracked.parts[at].span.stop for at in done), default=tracked.saved)
        return saves

    def _expect(self, request_id: str, tracked: _Tracked, done: Sequence[int], *, exact: bool) -> int:
        """Record a save of the parts with these indices; returns its number."""
        stored_to = self._kept(tracked) if done else 0
        stored: list[ChunkId | SegmentId] = [tracked.parts[at].id for at in done if at < stored_to]
        stored += [tracked.segments[at] for at in done if exact and at < stored_to]
        # Blocks must not be freed while a save order reads them: `saving` keeps the order's number until all ranks
        # report it. The mirror counts the parts as stored already, because workers save before they look up.
        number = next(self._save_numbers)
        tracked.saving.add(number)
        self._saving[number] = _Saving(request_id, tuple(stored), self._ranks)
        self._stored.expect(stored)
        self._waits.stored(request_id, [tracked.parts[at].id for at in done])
        return number

    def _note_saved(self, saved: Mapping[int, int]) -> None:
        for number, ranks in saved.items():
            saving = self._saving[number]
            saving.ranks -= ranks
            if saving.ranks:
                continue
            del self._saving[number]
            self._stored.settle(saving.stored)
            tracked = self._requests.get(saving.request_id)
            if tracked is not None:
                tracked.saving.discard(number)


def _begun(part: StoredPart) -> SegmentId | None:
    """The exact segment of a run that begins with a part, behind the same parts."""
    return segment_id(part.view.run, part.context) if part.view is not None and not part.view.offset else None


def _is_removed(part: StoredPart, chunks: Set[ChunkId], texts: RemovedTexts | None) -> bool:
    return part.id in chunks or (texts is not None and texts.are_in(part.id, part.token_ids))


def _is_plain(request: Any) -> bool:
    """Whether chunks can be found in a request's prompt: it consists of tokens, and may be read from a cache."""
    if request.mm_features or request.pooling_params is not None or getattr(request, "prompt_embeds", None) is not None:
        return False
    return bool(request.prompt_token_ids) and not getattr(request, "skip_reading_prefix_cache", False)
