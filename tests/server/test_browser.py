"""The page in a real browser, without a screen; skipped where there is no Chromium (`apt-get install chromium`)."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import ADMIN_KEY, KEYS, bearer, key_ring, listening, service_over

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PASSAGES = "The ferry leaves at seven, at noon and at six.\n\nPilots board ships two miles west of the lighthouse."
NARROW = {"width": 375, "height": 812}
WAIT_MS = 60_000


@contextmanager
def served(backend: str, folder: Path, **options) -> Iterator[str]:
    """The URL of a server over that backend."""
    with service_over(backend, folder, **options) as (service, _), listening(service) as server:
        yield server.url


@pytest.fixture(scope="module", params=["engine", "vllm"])
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def url(backend: str, tmp_path_factory) -> Iterator[str]:
    with served(backend, tmp_path_factory.mktemp("report"), keys=key_ring()) as url:
        yield url


@pytest.fixture
def fresh_url(backend: str, tmp_path: Path) -> Iterator[str]:
    """A server without keys, which has answered nothing yet."""
    with served(backend, tmp_path) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens pages that may ask nothing of any other server, and complain of nothing."""
    pages, asked, complaints = [], [], []

    def complain(said) -> None:
        if said.type == "error" and "Failed to load resource" not in said.text:
            complaints.append(said.text)

    def opening(url: str, **viewport: int):
        page = browser.new_page(viewport={"width": 1280, "height": 900, **viewport})
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: asked.append((url, request.url)))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", complain)
        page.goto(url)
        pages.append(page)
        return page

    yield opening
    for page in pages:
        page.close()
    assert all(one.startswith((url, "data:")) for url, one in asked)
    assert complaints == []


@pytest.fixture
def page(opened, url: str):
    """The page with an admin's key."""
    page = opened(url)
    use_key(page, ADMIN_KEY)
    return page


def use_key(page, key: str) -> None:
    page.fill("#key", key)
    page.press("#key", "Enter")
    page.wait_for_selector("#totals table")


def expect(page, selector: str):
    return sync_api.expect(page.locator(selector))


def ask(page, *methods: str, question: str = "When does the ferry leave?", passages: str = PASSAGES) -> None:
    page.fill("#question", question)
    page.fill("#documents", passages)
    for box in page.query_selector_all("input[name=methods]"):
        box.set_checked(box.get_attribute("value") in methods)
    page.click("#ask button")


def test_methods_are_compared_one_after_the_other(page, url):
    sent = []
    page.on("request", lambda request: sent.append(("sent", request.url)))
    page.on("response", lambda response: sent.append(("done", response.url)))
    ask(page, "full", "full-reuse", "prefix")
    expect(page, "#answers article").to_have_count(3, timeout=WAIT_MS)
    assert [event for event, of in sent if of.endswith("/v1/chat/completions")] == ["sent", "done"] * 3
    cards = {card.split(":")[0]: card for card in page.locator("#answers p").all_inner_texts()}
    assert "full" not in cards["full"].removeprefix("full:")
    assert cards["prefix"].endswith("; same answer as full")
    totals = httpx.get(f"{url}/v1/requests", headers=bearer(ADMIN_KEY)).json()["totals"]
    saved = f"{totals['tokens_not_computed']} of {totals['prompt_tokens']}"
    expect(page, "#totals").to_contain_text(saved, timeout=WAIT_MS)
    expect(page, "#requests").to_contain_text("full-reuse", timeout=WAIT_MS)


def test_an_answer_that_differs_from_that_of_full_is_marked(page):
    answers = iter(["At seven and <b>six</b>.", "At seven, at noon."])

    def answered(route):
        reply = route.fetch()
        body = reply.json()
        body["choices"][0]["message"]["content"] = next(answers)
        route.fulfill(response=reply, json=body)

    page.route("**/chat/completions", answered)
    ask(page, "full", "full-reuse")
    expect(page, "#answers").to_contain_text("; differs from full", timeout=WAIT_MS)
    expect(page, "#answers").to_contain_text("At seven and <b>six</b>.")


@pytest.mark.parametrize(
    ("methods", "question", "said"), [((), "x", "choose a method"), (("full",), " ", "the question is empty")]
)
def test_what_is_wrong_or_refused_is_said_in_place(page, methods, question, said):
    ask(page, *methods, question=question)
    expect(page, "#answers [role=alert]").to_have_text(said, timeout=WAIT_MS)


def test_a_wrong_key_is_said_and_the_right_one_taken(opened, url):
    page = opened(url)
    expect(page, "#state [role=alert]").to_be_visible(timeout=WAIT_MS)
    page.fill("#key", "not a key of anybody at all")
    page.press("#key", "Enter")
    expect(page, "#state [role=alert]").to_have_text("no such API key", timeout=WAIT_MS)
    use_key(page, KEYS["acme"])
    expect(page, "#state [role=alert]").to_have_count(0)


@pytest.mark.parametrize("keys", [False, True])
def test_the_first_run_shows_a_curl_that_works_as_it_is(opened, url, fresh_url, keys):
    page = opened(url if keys else fresh_url)
    if keys:
        use_key(page, KEYS["bolt"])
    expect(page, "#curl").to_be_visible(timeout=WAIT_MS)
    assert page.locator("#key-form").is_visible() == keys
    command = page.locator("#curl").inner_text()
    assert ("CHUNKWEAVE_API_KEY" in command) == keys
    environment = {**os.environ, "CHUNKWEAVE_API_KEY": KEYS["bolt"]}
    done = subprocess.run(
        ["sh", "-c", f"curl -sS --max-time 30 {command.removeprefix('curl ')}"], capture_output=True, env=environment
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"], done
    expect(page, "#requests tr").to_have_count(2, timeout=WAIT_MS)
    expect(page, "#first-run").to_be_hidden()


def test_files_are_added_to_a_new_corpus_which_is_asked(page, tmp_path):
    for name, text in zip(("ferry.txt", "pilots.md"), PASSAGES.split("\n\n"), strict=True):
        (tmp_path / name).write_text(text)
    page.fill("#name", "uploads")
    page.set_input_files("#files", [tmp_path / "ferry.txt", tmp_path / "pilots.md"])
    page.click("#upload button")
    expect(page, "#outcome").to_contain_text("uploads has 2 documents in 2 chunks.", timeout=WAIT_MS)
    page.select_option("#corpus", "uploads")
    sent = []
    page.on("request", lambda one: sent.append(one.post_data_json) if "chat/completions" in one.url else None)
    ask(page, "full")
    expect(page, "#answers article").to_have_count(1, timeout=WAIT_MS)
    assert sent[0]["chunkweave"] == {"method": "full", "corpus": "uploads"}
    page.select_option("#corpus", "")


def test_an_upload_that_is_refused_says_what_the_server_says(page, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    page.fill("#name", "No Name!")
    page.set_input_files("#files", [tmp_path / "notes.txt"])
    page.click("#upload button")
    expect(page, "#outcome [role=alert]").to_contain_text("'No Name!' is not a valid corpus name", timeout=WAIT_MS)


def test_rejected_requests_are_apart_with_their_code(page, url):
    body = {"messages": [{"role": "user", "content": "When?"}], "chunkweave": {"corpus": "nowhere"}}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(ADMIN_KEY)).status_code == 404
    expect(page, "#unanswered").to_contain_text("404 corpus not found", timeout=WAIT_MS)
    expect(page, "#requests").not_to_contain_text("not found")


def test_a_server_that_ends_and_comes_again_is_found_again(page):
    page.route("**/v1/requests*", lambda route: route.abort())
    expect(page, "#state").to_contain_text("the server does not answer", timeout=WAIT_MS)
    page.unroute("**/v1/requests*")
    expect(page, "#now").to_be_visible(timeout=WAIT_MS)


def test_on_a_narrow_screen_the_page_is_not_wider(page):
    page.set_viewport_size(NARROW)
    ask(page, "full")
    expect(page, "#answers article").to_have_count(1, timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
