"""What the page asks of the server, without a browser: who sees what, what is counted, what is refused."""

import re
from typing import Any

import pytest

from chunkweave.plugins import METHODS
from tests.server.conftest import ADMIN_KEY, KEYS, Client, Serve, bearer, key_ring, report_of

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]


def seen(client: Client, path: str, key: str | None = None) -> dict[str, Any]:
    reply = client.get(f"/v1/{path}", headers=bearer(key))
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids(client: Client, key: str | None = None) -> list[str]:
    """The requests with an answer that are listed."""
    return [one["request_id"] for one in seen(client, "requests", key)["data"]]


def test_the_page_needs_no_key_and_nothing_from_elsewhere(serve: Serve):
    page = serve(keys=key_ring()).get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'; script-src 'sha256-" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|(?:src|href)=\"(?!data:)", page.text)


def test_a_request_is_listed_with_the_sources_of_its_tokens(client):
    answers = [client.ask(documents=DOCUMENTS) for _ in range(2)]
    assert ids(client) == [answer.headers["x-request-id"] for answer in reversed(answers)]
    newest = seen(client, "requests")["data"][0]
    report = answers[-1].json()["chunkweave"]
    assert sum(newest["tokens_by_source"].values()) == newest["prompt_tokens"] == report["prompt_tokens"]
    assert newest["tokens_not_computed"] == report["prefix_exact_tokens"] + report["reused_tokens"] > 0
    assert newest["method"] == report["method"]


REFUSED = {
    "a field": ({"documents": 7}, "400"),
    "method": ({"chunkweave": {"method": "made-up"}}, "400"),
    "corpus": ({"chunkweave": {"corpus": "harbour"}, "documents": []}, "404 corpus_not_found"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_request_is_listed_with_its_code_and_without_its_message(serve: Serve, what: str):
    body, code = REFUSED[what]
    client = serve(keys=key_ring())
    refused = client.ask(key=KEYS["acme"], **{"documents": DOCUMENTS, **body})
    assert refused.status_code == int(code[:3])
    for key in (KEYS["acme"], ADMIN_KEY):
        (listed,) = seen(client, "requests", key)["unanswered"]
        assert (listed["outcome"], listed["error"]) == ("rejected", code)
        assert "message" not in listed, "it may quote the request"
    assert seen(client, "requests", KEYS["bolt"])["unanswered"] == []


def test_refused_requests_do_not_push_answers_out(client):
    client.ask(documents=DOCUMENTS)
    kept = ids(client)
    for _ in range(210):
        assert client.ask(chunkweave={"corpus": "none"}).status_code == 404
    shown = seen(client, "requests?limit=200")
    assert [one["request_id"] for one in shown["data"]] == kept
    assert len(shown["unanswered"]) == 50


def test_nothing_is_sent_while_nothing_has_changed(client):
    version = seen(client, "requests")["version"]
    unchanged = client.get(f"/v1/requests?since={version}")
    assert (unchanged.status_code, unchanged.content) == (204, b"")
    client.ask(documents=DOCUMENTS)
    answered = seen(client, f"requests?since={version}")["version"]
    client.ask(chunkweave={"corpus": "none"})
    assert seen(client, f"requests?since={answered}")["unanswered"]


def test_tenants_see_their_own_and_an_admin_all_without_names(serve: Serve):
    client = serve(keys=key_ring())
    before = seen(client, "requests", KEYS["bolt"])
    client.ask(key=KEYS["acme"], documents=[{"text": DOCUMENTS[0], "title": "Secret"}])
    (request_id,) = ids(client, KEYS["acme"])
    assert seen(client, "requests", KEYS["bolt"]) == before, "nothing tells a tenant that others ask"
    assert before["data"] == []
    assert "stored" not in before
    (listed,) = seen(client, "requests", ADMIN_KEY)["data"]
    assert (listed["request_id"], listed["tenant"]) == (request_id, "acme")
    assert "Secret" not in str(seen(client, "requests", ADMIN_KEY))


def test_looking_does_not_use_up_the_requests_a_minute(serve: Serve):
    client = serve(keys=key_ring(), requests_per_minute=2, burst=2)
    for _ in range(6):
        seen(client, "requests", KEYS["acme"])


def test_the_server_says_which_methods_there_are_what_they_do_and_take(client):
    shown = seen(client, "server")
    methods = {one["name"]: one for one in shown["methods"]}
    assert tuple(methods) == METHODS.names
    assert all(len(one["about"]) > 30 and one["about"].endswith(".") for one in methods.values())
    assert "recompute_ratio" in methods["query"]["parameters"]
    assert methods["full"]["parameters"] == []
    assert {name for name, one in methods.items() if one["exact"]} == {"full", "prefix"}
    assert (shown["model"], shown["admin"], shown["tenants"]) == ("toy", True, False)


def test_the_server_says_who_is_an_admin(serve: Serve):
    client = serve(keys=key_ring())
    for key, admin in ((ADMIN_KEY, True), (KEYS["acme"], False)):
        shown = seen(client, "server", key)
        assert (shown["admin"], shown["tenants"]) == (admin, True)


def test_totals_count_what_reuse_saved_and_status_has_the_same(client):
    assert seen(client, "requests")["totals"]["time_saved_s"] is None, "nothing was computed yet"
    reports = []
    for method in ("full", "full-reuse", "full-reuse"):
        client.warm(*DOCUMENTS)
        reports.append(report_of(client.ask(documents=DOCUMENTS, chunkweave={"method": method})))
    totals = seen(client, "requests")["totals"]
    assert totals["requests"] == 3
    assert totals["prompt_tokens"] == sum(one["prompt_tokens"] for one in reports)
    expected = sum(one["prefix_exact_tokens"] + one["reused_tokens"] for one in reports)
    assert totals["tokens_not_computed"] == expected > 0
    assert totals["time_saved_s"] == pytest.approx(sum(one["saved_s"] for one in reports), abs=1e-3)
    assert totals["saved_share"] == pytest.approx(totals["time_saved_s"] / totals["full_s"])
    rows = seen(client, "requests")["data"]
    assert [row["saved_s"] for row in rows] == pytest.approx([one["saved_s"] for one in reports[::-1]], abs=1e-4)
    actual, full = (client.metric("prefill_seconds_total", way=way) for way in ("actual", "full"))
    assert full == pytest.approx(totals["full_s"])
    assert full - actual == pytest.approx(totals["time_saved_s"], abs=1e-6)
    cache = seen(client, "cache")
    assert cache["tenant"] == cache["all_tenants"] == totals


def test_an_admin_gets_the_totals_of_all_tenants(serve: Serve):
    client = serve(keys=key_ring())
    for tenant in ("acme", "bolt"):
        client.ask(key=KEYS[tenant], documents=DOCUMENTS)
    assert seen(client, "requests", ADMIN_KEY)["totals"]["requests"] == 2
    assert seen(client, "requests", KEYS["acme"])["totals"]["requests"] == 1
    cache = seen(client, "cache", ADMIN_KEY)
    assert (cache["tenant"]["requests"], cache["all_tenants"]["requests"]) == (0, 2)
    assert "all_tenants" not in seen(client, "cache", KEYS["acme"])


@pytest.mark.backend("engine")
def test_what_is_stored_is_shown(client):
    client.ask(documents=DOCUMENTS)
    assert seen(client, "requests")["stored"]["host"]["segments"] >= 2
