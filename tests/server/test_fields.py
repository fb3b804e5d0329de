"""No field of `chunkweave` is accepted without effect: each one is crossed with each method, over both backends.

With the field the plan, the order, the report or the state differs from what it is without, or the request is refused
by a message that names the field. What the front before vLLM decides is what it sends (`kv_transfer_params`); what the
plug-in makes of that is crossed in tests/unit/test_vllm_request.py. And what the report says of it: why a chunk was
recomputed, and that `cache` stored nothing (`read`) or did not look either (`off`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Any

import pytest

from chunkweave.planning.plan import Plan
from chunkweave.plugins import METHODS
from chunkweave.weaving.segments import WeavingStore
from chunkweave_server.requests import ReuseField
from tests.server.conftest import Client, Serve, engine_of, report_of
from tests.server.fake_vllm import FakeVllm

DOCUMENTS = [
    "The ferry leaves at seven, at noon and at six, and on Sundays at nine.",
    "The choir sings on Sundays behind the old wall of the upper garden.",
    "The tower has two hundred and thirty steps and a copper roof.",
    "The bees of the mill are counted twice a year by the miller himself.",
]
METHOD_FORMS = (*METHODS.names, "query:whole:late:stored")
SETTINGS = {
    "cacheblend": ("ratio=0.9", "layers=2"),
    "cachecraft": ("alpha=0.2", "no-focus"),
    "epic": ("ratio=0.9",),
    "full": (),
    "full-reuse": (),
    "prefix": (),
    "query": ("ratio=0.9", "whole:late"),
    "query-whole": ("ratio=0.9",),
    "query:whole:late:stored": ("ratio=0.9",),
}
"""Settings that a request may give each method, written by hand."""
NUMBERS = count()


@dataclass
class Seen:
    """What is known of one request: how it was answered, and by what plan (vLLM: what it was sent)."""

    status: int
    message: str = ""
    plan: Any = None
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Asker:
    """Asks a server, and sees what it does."""

    client: Client
    plans: list[Plan]
    fake: FakeVllm | None

    def ask(self, documents: list[str], reuse: dict[str, Any], salt: str) -> Seen:
        body = {"documents": documents} if documents else {}
        reply = self.client.ask(max_tokens=1, cache_salt=salt, chunkweave=reuse, **body)
        if reply.status_code != 200:
            return Seen(reply.status_code, reply.json()["error"]["message"])
        report = reply.json()["chunkweave"]
        kept = {name: report.get(name) for name in ("method", "order", "history_tokens", "chunks_not_sent", "cache")}
        chunks = [(chunk["rank"], chunk["source"], chunk["tokens"]) for chunk in report["chunks"]]
        return Seen(200, "", self._plan(), {**kept, "chunks": chunks, "retrieved": len(report.get("retrieved", ()))})

    def _plan(self) -> Any:
        if self.fake is not None:
            sent = self.fake.seen[-1]
            return sent["prompt"], (sent.get("kv_transfer_params") or {}).get("chunkweave")
        plan = self.plans[-1]
        parts = [(part.kv_source, part.span, part.score and part.score.tokens, part.kept) for part in plan.parts]
        return plan.method, plan.passes, parts

    def told(self, method: str, *, without: dict[str, Any], given: dict[str, Any]) -> tuple[Seen, Seen]:
        """A request over stored chunks in another order, without and with what is given; states of their own."""
        whole = {**without, **given}
        documents = [] if "corpus" in whole else DOCUMENTS
        refused = self.ask(documents, {"method": method, **whole}, "" if "corpus" in whole else f"salt-{next(NUMBERS)}")
        if refused.status != 200:
            return Seen(200), refused
        found = []
        for reuse in (without, whole):
            salt = f"salt-{next(NUMBERS)}" if documents else ""
            again = {name: reuse[name] for name in ("corpus",) if name in reuse}
            for before in (documents, documents[::-1]):
                warmed = self.ask(before, {"method": method, **again}, salt)
                assert warmed.status == 200, warmed.message
            found.append(self.ask([*documents[2:], *documents[:2]], {"method": method, **reuse}, salt))
        return found[0], found[1]


Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Callable[[str], list[Case]]] = {
    "method": lambda method: [
        ({}, {"method": "full" if method == "prefix" else "prefix"}),
        *(({}, {"method": f"{method}:{setting}"}) for setting in SETTINGS[method]),
    ],
    "quality": lambda _: [({}, {"quality": quality}) for quality in ("exact", "balanced", "fast")],
    "order": lambda _: [({"order": "fixed"}, {"order": "free"})],
    "corpus": lambda _: [({}, {"corpus": "notes"})],
    "find_chunks": lambda _: [({}, {"find_chunks": True})],
    "cache": lambda _: [({}, {"cache": cache}) for cache in ("read", "off")],
    "top_k": lambda _: [({"corpus": "notes"}, {"top_k": 1})],
}
"""By field, what a request says without it and what it says with it."""


@pytest.fixture
def asker(client: Client, monkeypatch: pytest.MonkeyPatch) -> Asker:
    plans: list[Plan] = []
    planned = WeavingStore.plan

    def plan(self: Any, *arguments: Any, **options: Any) -> Plan:
        plans.append(planned(self, *arguments, **options))
        return plans[-1]

    monkeypatch.setattr(WeavingStore, "plan", plan)
    client.make_corpus(documents=[{"text": text, "id": f"note-{number}"} for number, text in enumerate(DOCUMENTS)])
    return Asker(client, plans, client.fake)


def test_the_table_has_every_field_of_the_schema_and_every_method():
    assert set(CASES) == set(ReuseField.model_fields), "say here what a new field changes"
    assert set(SETTINGS) == set(METHOD_FORMS)


def test_each_field_has_an_effect_with_each_method_or_is_refused(asker: Asker):
    without_effect, unnamed = [], []
    for name, cases in CASES.items():
        for method in METHOD_FORMS:
            for without, given in cases(method):
                before, after = asker.told(method, without=without, given=given)
                assert before.status == 200, (name, method, before.message)
                if (before.status, before.plan, before.report) == (after.status, after.plan, after.report):
                    without_effect.append((name, method, given))
                if after.status != 200 and (name not in after.message or after.status not in (400, 404, 409)):
                    unnamed.append((name, method, after.message))
    assert without_effect == []
    assert unnamed == []


def test_what_a_method_does_not_take_is_refused_with_what_it_takes(client: Client):
    refused = client.ask(documents=DOCUMENTS, chunkweave={"method": "cachecraft:ratio=0.2"})
    assert refused.status_code == 400
    message = "unknown setting 'ratio=0.2' of cachecraft; there are: alpha=VALUE, focus, no-focus"
    assert message in refused.json()["error"]["message"]


@pytest.mark.parametrize("form", ["query-whole", "query:whole:late:stored"])
def test_the_calibrated_form_can_be_requested_and_be_the_servers_own(serve, form: str):
    """Both watch the question's whole text in the last half of the layers, and weigh by what was stored."""
    spec = f"{form}:ratio=0.2"
    for client, reuse in ((serve(), {"method": spec}), (serve(method=spec), {})):
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            report = report_of(client.ask(documents=documents, chunkweave=reuse))
        assert report["parameters"]["recompute_ratio"] == 0.2
        if form == "query-whole":
            assert (report["method"], report["parameters"].keys()) == ("query-whole", {"recompute_ratio"})
        else:
            query = {"tail": None, "layers": "late", "factor": "stored"}
            assert (report["method"], report["parameters"]["query"]) == ("query", query)


@pytest.mark.backend("vllm")
def test_a_request_wins_over_a_setting_that_vllm_was_started_with(serve):
    """Also where it says the default: the plug-in has the server's settings as its own."""
    spec = "cachecraft:alpha=2:no-focus"
    client = serve(method=spec)
    assert client.service.settings.connector_config()["method"] == spec
    client.ask(documents=DOCUMENTS)
    client.ask(documents=DOCUMENTS, chunkweave={"method": "cachecraft"})
    sent = [request["kv_transfer_params"]["chunkweave"] for request in client.fake.seen]
    assert [fields["method"] for fields in sent] == [spec, "cachecraft"]


MOVED = [*DOCUMENTS[2:], *DOCUMENTS[:2]]
NAMES = ["overlap", "cci", "cfo", "coverage", "generation"]


def woven(client: Client, salt: str = "", **reuse) -> dict:
    """The report of a request over chunks that were computed with profiles, in another order."""
    asked = {"question": "Who counts the bees?", "cache_salt": salt}
    client.ask(documents=DOCUMENTS, chunkweave={"method": "cachecraft:alpha=1"}, **asked)
    return report_of(client.ask(documents=MOVED, chunkweave=reuse, **asked))


@pytest.mark.backend("engine")
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_scores_of_each_chunk_are_those_that_were_recomputed_by(client: Client, alpha: float):
    """Cache-Craft eq. 12, of the numbers as they are shown: N = ceil(alpha CCI (1 - beta') |C|)."""
    report = woven(client, method=f"cachecraft:alpha={alpha}:no-focus")
    chunks = [chunk for chunk in report["chunks"] if chunk["kv_source"] == "reused"]
    assert len(chunks) == len(DOCUMENTS)
    for chunk in chunks:
        why = chunk["reasons"]
        assert list(why) == NAMES
        assert why["cfo"] == pytest.approx(min(1.0, alpha * why["cci"] * (1 - why["overlap"])), abs=0.002)
        assert chunk["recomputed_tokens"] in {ceil((why["cfo"] + d) * chunk["tokens"]) for d in (-0.001, 0, 0.001)}
        assert why["generation"] == 0
    moved_to_the_front, without_a_predecessor = chunks[0]["reasons"], chunks[2]["reasons"]
    assert (moved_to_the_front["overlap"], moved_to_the_front["coverage"]) == (0, 1), "nothing is before it"
    assert (without_a_predecessor["cci"], without_a_predecessor["coverage"]) == (0.5, 0), "it was the first chunk"


@pytest.mark.backend("engine")
def test_where_focus_stopped_is_in_the_report(client: Client):
    whole = woven(client, "a", method="cachecraft:no-focus")
    report = woven(client, "b", method="cachecraft")
    assert (whole["stopped_at_layer"], report["stopped_at_layer"]) == (None, 3)
    assert [one["reasons"] for one in whole["chunks"]] == [one["reasons"] for one in report["chunks"]]
    recomputed = [[chunk["recomputed_tokens"] for chunk in one["chunks"][1:]] for one in (whole, report)]
    stopped = [before for before, after in zip(*recomputed, strict=True) if after < before]
    assert stopped, "the question does not attend to them"
    assert sum(recomputed[0]) - sum(recomputed[1]) == sum(stopped), "a chunk is stopped as a whole"


def test_the_layers_at_which_tokens_were_chosen_are_in_the_report(client: Client):
    report = woven(client, method="cacheblend:layers=1+3:ratio=0.4")
    assert report["check_layers"] == report["parameters"]["check_layers"] == [1, 3]
    assert {len(chunk["reasons"]) for chunk in report["chunks"]} == {0}
    assert report["stopped_at_layer"] is None


@pytest.mark.backend("vllm")
def test_what_the_plug_in_says_is_shown_by_chunk(client: Client):
    report = woven(client, method="cachecraft")
    assert [chunk["reasons"] for chunk in report["chunks"]] == [{"cfo": 0.25, "generation": 1}] * len(DOCUMENTS)
    assert report["stopped_at_layer"] == 3
    assert "reasons" not in report


def test_a_report_over_many_chunks_stays_small(client: Client):
    """Some 100 bytes a chunk are its reasons: the numbers are rounded."""
    documents = [f"The boat number {number} lies at the pier." for number in range(20)]
    for order in (documents, documents[::-1]):
        report = report_of(client.ask(documents=order, chunkweave={"method": "cachecraft"}))
    reasons = [chunk["reasons"] for chunk in report["chunks"] if chunk["reasons"]]
    assert len(reasons) >= 19
    assert max(len(str(one)) for one in reasons) < 110


LONGER = [
    "The ferry leaves at seven, at noon and at six, and on Sundays at nine. " * 3,
    "The choir sings on Sundays behind the old wall of the upper garden. " * 3,
]
OTHERS = ["The tower has two hundred and thirty steps and a copper roof."]
KNOWN = ("prefix_exact_tokens", "reused_tokens")


def report(client: Client, documents: list[str], **reuse: Any) -> dict[str, Any]:
    return report_of(client.ask(documents=documents, max_tokens=2, chunkweave=reuse))


def known(found: dict[str, Any]) -> int:
    return sum(found[name] for name in KNOWN)


@pytest.mark.backend("engine")
@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_read_uses_what_is_stored_and_stores_nothing(client: Client, method: str):
    store = client.engine.store
    assert known(report(client, LONGER, method=method, cache="read")) == 0
    assert len(store) == 0
    first = report(client, LONGER, method=method)
    stored = {record.id for record in store.records()}
    assert "cache" not in first
    assert stored
    again = report(client, LONGER, method=method, cache="read")
    assert again["cache"] == "read"
    assert known(again) > 0
    if method == "cacheblend":
        turned = report(client, LONGER[::-1], method=method, cache="read")
        assert turned["reused_tokens"] > 0
    report(client, [OTHERS[0], *LONGER], method=method, cache="read")
    assert {record.id for record in store.records()} == stored


@pytest.mark.backend("engine")
def test_off_does_not_look(client: Client, monkeypatch: pytest.MonkeyPatch):
    store = client.engine.store
    report(client, LONGER, method="cacheblend")
    stored, counts = {record.id for record in store.records()}, store.stats
    looked: list[Any] = []
    lookup = type(store).lookup
    monkeypatch.setattr(type(store), "lookup", lambda self, prompt: looked.append(prompt) or lookup(self, prompt))
    found = report(client, LONGER, cache="off")
    assert (found["method"], found["cache"], known(found)) == ("full", "off", 0)
    assert looked == []
    assert {record.id for record in store.records()} == stored
    assert (store.stats.hits, store.stats.misses) == (counts.hits, counts.misses)
    assert engine_of(client.service).batching.stats.finished >= 2
    report(client, LONGER, method="cacheblend")
    assert looked


@pytest.mark.backend("engine")
def test_neither_is_computed_in_idle_time(serve: Serve):
    client = serve(contexts="corpus", improve_share=0.5, promotion_threshold=1)
    for cache in ("read", "off"):
        report(client, LONGER, cache=cache, order="free")
    assert client.service.backend.cache.improving.stats()["improving"]["queued"] == 0


@pytest.mark.parametrize("method", ["cacheblend", "prefix"])
def test_off_takes_no_method_that_reuses(client: Client, method: str):
    refused = client.ask(documents=LONGER, chunkweave={"cache": "off", "method": method})
    assert refused.status_code == 400
    assert "cache off reuses nothing" in refused.json()["error"]["message"]
    assert client.ask(documents=LONGER, chunkweave={"cache": "off", "method": "full"}).status_code == 200


@pytest.mark.backend("vllm")
def test_vllm_is_sent_what_it_may_do(client: Client):
    fake = client.fake
    report(client, LONGER, method="cacheblend", cache="read")
    assert fake.seen[-1]["kv_transfer_params"]["chunkweave"]["cache"] == "read"
    for _ in range(2):
        found = report(client, LONGER, cache="off")
        assert (found["method"], found["cache"]) == ("full", "off")
        assert "kv_transfer_params" not in fake.seen[-1]
    salts = [one.get("cache_salt", "") for one in fake.seen[-2:]]
    assert len({*salts, ""}) == 3, "no two requests share blocks of vLLM's own prefix cache"
    (replica,) = client.service.backend.fleet.replicas
    assert replica.sent.tokens == 0, "the front expects nothing to be stored"
    report(client, LONGER, method="cacheblend")
    assert "cache" not in fake.seen[-1]["kv_transfer_params"]["chunkweave"]
    assert replica.sent.tokens > 0
