"""The page at `/` without a browser: its pieces, who sees what, what is refused."""

import re

import pytest

from chunkweave.plugins import METHODS
from tests.server.conftest import ADMIN_KEY, KEYS, Client, Serve, bearer, key_ring

DOCUMENTS = ["The ferry leaves at seven, at noon and at six.", "Pilots board ships two miles west of the lighthouse."]


def piece(client: Client, path: str, key: str | None = None):
    return client.get(f"/v1/page/{path}", headers={"hx-request": "true", **bearer(key)})


def command(client: Client, what: str, **body):
    """What a button of the page has the API do, in the words that it shows."""
    done = client.post(f"/v1/cache/{what}", json=body)
    assert done.status_code == 200, done.text
    return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in done.json().items())


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
    for path in ("live", "corpora", "corpora/options", "requests/x"):
        assert client.get(f"/v1/page/{path}").status_code == 403
    for path in ("cache/clear", "cache/warm", "chat/completions"):
        assert client.post(f"/v1/{path}", data={"everything": "true", "documents": "x"}).status_code == 400


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


def test_the_page_says_which_methods_there_are_and_which_take_a_ratio(client):
    boxes = re.findall(r'name="methods" value="([\w-]+)"( data-ratio)?( checked)?', client.get("/").text)
    assert [name for name, *_ in boxes] == [
        *(name for name in METHODS.names if name not in ("prefix", "full")),
        "prefix",
        "full",
    ]
    assert {name for name, ratio, _ in boxes if ratio} >= {"cacheblend", "query"}
    assert not any(ratio for name, ratio, _ in boxes if name in ("full", "full-reuse", "prefix"))
    assert {name for name, _, checked in boxes if checked} == {"cacheblend", "query", "full"}


@pytest.mark.parametrize("method", ["full", "full-reuse"])
def test_an_answer_is_found_by_the_id_of_its_request(client, method):
    assert "2 computed" in command(client, "warm", documents=DOCUMENTS)
    answer = client.ask(documents=DOCUMENTS, max_tokens=4, chunkweave={"method": method})
    shown = piece(client, f"requests/{answer.headers['x-request-id']}?compared=true")
    assert shown.status_code == 200, shown.text
    assert f"<strong>{method}</strong>" in shown.text
    assert "<h2>" not in shown.text


def test_of_one_id_the_last_request_is_found_and_none_of_another_tenant(serve: Serve):
    client = serve(keys=key_ring())
    body = {"messages": [{"role": "user", "content": "When?"}], "documents": DOCUMENTS, "max_tokens": 2}
    for title in ("Ferries", "Pilots"):
        named = {**body, "documents": [{"text": DOCUMENTS[0], "title": title}]}
        headers = {"x-request-id": "mine", **bearer(KEYS["acme"])}
        assert client.post("/v1/chat/completions", json=named, headers=headers).status_code == 200
    assert "Pilots" in piece(client, "requests/mine", KEYS["acme"]).text
    assert piece(client, "requests/mine", KEYS["bolt"]).status_code == 404


def test_corpora_are_listed_and_warmed(client):
    client.post("/v1/corpora", json={"name": "harbour"})
    client.post("/v1/corpora/harbour/documents", json={"documents": DOCUMENTS})
    shown = piece(client, "corpora").text
    assert 'data-command="warm" data-corpus="harbour"' in shown
    assert 'value="harbour"' in piece(client, "corpora/options").text
    assert "2 chunks" in command(client, "warm", corpus="harbour")
    answer = client.ask(max_tokens=3, chunkweave={"corpus": "harbour", "top_k": 1, "method": "full"})
    assert answer.status_code == 200, answer.text


@pytest.mark.backend("engine")
def test_what_is_stored_is_shown_pinned_and_cleared(client):
    client.post("/v1/corpora", json={"name": "harbour"})
    client.post("/v1/corpora/harbour/documents", json={"documents": DOCUMENTS})
    assert 'id="pin-harbour"' in piece(client, "corpora").text
    for what, words in (("warm", "2 computed"), ("pin", "2 segments pinned"), ("unpin", "2 chunks unpinned")):
        assert words in command(client, what, corpus="harbour")
    client.ask(documents=DOCUMENTS)
    assert re.search(r"<td>host</td>", piece(client, "live").text)
    assert "segments removed" in command(client, "clear", corpus="harbour")
    assert "segments removed" in command(client, "clear", everything=True)


@pytest.mark.backend("vllm")
def test_over_vllm_what_is_stored_is_cleared_and_not_pinned(client):
    client.post("/v1/corpora", json={"name": "harbour"})
    client.post("/v1/corpora/harbour/documents", json={"documents": DOCUMENTS[:1]})
    command(client, "warm", corpus="harbour")
    shown = piece(client, "corpora").text
    assert ("clear-harbour" in shown, "clear-all" in shown, "pin-harbour" in shown) == (True, True, False)
    assert "1 segments removed" in command(client, "clear", corpus="harbour")
    assert "segments removed" in command(client, "clear", everything=True)


def test_only_an_admin_is_offered_to_clear_everything(serve: Serve):
    client = serve(keys=key_ring())
    assert "clear-all" in piece(client, "corpora", ADMIN_KEY).text
    assert "clear-all" not in piece(client, "corpora", KEYS["acme"]).text
