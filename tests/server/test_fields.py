"""No field of `chunkweave` is accepted without effect: each one is crossed with each method, over both backends.

With the field the plan, the order, the report or the state differs from what it is without, or the request is refused
by a message that names the field. What the front before vLLM decides is what it sends (`kv_transfer_params`); what the
plug-in makes of that is crossed in tests/unit/test_vllm_request.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from chunkweave.planning.plan import Plan
from chunkweave.plugins import METHODS
from chunkweave.weaving.segments import WeavingStore
from chunkweave_server.requests import ReuseField
from tests.server.conftest import Client
from tests.server.fake_vllm import FakeVllm

DOCUMENTS = [
    "The ferry leaves at seven, at noon and at six, and on Sundays at nine.",
    "The choir sings on Sundays behind the old wall of the upper garden.",
    "The tower has two hundred and thirty steps and a copper roof.",
    "The bees of the mill are counted twice a year by the miller himself.",
]
METHOD_FORMS = (*METHODS.names, "query:whole:late:stored")
TAKES = {
    "cacheblend": {"recompute_ratio", "check_layers"},
    "cachecraft": {"alpha", "focus"},
    "epic": {"recompute_ratio"},
    "full": set(),
    "full-reuse": set(),
    "prefix": set(),
    "query": {"recompute_ratio"},
    "query-whole": {"recompute_ratio"},
    "query:whole:late:stored": {"recompute_ratio"},
}
"""Which parameters a request may give each method, written by hand."""
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
    "method": lambda method: [({}, {"method": "full" if method == "prefix" else "prefix"})],
    "recompute_ratio": lambda _: [({}, {"recompute_ratio": 0.9})],
    "check_layers": lambda _: [({}, {"check_layers": [2]})],
    "alpha": lambda _: [({}, {"alpha": 0.2})],
    "focus": lambda _: [({}, {"focus": False})],
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
    assert client.post("/v1/corpora", json={"name": "notes"}).status_code == 201
    documents = [{"text": text, "id": f"note-{number}"} for number, text in enumerate(DOCUMENTS)]
    assert client.post("/v1/corpora/notes/documents", json={"documents": documents}).is_success
    return Asker(client, plans, client.fake)


def test_the_table_has_every_field_of_the_schema_and_every_method():
    assert set(CASES) == set(ReuseField.model_fields), "say here what a new field changes"
    assert set(TAKES) == set(METHOD_FORMS)


def test_each_field_has_an_effect_with_each_method_or_is_refused(asker: Asker):
    without_effect, unnamed, wrong = [], [], []
    for name, cases in CASES.items():
        for method in METHOD_FORMS:
            for without, given in cases(method):
                before, after = asker.told(method, without=without, given=given)
                assert before.status == 200, (name, method, before.message)
                if (before.status, before.plan, before.report) == (after.status, after.plan, after.report):
                    without_effect.append((name, method, given))
                if after.status != 200 and (name not in after.message or after.status not in (400, 404, 409)):
                    unnamed.append((name, method, after.message))
                if name in set().union(*TAKES.values()) and (after.status == 200) != (name in TAKES[method]):
                    wrong.append((name, method, after.status, after.message))
    assert without_effect == []
    assert unnamed == []
    assert wrong == []


def test_what_a_method_does_not_take_is_refused_with_what_it_takes(client: Client):
    refused = client.ask(documents=DOCUMENTS, chunkweave={"method": "cachecraft", "recompute_ratio": 0.2})
    assert refused.status_code == 400
    assert "method 'cachecraft' takes no recompute_ratio: it takes alpha, focus" in refused.json()["error"]["message"]


@pytest.mark.parametrize("form", ["query-whole", "query:whole:late:stored"])
def test_the_calibrated_form_can_be_requested_and_be_the_servers_own(serve, form: str):
    """Both watch the question's whole text in the last half of the layers, and weigh by what was stored."""
    for client, reuse in ((serve(), {"method": form}), (serve(method=form), {})):
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            reply = client.ask(documents=documents, chunkweave={**reuse, "recompute_ratio": 0.2})
            assert reply.status_code == 200, reply.text
        report = reply.json()["chunkweave"]
        assert report["parameters"]["recompute_ratio"] == 0.2
        if form == "query-whole":
            assert (report["method"], report["parameters"].keys()) == ("query-whole", {"recompute_ratio"})
        else:
            query = {"tail": None, "layers": "late", "factor": "stored", "rounds": 1}
            assert (report["method"], report["parameters"]["query"]) == ("query", query)


@pytest.mark.backend("vllm")
def test_a_request_wins_over_a_setting_that_vllm_was_started_with(serve):
    """Also where it says the default: the plug-in has the server's settings as its own."""
    client = serve(alpha=2.0, focus=False, method="cachecraft")
    connector = client.service.settings.connector_config()
    assert (connector["alpha"], connector["focus"]) == (2.0, False)
    client.ask(documents=DOCUMENTS)
    client.ask(documents=DOCUMENTS, chunkweave={"alpha": 1, "focus": True})
    sent = [one["kv_transfer_params"]["chunkweave"] for one in client.fake.seen]
    assert [(one["alpha"], one["focus"]) for one in sent] == [(2.0, False), (1.0, True)]
