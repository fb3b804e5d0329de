"""What three tenants do to a server, drawn by chance: requests, faults, kills.

CHUNKWEAVE_ADVERSARY_S says how long each backend is attacked (30 s; by `make prove-adversary` an hour),
CHUNKWEAVE_ADVERSARY_SEED where the drawing begins.
"""

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.adversary.arena import Arena
from tests.adversary.servers import ADMIN, TENANTS, VICTIM
from tests.adversary.texts import TEXTS

SECONDS = float(os.environ.get("CHUNKWEAVE_ADVERSARY_S", "30"))
SEED = int(os.environ.get("CHUNKWEAVE_ADVERSARY_SEED", "0"))
METHODS = ("full", "prefix", "prefix", "full-reuse", "cacheblend", "epic")
_RESTART_EVERY = 6
"""So many rounds: a restart takes as long as some ten requests."""

tenants = st.sampled_from(TENANTS)
documents = st.lists(st.integers(0, TEXTS - 1), min_size=1, max_size=3, unique=True)
questions = st.integers(0, 1)
names = st.sampled_from(["a", "b", "c"])
OTHERS = [tenant for tenant in TENANTS if tenant != VICTIM]


FLOODS = {
    "/v1/chat/completions": b'{"messages":[{"role":"user","content":"When?"}],"documents":[@]}',
    "/v1/completions": b'{"prompt":"When?","documents":["x"],"stop":[@]}',
    "/v1/cache/warm": b'{"documents":[@]}',
    "/v1/corpora/notes/documents": b'{"documents":["x",{"text":"x","metadata":[@]}]}',
    "/v1/corpora/notes/search": b'{"query":[@]}',
}
WAYS = {"numbers": b"1,", "objects": b"{},", "lists": b"[],", "deep": b"[[1],[2]],", "keys": b'{"a":1,"b":2},'}
NO_KEY = ""
DOORS = ["/", "/health", "/metrics", "/ping", "/version", "/v1/models", "/v1/cache", "/v1/corpora", "/load", "/x"]
OPEN = {("GET", path) for path in ("/", "/health", "/version")}
_ASKED = b'"messages":[{"role":"user","content":"When?"}],"documents":["x"]'
NO_JSON = [
    b"{%s,%s}" % (_ASKED, more)
    for more in (
        b'"logit_bias":{"5":NaN}',
        b'"temperature":Infinity',
        b'"cache_salt":"\\ud800"',
        b'"seed":1e400',
        b'"x"',
    )
]
NO_QUESTION = [{"messages": []}, {"messages": [{"role": "user", "content": ""}]}]
OVERLONG = [{"id": "i" * 600}, {"title": "t" * 2000}, {"metadata": {"m": "m" * 20_000}}]
REFUSED: dict[str, tuple[str, list[Any]]] = {
    "no-question": ("/v1/chat/completions", [{"documents": ["x"], **one} for one in NO_QUESTION]),
    "no-request": ("/v1/chat/completions", NO_JSON),
    "overlong": ("/v1/corpora/notes/documents", [{"documents": [{"text": "x", **one}]} for one in OVERLONG]),
}
"""Bodies that no server takes, with their paths."""


class Attack(RuleBasedStateMachine):
    """One round; what it leaves behind is what the next one finds.

    What is drawn must not hang on what earlier rounds have left, so that rules have no preconditions, and what fails is
    kept in the arena: a round cannot be played a second time.
    """

    arena: Arena

    def act(self, line: str, what: Callable[..., Any], *given: Any, **more: Any) -> None:
        arena = self.arena
        if arena.over or arena.failure is not None:
            return
        arena.say(line)
        try:
            what(*given, **more)
        except Exception as error:  # noqa: BLE001 - raised by the test
            arena.failure = error

    @rule(tenant=tenants, numbers=documents, question=questions, method=st.sampled_from(METHODS), stream=st.booleans())
    def ask(self, tenant: str, numbers: list[int], question: int, method: str, stream: bool) -> None:
        line = f"ask {tenant} {numbers} {question} {method} stream={stream}"
        self.act(line, self.arena.ask, tenant, numbers, question, method, stream=stream)

    @rule(tenant=tenants, numbers=documents, method=st.sampled_from(["cacheblend", "full-reuse"]))
    def weave(self, tenant: str, numbers: list[int], method: str) -> None:
        self.act(f"warm {tenant} {numbers}", self.arena.command, tenant, "warm", numbers)
        self.act(f"weave {tenant} {numbers} {method}", self.arena.ask, tenant, numbers, 0, method, stream=False)

    @rule(tenant=st.sampled_from(OTHERS), numbers=documents, method=st.sampled_from(METHODS[1:]))
    def ask_what_the_victim_has(self, tenant: str, numbers: list[int], method: str) -> None:
        """In one of the twins another tenant has the same texts, in the other one it has none of them."""
        self.act(f"ask {VICTIM} {numbers}", self.arena.ask, VICTIM, numbers, 0, method, stream=False)
        self.act(f"ask {tenant} {numbers} {method}", self.arena.ask, tenant, numbers, 0, method, stream=False)

    @rule(tenant=tenants, name=st.sampled_from(["warm", "clear"]), numbers=documents)
    def command(self, tenant: str, name: str, numbers: list[int]) -> None:
        self.act(f"{name} {tenant} {numbers}", self.arena.command, tenant, name, numbers)

    @rule(tenant=tenants, numbers=documents, question=questions)
    def leave(self, tenant: str, numbers: list[int], question: int) -> None:
        self.act(f"leave {tenant} {numbers} {question}", self.arena.leave, tenant, numbers, question)

    @rule(asks=st.lists(st.tuples(tenants, documents, questions), min_size=3, max_size=6))
    def burst(self, asks: list[tuple[str, list[int], int]]) -> None:
        self.act(f"burst {asks}", self.arena.burst, asks)

    @rule(tenant=tenants, number=st.integers(0, TEXTS - 1), name=names)
    def ingest(self, tenant: str, number: int, name: str) -> None:
        self.act(f"ingest {tenant} {number} as {name}", self.arena.ingest, tenant, number, name)

    @rule(tenant=tenants, name=names)
    def delete(self, tenant: str, name: str) -> None:
        self.act(f"delete {tenant} {name}", self.arena.delete, tenant, name)

    @rule(tenant=tenants, path=st.sampled_from(["/v1/corpora", "/v1/corpora/notes", "/metrics", "/v1/x"]))
    def look(self, tenant: str, path: str) -> None:
        self.act(f"look {tenant} {path}", self.arena.both, tenant, "GET", path, allowed=(200, 403, 404))

    @rule(tenant=tenants)
    def look_at_counts(self, tenant: str) -> None:
        self.act(f"counts {tenant}", self.arena.look_at_counts, tenant)

    @rule(tenant=tenants, kind=st.sampled_from(sorted(REFUSED)), number=st.integers(0, 9))
    def send_what_is_refused(self, tenant: str, kind: str, number: int) -> None:
        path, bodies = REFUSED[kind]
        body = bodies[number % len(bodies)]
        self.act(f"{kind} {tenant} {number}", self.arena.both, tenant, "POST", path, lambda _: body, allowed=(400,))

    @rule(
        tenant=tenants,
        path=st.sampled_from(sorted(FLOODS)),
        way=st.sampled_from(sorted(WAYS)),
        mib=st.sampled_from([1, 3]),
    )
    def flood(self, tenant: str, path: str, way: str, mib: int) -> None:
        """A body of wrong elements, as large as it may be or nearly."""
        body = FLOODS[path].replace(b"@", WAYS[way] * ((mib << 20) // len(WAYS[way])) + b"0")
        self.act(
            f"flood {tenant} {path} {way} {mib}", self.arena.both, tenant, "POST", path, lambda _: body, allowed=(400,)
        )

    @rule(
        method=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]),
        path=st.sampled_from(DOORS),
    )
    def knock(self, method: str, path: str) -> None:
        """Without a key."""
        opened = OPEN | ({("GET", "/ping")} if self.arena.backend == "vllm" else set())
        allowed = (200,) if (method, path) in opened else (401,)
        self.act(f"knock {method} {path}", self.arena.both, NO_KEY, method, path, allowed=allowed)

    @rule(number=st.integers(0, 11))
    def break_something(self, number: int) -> None:
        kinds = self.arena.faults
        if not self.arena.fault:
            self.act(f"fault {kinds[number % len(kinds)]}", self.arena.begin_fault, kinds[number % len(kinds)])

    @rule()
    def mend(self) -> None:
        if self.arena.fault:
            self.act("mended", self.arena.end_fault)
        elif not self.arena.in_step:
            self.act("resync", self.arena.resync)

    def teardown(self) -> None:
        if self.arena.fault:
            self.act("mended", self.arena.end_fault)
        self.act("corpora are looked at", self.arena.check_corpora)
        self.act("memory and descriptors are looked at", self.arena.check_bounds)


def attack(arena: Arena) -> None:
    """Play rounds until the time is over, with a kill and a restart every few.

    Raises:
        AssertionError: something did not hold; the message says what led to it.
    """
    once = settings(
        max_examples=6,
        stateful_step_count=12,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for number in itertools.count():
        run_state_machine_as_test(seed(SEED + number)(type("Attack", (Attack,), {"arena": arena})), settings=once)
        if arena.failure is not None:
            raise AssertionError(arena.told(f"round {number}: {arena.failure}")) from arena.failure
        if arena.over:
            break
        if number % _RESTART_EVERY == 0:
            if arena.fault:
                arena.end_fault()
            arena.say("kill -9, and start again")
            arena.restart()
    shown = arena.attacked.send("GET", "/v1/cache", ADMIN)
    assert shown.status == 200
    sys.stdout.write(f"\n{arena.summary}\n")
    assert arena.counts["observables compared"] > 0
