"""Twin servers under attack, a lone one that nobody attacks, and what has to hold of their answers."""

import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from tests.adversary.servers import TENANTS, VICTIM, Forks, Reply, Server, Starter
from tests.adversary.texts import QUESTIONS, text

Ask = dict[str, Any]
_DESCRIPTORS = 64
_ANSWERED_S = 60.0


class Arena:
    """What all rounds of an attack share. The twins get the same requests, but one tenant's texts are swapped in one.

    While they are `in_step` every observable of the others has to be equal. Faults and races end that until `resync`.
    """

    backend = ""
    faults: tuple[str, ...] = ()
    starter: Callable[[], AbstractContextManager[Starter]] = Forks
    growth_bytes = 192 << 20
    """By so much a server's memory may be above what it is at first."""
    settled_s = 60.0
    """Servers recover within that; longer than a tier that failed is left alone, which is 30 s."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.ends_s = 0.0
        self.counts: Counter[str] = Counter()
        self.journal: deque[str] = deque(maxlen=40)
        self.fault = ""
        self.in_step = True
        self.failure: Exception | None = None
        self.corpora: dict[str, dict[str, set[int | None]]] = {tenant: {} for tenant in TENANTS}
        """By tenant, the documents of its corpus by id: the numbers of the texts they may have; None for not there."""
        self.twins: list[Server] = []
        self.lone: Server | None = None
        """One that computes whatever it is asked in full, where there is one."""
        self._known: dict[tuple[Any, ...], tuple[str, str]] = {}
        self.counted: dict[str, list[Counter[str]]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.forks = stack.enter_context(self.starter())
            servers = self.open(stack)
            for server in servers:
                server.launch()
            for server in servers:
                server.wait()
            for twin in self.twins:
                twin.measure()
            self.first = [(twin.most_rss_bytes, twin.most_descriptors) for twin in self.twins]
            for tenant in TENANTS:
                assert self.both(tenant, "POST", "/v1/corpora", lambda _: {"name": "notes"}).status == 201
            self.resync()
            self.stack = stack.pop_all()
        self.ends_s = time.monotonic() + self.seconds
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stack.close()

    def open(self, stack: ExitStack) -> list[Server]:
        """The servers, the twins among them, not yet started."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends_s

    @property
    def attacked(self) -> Server:
        return self.twins[0]

    def say(self, line: str) -> None:
        self.journal.append(line)
        self.counts[line.split(" ", 1)[0]] += 1

    def told(self, what: str) -> str:
        """Of something that did not hold: what led to it."""
        return "\n".join([*(twin.log[-3000:] for twin in self.twins), *self.journal, what])

    def check_status(self, reply: Reply, *, allowed: tuple[int, ...] = (200,)) -> None:
        """Whatever happens to a server, its answers are of these kinds."""
        if reply.status == 503:
            assert reply.retry_after is not None, self.told(f"503 without Retry-After: {reply.body}")
        faulty = (503, 507, *((502,) if self.fault == "upstream" else ())) if self.fault else ()
        assert reply.status in (*allowed, *faulty), self.told(f"{reply.status} {reply.body}")

    def both(
        self,
        tenant: str,
        method: str,
        path: str,
        body: Callable[[bool], Any] = lambda _: None,
        *,
        allowed: tuple[int, ...] = (200, 201),
        send: Callable[[Server, Any], Reply | None] | None = None,
    ) -> Reply:
        """The same request to both, `body(swapped)`; its answer by the first one."""
        send = send or (lambda server, given: server.send(method, path, tenant, given))
        replies = [send(server, body(number == 1 and tenant == VICTIM)) for number, server in enumerate(self.twins)]
        for server in self.twins:
            server.settle(written=self.in_step)
        first, second = replies
        if first is None or second is None:
            return Reply(0, {})
        self.check_status(first, allowed=allowed)
        self.check_status(second, allowed=allowed)
        if not self.in_step:
            return first
        if tenant == VICTIM:
            if first.counts() != second.counts():
                self.counts["swaps that were none"] += 1  # an answer ended early, say: what follows differs too
                self.resync()
        else:
            self.counts["observables compared"] += 1
            same = first.observable() == second.observable()
            assert same, self.told(f"swapping another's texts shows:\n{first.observable()}\n{second.observable()}")
        return first

    def resync(self) -> None:
        """Bring the twins back in step: nothing is stored on either."""
        ends = time.monotonic() + self.settled_s
        while not all(self.emptied(server) for server in self.twins):
            assert time.monotonic() < ends, self.told("the servers do not recover")
            time.sleep(0.1)
        self.counted = {tenant: [self.tokens_of(server, tenant) for server in self.twins] for tenant in TENANTS}
        self.in_step = True

    def tokens_of(self, server: Server, tenant: str) -> Counter[str]:
        """What the server has counted of a tenant's answers; the time that it saved is measured, and differs."""
        reply = server.send("GET", "/v1/cache", tenant)
        self.check_status(reply)
        counts = reply.body.get("tenant") or {}
        return Counter(
            {name: count for name, count in counts.items() if name not in ("time_saved_s", "saved_share", "full_s")}
        )

    def look_at_counts(self, tenant: str) -> None:
        """What was counted since the twins were brought in step is equal, where they are."""
        since = [self.tokens_of(server, tenant) for server in self.twins]
        for now, before in zip(since, self.counted[tenant], strict=True):
            now.subtract(before)
        if self.in_step and tenant != VICTIM:
            self.counts["observables compared"] += 1
            assert since[0] == since[1], self.told(f"swapping another's texts shows in what is counted: {since}")

    def part(self) -> None:
        """The twins may differ now: bring them back, as soon as they can be."""
        self.in_step = False
        if not self.fault:
            self.resync()

    def emptied(self, server: Server) -> bool:
        """Whether nothing is stored now, and what will be is stored everywhere."""
        raise NotImplementedError

    def begin_fault(self, kind: str) -> None:
        self.fault, self.in_step = kind, False
        for server in self.twins:
            server.fault(kind)

    def end_fault(self) -> None:
        self.begin_fault("")
        self.resync()

    def restart(self) -> None:
        """kill -9 both, and start them again over what they left."""
        for server in self.twins:
            server.measure()
            server.kill()
        for server in self.twins:
            server.launch()
        for server in self.twins:
            server.wait()
        self.in_step = False
        self.check_corpora()
        self.resync()

    def check_bounds(self) -> None:
        """Memory and descriptors of both are what they were at first, and what a store may hold."""
        for server, (rss_bytes, descriptors) in zip(self.twins, self.first, strict=True):
            server.measure()
            assert server.most_descriptors <= descriptors + _DESCRIPTORS, self.told("descriptors are left")
            assert server.slowest_s <= _ANSWERED_S, self.told(f"an answer took {server.slowest_s:.1f} s")
            grown_mb = (server.most_rss_bytes - rss_bytes) / 1e6
            assert server.most_rss_bytes <= rss_bytes + self.growth_bytes, self.told(
                f"memory grew by {grown_mb:.0f} MB"
            )

    @property
    def summary(self) -> str:
        """What was done and held, a line each."""
        lines = [f"{self.backend}, {self.seconds:g} s"]
        lines += [f"{count:8d} {what}" for what, count in sorted(self.counts.items())]
        for name, server in zip(("attacked", "swapped"), self.twins, strict=True):
            most = f"{server.most_rss_bytes / 1e6:.0f} MB and {server.most_descriptors} descriptors"
            lines.append(f"{name}: at most {most}, slowest answer {server.slowest_s:.1f} s")
        return "\n".join(lines)

    # --- asking ---------------------------------------------------------------------------------------------------

    def body(self, tenant: str, numbers: list[int], question: int, method: str, *, swapped: bool = False) -> Ask:
        spec = method if method in ("full", "prefix", "full-reuse") else f"{method}:ratio=0.2"
        return {
            "messages": [{"role": "user", "content": QUESTIONS[question]}],
            "documents": [text(number, swapped=swapped) for number in numbers],
            "temperature": 0,
            "max_tokens": 1 if tenant == VICTIM else 4,
            "chunkweave": {"method": spec, "order": "fixed"},
        }

    def asked(self, *question: Any, **more: Any) -> Callable[[bool], Ask]:
        """The body of a question by whether the victim's texts are swapped."""
        return lambda swapped: self.body(*question, swapped=swapped) | more

    def ask(self, tenant: str, numbers: list[int], question: int, method: str, *, stream: bool) -> None:
        def send(server: Server, body: Ask) -> Reply | None:
            if stream:
                return server.stream("/v1/chat/completions", tenant, body)
            return server.send("POST", "/v1/chat/completions", tenant, body)

        given = self.asked(tenant, numbers, question, method)
        reply = self.both(tenant, "POST", "/v1/chat/completions", given, send=send)
        if reply.status == 200 and "error" not in reply.body:
            self.check_answer(tenant, numbers, question, method, reply)

    def leave(self, tenant: str, numbers: list[int], question: int) -> None:
        """Ask, and go after the first event."""

        def send(server: Server, body: Ask) -> Reply | None:
            return server.stream("/v1/chat/completions", tenant, body, leave_after=1)

        given = self.asked(tenant, numbers, question, "prefix", max_tokens=40)
        self.both(tenant, "POST", "/v1/chat/completions", given, send=send)
        self.part()  # where in its answer it was ended differs

    def burst(self, asks: list[tuple[str, list[int], int]]) -> None:
        """All at once; who finds what another of the same tenant has stored is chance, the answers are not."""
        self.in_step = False
        for server in self.twins:
            replies: list[tuple[tuple[str, list[int], int], Reply]] = []

            def one(ask: tuple[str, list[int], int], server: Server = server, replies: list[Any] = replies) -> None:
                body = self.body(*ask, "prefix")
                replies.append((ask, server.send("POST", "/v1/chat/completions", ask[0], body)))

            threads = [threading.Thread(target=one, args=(ask,)) for ask in asks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(replies) == len(asks), self.told("a request had no answer")
            for (tenant, numbers, question), reply in replies:
                self.check_status(reply)
                if reply.status == 200:
                    self.check_answer(tenant, numbers, question, "prefix", reply)
        self.part()

    def check_answer(self, tenant: str, numbers: list[int], question: int, method: str, reply: Reply) -> None:
        """What has to hold of an answer of the first twin."""
        report = reply.report
        parts = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
        assert sum(report[part] for part in parts) == report["prompt_tokens"], self.told(f"{report}")
        if self.lone is not None and method in ("full", "prefix"):
            self.counts["exact answers compared"] += 1
            expected = self.alone(tenant, numbers, question)
            said = (reply.text, reply.finish_reason)
            assert said == expected, self.told(f"{tenant} {numbers} {question} {method}: {said} is not {expected}")

    def alone(self, tenant: str, numbers: list[int], question: int) -> tuple[str, str]:
        """What a server says that computes this prompt in full and nothing else."""
        assert self.lone is not None
        body = self.body(tenant, numbers, question, "full")
        key = (body["max_tokens"], tuple(numbers), question)
        if key not in self._known:
            reply = self.lone.send("POST", "/v1/chat/completions", tenant, {**body, "cache_salt": uuid.uuid4().hex})
            assert reply.status == 200, reply.body
            self._known[key] = (reply.text, reply.finish_reason)
        return self._known[key]

    # --- the cache ------------------------------------------------------------------------------------------------

    def command(self, tenant: str, name: str, numbers: list[int]) -> None:
        """warm or clear."""

        def given(swapped: bool) -> Any:
            return {"documents": [text(number, swapped=swapped) for number in numbers]}

        reply = self.both(tenant, "POST", f"/v1/cache/{name}", given)
        if name == "warm":
            self.warmed(tenant, numbers)
        if name != "clear" or reply.status != 200:
            return
        self.forgotten(tenant, numbers)
        if self.in_step:
            self.check_forgotten(tenant, numbers)

    def check_forgotten(self, tenant: str, numbers: list[int]) -> None:
        """What was removed is not found."""
        for number in numbers:
            given = self.asked(tenant, [number], 0, "full-reuse")
            reply = self.both(tenant, "POST", "/v1/chat/completions", given)
            chunks = [one for one in reply.report["chunks"] if one["rank"] is not None]
            found = [one for one in chunks if one["kv_source"] in ("reused", "prefix-exact")]
            assert not found, self.told(f"cleared, and found: {reply.report}")
            self.counts["removals checked"] += 1
            self.answered(tenant, [number], 0, "full-reuse")

    def warmed(self, tenant: str, numbers: list[int]) -> None:
        """KV of these texts is stored now."""

    def forgotten(self, tenant: str, numbers: list[int]) -> None:
        """KV of these texts was removed."""

    def answered(self, tenant: str, numbers: list[int], question: int, method: str) -> None:
        """A request was answered."""

    # --- corpora --------------------------------------------------------------------------------------------------

    def ingest(self, tenant: str, number: int, name: str) -> None:
        held = set(self.corpora[tenant].setdefault(name, {None}))

        def given(swapped: bool) -> Any:
            return {"documents": [{"id": name, "text": text(number, swapped=swapped)}], "update": True}

        reply = self.both(tenant, "POST", "/v1/corpora/notes/documents", given)
        self.corpora[tenant][name] = {number} if reply.status == 200 else held | {number}
        self._note_gone(tenant, held)

    def delete(self, tenant: str, name: str) -> None:
        held = set(self.corpora[tenant].setdefault(name, {None}))
        allowed = (200, 404) if None in held else (200,)
        reply = self.both(tenant, "DELETE", f"/v1/corpora/notes/documents/{name}", allowed=allowed)
        certain = reply.status in (200, 404) or reply.body.get("error", {}).get("code") == "not_removed"
        self.corpora[tenant][name] = {None} if certain else held | {None}
        self._note_gone(tenant, held)

    def _note_gone(self, tenant: str, held: set[int | None]) -> None:
        """A document that had one of these texts was replaced or removed: the KV of texts that none has is removed."""
        kept = set().union(*self.corpora[tenant].values())
        if gone := [number for number in held - kept if number is not None]:
            self.forgotten(tenant, gone)

    def check_corpora(self) -> None:
        """Every document that was acknowledged is there, with its text, and none that was removed."""
        for tenant in TENANTS:
            for swapped, server in enumerate(self.twins):
                found = server.send("GET", "/v1/corpora/notes/documents?limit=1000", tenant)
                self.check_status(found)
                if found.status != 200:
                    continue
                names = {one["id"] for one in found.body["data"]}
                chunks = sum(one["chunks"] for one in found.body["data"])
                for name, numbers in self.corpora[tenant].items():
                    may = {number is not None for number in numbers}
                    assert (name in names) in may, self.told(f"document {name} of {tenant}: {numbers}, {sorted(names)}")
                    if name in names and len(numbers) == 1:
                        wording = text(next(iter(numbers)) or 0, swapped=bool(swapped) and tenant == VICTIM)
                        self.check_text(server, tenant, name, wording, chunks)

    def check_text(self, server: Server, tenant: str, name: str, wording: str, chunks: int) -> None:
        asked = {"query": wording, "top_k": chunks}
        found = server.send("POST", "/v1/corpora/notes/search", tenant, asked)
        self.check_status(found)
        if found.status == 200:
            texts = {one["text"] for one in found.body["data"] if one["document"] == name}
            assert texts == {wording}, self.told(f"{name} of {tenant} reads {texts}")
