"""Opens the tiered store of a configuration."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chunkweave.config import DTYPES_ON_CPU, StoreConfig
from chunkweave.errors import DocumentError
from chunkweave.kv.segment import SegmentKV, SegmentSource, cut_of
from chunkweave.planning.cost import CostModel, cost_model_path, stored_cost_model
from chunkweave.prompt.parts import chunk_id
from chunkweave.store.eviction import PrefillSeconds, make_policy, weighs_cost
from chunkweave.store.level import BackgroundWriter, Level, VariantLimits
from chunkweave.store.records import SegmentRecord
from chunkweave.store.shared_folder import Tombstones, locked_folder, read_dtype, write_dtype
from chunkweave.store.store import TieredStore
from chunkweave.store.tier import Tier
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.segment_file import DiskSegment
from chunkweave.types import Geometry

if TYPE_CHECKING:
    from chunkweave.tiers.device import Streams

logger = logging.getLogger(__name__)

UNBOUNDED_BYTES = 1 << 62
_LEAST_QUEUE_BYTES = 64 << 20
_MOST_QUEUE_BYTES = 1 << 30


def eviction_cost(
    config: StoreConfig,
    fingerprint: str,
    cost_model: CostModel | None,
    measure: Callable[[], CostModel] | None,
    name: str,
) -> CostModel | None:
    """The compute costs for a policy that weighs them (RAGCache §5.1 eq. 2); None for other policies.

    The result is `cost_model`, else the measurement of an earlier start with the same folder, else a new measurement.
    It is stored in the folder under `name`. It knows nothing about tiers, so loading decisions do not use it.
    """
    if not weighs_cost(config.policy):
        return None
    cost = cost_model or stored_cost_model(config.cache_dir, fingerprint, name)
    if cost is not None or measure is None:
        return cost
    started = time.perf_counter()
    cost = measure()
    logger.info("prefill was measured for %s in %.1f s", config.policy, time.perf_counter() - started)
    if config.cache_dir is not None:
        path = cost_model_path(config.cache_dir, fingerprint).with_name(name)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            cost.save(path)
        except OSError as error:
            logger.warning("the measured prefill times cannot be stored in %s: %s", path, error)
    return cost


def loading_costs(
    path: Path | None,
    cost: CostModel | None,
    measure: Callable[[], CostModel] | None,
    store: TieredStore[SegmentSource],
    geometry: Geometry,
    dtype: torch.dtype,
) -> CostModel | None:
    """The costs by which segments are loaded or computed: `cost`, else, if a `path` is set, measured and written there.

    Prefill is measured in about two seconds, each slow tier by reading a few segments.
    """
    if cost is not None or path is None or measure is None:
        return cost
    slow = [level for level in store.levels if level.background]
    rates = {level.name: measure_throughput(level.store.tier, geometry, dtype) for level in slow}
    cost = replace(measure(), tier_bytes_per_s=rates)
    try:
        cost.save(path.expanduser())
    except OSError as error:
        logger.warning("the measured costs cannot be written to %s: %s", path, error)
    return cost


def measure_throughput(
    tier: Tier[SegmentSource],
    geometry: Geometry,
    dtype: torch.dtype,
    *,
    tokens: int = 512,
    segments: int = 4,
) -> float:
    """Bytes of in-memory KV per second when a tier is read layer by layer. Deletes the segments that it writes.

    Their files are evicted from the page cache first, so that the device is measured.
    """
    records = []
    shape = (geometry.num_layers, 2, tokens, geometry.num_kv_heads, geometry.head_dim)
    for number in range(segments):
        ids = tuple(range(number, number + tokens))
        kv = SegmentKV(torch.randn(shape, dtype=dtype))
        record = SegmentRecord.of(chunk_id("throughput", "", ids), (), ids, exact=True, nbytes=kv.nbytes)
        tier.put(record, kv)
        records.append(record)
    try:
        sources = [source for record in records if (source := tier.get(record.id)) is not None]
        drop_page_cache(source.path for source in sources if isinstance(source, DiskSegment))
        started = time.perf_counter()
        read = sum(source.layer(layer).nbytes for layer in range(geometry.num_layers) for source in sources)
        return read / (time.perf_counter() - started)
    finally:
        for record in records:
            tier.delete(record.id)


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Evict these files from the page cache, where the system supports it.

    Dirty pages are written first; otherwise they would stay cached.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def open_store(
    config: StoreConfig,
    fingerprint: str,
    device: torch.device,
    streams: "Streams | None" = None,
    cost: CostModel | None = None,
) -> TieredStore[SegmentSource]:
    """The levels of a configuration, from fast to slow: device, host, disk, remote.

    Only the host is always there. A tier's code and its client packages are imported only if it is used. The background
    writer's queue holds up to a quarter of the host budget, between 64 MiB and 1 GiB.

    Args:
        config: budgets, folder, URL, policy.
        fingerprint: the model's; segments of other models are never visible.
        device: where the model computes; its memory is the device level, unless it is the CPU.
        streams: the device's streams, if several threads with different streams use the store.
        cost: compute costs, for policies that weigh them (`eviction_cost`).

    Raises:
        UnknownMethodError: no such eviction policy or codec.
        UsageError: the remote URL cannot be used.
    """
    writer: BackgroundWriter[SegmentSource] = BackgroundWriter(
        max_bytes=min(max(config.host_budget_bytes // 4, _LEAST_QUEUE_BYTES), _MOST_QUEUE_BYTES)
    )
    prefill_s = None if cost is None else cost.prefill
    levels = [*_memory(config, device, prefill_s, streams), *slow_levels(config, fingerprint, prefill_s)]
    store = TieredStore(
        levels,
        admission=config.admission,
        ttl_s=config.ttl_s,
        limits=VariantLimits(config.max_variants, config.max_instances),
        writer=writer,
        replicas=config.replicated_nodes,
        cut=cut_of,
    )
    store.expire()
    return store


def store_counts(store: TieredStore[SegmentSource]) -> dict[str, Any]:
    """Contents and counters of a store, its tiers and remotes, JSON-compatible, for metrics."""
    from chunkweave.tiers.remote import RemoteTier

    remotes = {level.name: tier for level in store.levels if isinstance(tier := level.store.tier, RemoteTier)}
    return {
        **asdict(store.stats),
        "tiers": {level.name: {"failures": level.failures, "available": level.available} for level in store.levels},
        "remotes": {name: {**asdict(tier.stats), "opens": tier.breaker.times_opened} for name, tier in remotes.items()},
    }


_MOST_SHOWN = 64


def eviction_order(store: TieredStore[SegmentSource], most: int = _MOST_SHOWN) -> dict[str, list[dict[str, Any]]]:
    """By level, the `most` segments that are evicted first, JSON-compatible.

    Each has the numbers by which the level's policy ranks it, including `frequency` if the policy counts uses. If the
    policy has no numbers, the order is arbitrary. `behind` is the number of parts before a segment (for a mean the most
    in any of its `contexts`). Scans every record: do not call it per request.
    """

    def shown(record: SegmentRecord, numbers: dict[str, float]) -> dict[str, Any]:
        about = {"segment": record.id, "source": record.source, "tokens": len(record), "bytes": record.nbytes}
        behind = max(map(len, record.contexts or (record.context,)))
        return {**about, "exact": record.exact, "behind": behind, "contexts": len(record.contexts), **numbers}

    orders: dict[str, list[dict[str, Any]]] = {}
    for level in store.levels:
        least = nsmallest(most, level.store.explained(), key=lambda pair: pair[1].get("priority", 0.0))
        orders[level.name] = [shown(record, numbers) for record, numbers in least]
    return orders


def agreed_dtype(config: StoreConfig, measured: Callable[[], str]) -> str:
    """What `auto` means on a CPU for every process with this store: KV in another dtype is not found.

    The remote's decision, else the cache folder's, else that of `measured`, a dtype's name; it is then kept in both. A
    remote that does not answer decides nothing.
    """
    folder = config.cache_dir
    folder_dtype = read_dtype(folder) if folder is not None else None
    folder_dtype = folder_dtype if folder_dtype in DTYPES_ON_CPU else None
    if config.remote_url is not None:
        from chunkweave.tiers.remote import agreed_text

        chosen = agreed_text(config.remote_url, "auto-dtype", lambda: folder_dtype or measured(), DTYPES_ON_CPU)
        if folder is not None and chosen != folder_dtype:
            _keep_dtype(folder, chosen, first=False)
        return chosen
    return folder_dtype or (measured() if folder is None else _keep_dtype(folder, measured(), first=True))


def _keep_dtype(folder: Path, dtype: str, *, first: bool) -> str:
    """Keep a decision in a cache folder, unless the `first` one counts, and another process has just made it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked_folder(folder, DocumentError):
            stored_dtype = read_dtype(folder) if first else None
            if stored_dtype in DTYPES_ON_CPU:
                return stored_dtype
            write_dtype(folder, dtype)
    except (OSError, DocumentError) as error:
        logger.warning("the dtype cannot be kept in %s, so another start may choose another one: %s", folder, error)
    return dtype


def _memory(
    config: StoreConfig, device: torch.device, prefill_s: PrefillSeconds | None, streams: "Streams | None"
) -> Iterator[Level[SegmentSource]]:
    from chunkweave.tiers.device import DeviceTier, host_memory_for, moved_into
    from chunkweave.tiers.host import HostTier

    if config.device_budget_bytes and device.type != "cpu":
        tier = DeviceTier(device, budget_bytes=config.device_budget_bytes, streams=streams)
        yield Level("device", _store(config, tier, config.device_budget_bytes, prefill_s))
    memory = host_memory_for(device, config.most_pinned_bytes)
    # On a CPU, everything computed or read is in host memory already.
    host: HostTier[SegmentSource] = HostTier(None if device.type == "cpu" else partial(moved_into, memory))
    yield Level("host", _store(config, host, config.host_budget_bytes, prefill_s))


def slow_levels(
    config: StoreConfig, fingerprint: str, prefill_s: PrefillSeconds | None = None
) -> Iterator[Level[SegmentSource]]:
    """The levels of a configuration that outlive the process: disk and remote, as far as it has them."""
    if config.cache_dir is not None:
        from chunkweave.tiers.disk import DiskTier

        disk = DiskTier(config.cache_dir, fingerprint, codec=config.codec)
        removed = Tombstones(config.cache_dir, fingerprint, "disk")
        store = _store(config, disk, config.disk_budget_bytes, prefill_s, shared=True, removed=removed)
        yield Level("disk", store, background=True)
    if config.remote_url is not None:
        from chunkweave.kv.segment import make_codec
        from chunkweave.tiers.blobs import open_blobs
        from chunkweave.tiers.remote import RemoteTier

        blobs = open_blobs(config.remote_url)
        remote = RemoteTier(
            blobs, fingerprint, codec=make_codec(config.codec), ttl_s=config.ttl_s if blobs.expires else None
        )
        removed = Tombstones(config.cache_dir, fingerprint, blobs.name)
        # Listing a remote takes a round trip per segment, so it is only probed.
        store = _store(config, remote, UNBOUNDED_BYTES, prefill_s, shared=True, load=False, removed=removed)
        yield Level("remote", store, background=True)


def _store(
    config: StoreConfig,
    tier: Tier[SegmentSource],
    budget_bytes: int,
    prefill_s: PrefillSeconds | None,
    *,
    shared: bool = False,
    load: bool = True,
    removed: Tombstones | None = None,
) -> SegmentStore[SegmentSource]:
    policy = make_policy(config.policy, prefill_s=prefill_s)
    return SegmentStore(tier, budget_bytes=budget_bytes, policy=policy, shared=shared, load=load, removed=removed)
