"""Two real ranks of which one fails: both end alike, whatever fails, and neither waits for the other."""

import gc
from datetime import timedelta
from math import inf
from multiprocessing import get_context
from queue import Empty

import pytest
import torch
from torch import distributed

from chunkweave.store.store import TieredStore
from chunkweave.vllm import worker as worker_module
from chunkweave.vllm.orders import StepOrders
from chunkweave.vllm.weave_queue import RankAgreement, RankFailedError
from chunkweave_server.vllm_backend.process import free_port
from tests.vllm.test_worker import LAYERS, WORK, FakeJob, FakePaged, hold, orders_of, side_of

ENDED, NOT_WOVEN, WOVEN = "the engine has ended", "vLLM computes it", "it was woven"
FAULTS = {
    "nothing": WOVEN,
    "begin": NOT_WOVEN,
    "outline": NOT_WOVEN,
    "memory": NOT_WOVEN,
    **{f"layer {layer} {where} its collective": ENDED for layer in range(LAYERS) for where in ("before", "behind")},
    "capture": ENDED,
    "finish": ENDED,
    "save": WOVEN,
}
"""What fails on the second rank, and how both end."""
_START = timedelta(seconds=240)
_WAIT = timedelta(seconds=60)


class Job(FakeJob):
    """A weave whose layers sum over the ranks, as vLLM's do, and whose last one exchanges what was captured."""

    fault = ""

    def __init__(self, *args, **kwargs) -> None:
        self.fail("begin")
        super().__init__(*args, **kwargs)
        self.outline = self.fault == "outline"

    def fail(self, what: str) -> None:
        if what == self.fault:
            raise torch.OutOfMemoryError(what)

    def run(self, layers=inf, work=inf):
        done = 0
        while layers > 0 and done < work and not self.done:
            self.fail(f"layer {self.layer} before its collective")
            distributed.all_reduce(torch.ones(4))
            self.fail(f"layer {self.layer} behind its collective")
            self.layer, layers, done = self.layer + 1, layers - 1, done + WORK
        if self.done:
            self.fail("capture")
            distributed.all_reduce(torch.ones(2))
        return done


class Paged(FakePaged):
    """The device of a rank that may be out of memory."""

    def reserve(self, nbytes: int) -> None:
        if Job.fault == "memory":
            raise torch.OutOfMemoryError("memory")


def fail(*_args, **_kwargs):
    raise torch.OutOfMemoryError


def weave_on(rank: int) -> str:
    """How a request ends on one of two ranks."""
    ranks = RankAgreement.__new__(RankAgreement)
    ranks.rank, ranks.size, ranks._channel = rank, 2, distributed.group.WORLD
    side = side_of(Paged(), ranks)
    hold(side)
    for name in ("_insert", "_finish"):
        if Job.fault == name.strip("_").replace("insert", "save"):
            target = TieredStore if name == "_insert" else side
            setattr(target, name.replace("_insert", "insert"), fail)
    try:
        arrived, failed = set(), set()
        for step in range(LAYERS + 1):
            side.step(StepOrders(weaves=[] if step else orders_of("a"), idle=False))
            now, results = side.take_outcome()
            arrived, failed = arrived | now, failed | results.failed
            total = torch.ones(8)
            distributed.all_reduce(total)  # vLLM's own forward
            if total.tolist() != [2] * 8:
                return "it took part in another collective"
    except (RankFailedError, RuntimeError):
        return ENDED
    finally:
        side.close()
        ranks._channel = None
    assert arrived == {"a"}
    return NOT_WOVEN if failed else WOVEN


def rank_main(rank: int, port: int, ended) -> None:
    """Let each fault happen, in a new process group: the end of a rank closes its connections."""
    worker_module.WeaveJob, insert = Job, TieredStore.insert
    store = distributed.TCPStore("127.0.0.1", port, 2, is_master=not rank, timeout=_START)
    for number, fault in enumerate(FAULTS):
        mine = distributed.PrefixStore(str(number), store)
        distributed.init_process_group("gloo", store=mine, rank=rank, world_size=2, timeout=_WAIT)
        Job.fault = fault if rank else ""
        ended.put((fault, rank, weave_on(rank)))
        distributed.destroy_process_group()
        gc.collect()  # closes its connections
        TieredStore.insert = insert
    store.set(f"done {rank}", "")
    store.wait([f"done {1 - rank}"])


@pytest.fixture(scope="module")
def ends() -> dict[str, list[str]]:
    """By fault, how the two ranks ended."""
    port = free_port()
    context = get_context("spawn")
    ended = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, port, ended), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found: list[tuple[str, int, str]] = []
    try:
        while len(found) < 2 * len(FAULTS):
            running = all(rank.is_alive() for rank in ranks)
            try:
                found.append(ended.get(timeout=5))
            except Empty:
                if not running:
                    break
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return {fault: [how for one, _, how in sorted(found) if one == fault] for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS)
def test_both_ranks_end_alike(ends, fault):
    assert ends[fault] == [FAULTS[fault]] * 2
