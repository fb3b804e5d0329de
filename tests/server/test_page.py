"""The page at `/` without a browser: its pieces, who sees what, what is refused."""

import re

import pytest

from tests.server.conftest import ADMIN_KEY, KEYS, Client, Serve, bearer, key_ring

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]
FORM = {"question": "When does the ferry leave?", "documents": "\n\n".join(DOCUMENTS), "max_tokens": "4"}


def piece(client: Client, path: str, key: str | None = None, **form):
    headers = {"hx-request": "true", **bearer(key)}
    if form:
        return client.post(f"/v1/page/{path}", data=form, headers=headers)
    return client.get(f"/v1/page/{path}", headers=headers)


def keys_of(live: str) -> list[str]:
    """The requests that are listed."""
    return re.findall(r'hx-get="/v1/page/requests/(\w+)"', live)


def test_the_page_and_its_files_need_no_key_and_nothing_from_elsewhere(serve: Serve):
    client = serve(keys=key_ring())
    page = client.get("/")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(/[^"]+)"', page.text)
    assert len(files) == 3
    for file in files:
        assert client.get(file).status_code == 200
    assert "http" not in page.text.replace("http-equiv", "")
    assert client.get("/page/nothing.js").status_code in (401, 404)


def test_pieces_need_a_key_where_there_are_keys(serve: Serve):
    client = serve(keys=key_ring())
    assert piece(client, "live").status_code == 401
    assert piece(client, "live", KEYS["acme"]).status_code == 200


def test_what_another_site_sends_is_refused(client):
    assert client.post("/v1/page/clear").status_code == 403
    assert client.get("/v1/page/live").status_code == 403


def test_a_request_is_listed_and_shown_part_by_part(client):
    documents = [{"text": DOCUMENTS[0], "title": "Ferries <b>"}, {"text": DOCUMENTS[1], "title": "Pilots"}]
    for _ in range(2):
        assert client.ask(documents=documents).status_code == 200
    live = piece(client, "live").text
    keys = keys_of(live)
    assert len(keys) == 2
    shown = piece(client, f"requests/{keys[0]}").text
    assert "Ferries &lt;b&gt;" in shown
    assert "Ferries <b>" not in shown
    assert "Pilots" in shown
    assert 'class="prefix-exact"' in shown or 'class="reused"' in shown
    assert piece(client, "requests/99").status_code == 404


@pytest.mark.backend("engine")
def test_a_refused_request_is_listed_with_its_reason_and_without_its_words(client):
    assert client.ask(documents=DOCUMENTS, model="made-up").status_code == 404
    live = piece(client, "live").text
    assert "404 model_not_found" in live
    assert "made-up" not in live


def test_nothing_is_sent_while_nothing_has_changed(client):
    version = re.search(r'name="since" value="([^"]+)"', piece(client, "live").text)
    assert piece(client, f"live?since={version[1]}").status_code == 204
    client.ask(documents=DOCUMENTS)
    assert piece(client, f"live?since={version[1]}").status_code == 200


def test_tenants_see_their_own_and_an_admin_all_without_names(serve: Serve):
    client = serve(keys=key_ring())
    client.ask(key=KEYS["acme"], documents=[{"text": DOCUMENTS[0], "title": "Secret"}])
    (key,) = keys_of(piece(client, "live", KEYS["acme"]).text)
    assert "Secret" in piece(client, f"requests/{key}", KEYS["acme"]).text
    assert keys_of(piece(client, "live", KEYS["bolt"]).text) == []
    assert piece(client, f"requests/{key}", KEYS["bolt"]).status_code == 404
    assert keys_of(piece(client, "live", ADMIN_KEY).text) == [key]
    seen = piece(client, f"requests/{key}", ADMIN_KEY)
    assert seen.status_code == 200
    assert "Secret" not in seen.text
    assert "acme" in piece(client, "live", ADMIN_KEY).text


def test_nothing_tells_a_tenant_that_others_ask(serve: Serve):
    client = serve(keys=key_ring())
    before = piece(client, "live", KEYS["bolt"]).text
    client.ask(key=KEYS["acme"], documents=DOCUMENTS)
    assert piece(client, "live", KEYS["bolt"]).text == before


def test_looking_does_not_use_up_the_requests_a_minute(serve: Serve):
    client = serve(keys=key_ring(), requests_per_minute=2, burst=2)
    for _ in range(6):
        assert piece(client, "live", KEYS["acme"]).status_code == 200


def test_methods_are_asked_one_by_one(client):
    places = piece(client, "ask", **FORM, methods=["full", "query"], warm="yes")
    assert places.status_code == 200
    assert places.text.count('hx-post="/v1/page/answer"') == 2
    assert piece(client, "warm", **FORM).status_code == 200
    for method in ("full", "full-reuse"):
        answer = piece(client, "answer", **FORM, method=method)
        assert answer.status_code == 200, answer.text
        assert f"<strong>{method}</strong>" in answer.text


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"question": " "}, "question"),
        ({"methods": []}, "method"),
        ({"methods": ["none of ours"]}, "no method"),
    ],
)
def test_the_box_says_what_is_wrong(client, form, words):
    refused = piece(client, "ask", **{**FORM, "methods": ["full"], **form})
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


def test_a_number_that_is_none_is_named(client):
    refused = piece(client, "answer", **{**FORM, "max_tokens": "many"}, method="full")
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "tokens of answer: 'many' is no number")


def test_corpora_are_listed_and_warmed(client):
    client.post("/v1/corpora", json={"name": "harbour"})
    client.post("/v1/corpora/harbour/documents", json={"documents": DOCUMENTS})
    assert "harbour" in piece(client, "corpora").text
    assert 'value="harbour"' in piece(client, "corpora/options").text
    done = piece(client, "corpora/harbour/warm", sent="yes")
    assert "2 chunks" in done.text
    answer = piece(client, "answer", question="When?", corpus="harbour", top_k="1", max_tokens="3", method="full")
    assert answer.status_code == 200, answer.text


@pytest.mark.backend("engine")
def test_what_is_stored_is_shown_pinned_and_cleared(client):
    client.post("/v1/corpora", json={"name": "harbour"})
    client.post("/v1/corpora/harbour/documents", json={"documents": DOCUMENTS})
    for what, words in (("warm", "2 computed"), ("pin", "2 segments pinned"), ("unpin", "2 chunks unpinned")):
        assert words in piece(client, f"corpora/harbour/{what}", sent="yes").text
    client.ask(documents=DOCUMENTS)
    assert re.search(r"<td>host</td>", piece(client, "live").text)
    assert "segments removed" in piece(client, "corpora/harbour/clear", sent="yes").text
    assert "segments removed" in piece(client, "clear", sent="yes").text


@pytest.mark.backend("vllm")
def test_over_vllm_what_is_stored_is_cleared_and_not_pinned(client):
    client.post("/v1/corpora", json={"name": "harbour"})
    client.post("/v1/corpora/harbour/documents", json={"documents": DOCUMENTS[:1]})
    piece(client, "corpora/harbour/warm", sent="yes")
    shown = piece(client, "corpora").text
    assert ("clear-harbour" in shown, "clear-all" in shown, "pin-harbour" in shown) == (True, True, False)
    assert "1 segments removed" in piece(client, "corpora/harbour/clear", sent="yes").text
    assert "segments removed" in piece(client, "clear", sent="yes").text
