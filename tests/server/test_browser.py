"""The page in a real browser, without a screen; skipped where there is no Chromium (`apt-get install chromium`)."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from benchmarks.server_thread import ServerThread

from chunkweave_server.backend import Stage
from tests.server.conftest import ADMIN_KEY, KEYS, bearer, key_ring, toy_service, vllm_service, wait_until
from tests.server.fake_vllm import FakeVllm

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PASSAGES = "The ferry leaves at seven, at noon and at six.\n\nPilots board ships two miles west of the lighthouse."
NARROW = {"width": 375, "height": 812}
WAIT_MS = 60_000
BROKEN_WORDS = """() => {
  const broken = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const named = node.parentElement.closest(".name") !== null;
    for (const found of node.data.matchAll(named ? /\\S+/g : /[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      const rects = [...range.getClientRects()].filter((one) => one.width > 0);
      const lines = new Set(rects.map((one) => Math.round(one.top)));
      if (lines.size > 1) broken.push(found[0]);
    }
  }
  return broken;
}"""
"""Words that are on more than one line; a method's name may not even break at its hyphen."""


def started(stack: ExitStack, backend: str, socket: Path, **options) -> str:
    """A server over that backend; returns its URL."""
    if backend == "vllm":
        service = vllm_service(stack.enter_context(FakeVllm(str(socket))), **options)
    else:
        service = toy_service(**options)
    server = stack.enter_context(ServerThread(service))
    wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED))
    assert service.failure is None
    return server.url


@pytest.fixture(scope="module", params=["engine", "vllm"])
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def url(backend: str, tmp_path_factory) -> Iterator[str]:
    with ExitStack() as stack:
        yield started(stack, backend, tmp_path_factory.mktemp("report") / "socket", keys=key_ring())


@pytest.fixture
def fresh_url(backend: str, tmp_path: Path) -> Iterator[str]:
    """A server without keys, which has answered nothing yet."""
    with ExitStack() as stack:
        yield started(stack, backend, tmp_path / "socket")


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


@pytest.fixture
def api(url: str) -> Iterator[httpx.Client]:
    """The API with the same key."""
    with httpx.Client(base_url=f"{url}/v1", headers=bearer(ADMIN_KEY)) as client:
        yield client


def use_key(page, key: str) -> None:
    page.fill("#key", key)
    page.press("#key", "Enter")
    page.wait_for_selector("#current div")


def expect(page, selector: str):
    return sync_api.expect(page.locator(selector))


def choose(page, *methods: str) -> None:
    for box in page.query_selector_all("input[name=methods]"):
        box.set_checked(box.get_attribute("value") in methods)


def ask(page, *methods: str) -> None:
    page.fill("#question", "When does the ferry leave?")
    if page.input_value("#corpus") == "":
        page.fill("#documents", PASSAGES)
    page.fill("#most", "3")
    choose(page, *methods)
    page.click("#ask button")
    expect(page, "article.answer").to_have_count(len(methods), timeout=WAIT_MS)


def test_methods_are_compared_one_after_the_other(page):
    sent = []
    page.on("request", lambda request: sent.append(("sent", request.url)))
    page.on("response", lambda response: sent.append(("done", response.url)))
    ask(page, "full", "full-reuse", "cacheblend")
    shown = [one.inner_text() for one in page.query_selector_all("article.answer h3")]
    assert shown == ["cacheblend", "full-reuse", "full"]
    assert page.query_selector("article.answer:nth-of-type(2) rect.reused") is not None
    steps = [what for what, url in sent if url.endswith(("/v1/chat/completions", "/v1/cache/warm"))]
    assert steps == ["sent", "done"] * 4


def test_a_request_is_opened_with_the_keyboard_alone(page):
    ask(page, "full-reuse")
    page.wait_for_selector("#requests button.link")
    newest = page.locator("#requests button.link").first
    newest.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#request .strip")
    assert page.locator("#request summary").count() == 1
    page.locator("#request summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#request table").is_visible()


def test_the_focus_stays_while_new_requests_come_in(page):
    listed = page.locator("#requests button.link").count()
    ask(page, "full-reuse")
    expect(page, "#requests button.link").to_have_count(listed + 1, timeout=WAIT_MS)
    page.locator("#requests button.link").first.focus()
    focused = page.evaluate("document.activeElement.id")
    page.evaluate("document.getElementById('ask').requestSubmit()")
    expect(page, "#requests button.link").to_have_count(listed + 2, timeout=WAIT_MS)
    page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.id") == focused


def test_what_went_wrong_is_said_in_place(page):
    page.fill("#question", "x")
    page.fill("#documents", "")
    page.fill("#top-k", "")
    choose(page)
    page.click("#ask button")
    assert page.locator("#answers [role=alert]").inner_text() == "choose a method"


def test_what_the_api_refuses_is_said_in_place(page):
    page.fill("#question", " ")
    page.fill("#documents", PASSAGES)
    choose(page, "full")
    page.click("#ask button")
    expect(page, "#answers [role=alert]").to_have_text("the question is empty", timeout=WAIT_MS)


def test_a_ratio_goes_to_methods_that_take_one(page):
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None)
    page.fill("#ratio", "0.5")
    ask(page, "cacheblend", "full")
    assert [one["chunkweave"].get("recompute_ratio") for one in sent] == [0.5, None]
    assert page.locator("article.answer").first.inner_text().startswith("cacheblend")
    page.fill("#ratio", "")


def test_everything_is_cleared_after_a_question(page):
    ask(page, "full-reuse")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#clear-all")
    expect(page, "#corpora [role=status]").to_contain_text("segments removed", timeout=WAIT_MS)


def test_a_wrong_key_is_said_and_the_right_one_taken(opened, url):
    page = opened(url)
    expect(page, "#live [role=alert]").to_be_visible(timeout=WAIT_MS)
    page.fill("#key", "not a key of anybody at all")
    page.press("#key", "Enter")
    expect(page, "#live [role=alert]").to_have_text("no such API key", timeout=WAIT_MS)
    use_key(page, KEYS["acme"])
    expect(page, "#live [role=alert]").to_have_count(0)
    assert page.locator("#clear-all").count() == 0, "that is for admins"


def test_a_server_without_keys_asks_for_none(opened, fresh_url):
    page = opened(fresh_url)
    page.wait_for_selector("#current div")
    assert not page.locator("#key-form").is_visible()


@pytest.mark.parametrize("keys", [False, True])
def test_the_first_run_shows_a_curl_that_works_as_it_is(opened, url, fresh_url, keys):
    page = opened(url if keys else fresh_url)
    if keys:
        use_key(page, KEYS["bolt"])
    expect(page, "#curl").to_be_visible(timeout=WAIT_MS)
    command = page.locator("#curl").inner_text()
    assert ("CHUNKWEAVE_API_KEY" in command) == keys
    environment = {**os.environ, "CHUNKWEAVE_API_KEY": KEYS["bolt"]}
    done = subprocess.run(
        ["sh", "-c", f"curl -sS --max-time 30 {command.removeprefix('curl ')}"], capture_output=True, env=environment
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"], done
    expect(page, "#requests button.link").to_have_count(1, timeout=WAIT_MS)
    expect(page, "#first-run").to_be_hidden()


def test_a_corpus_is_chosen_and_asked(page, api):
    api.post("/corpora", json={"name": "harbour"})
    api.post("/corpora/harbour/documents", json={"documents": PASSAGES.split("\n\n"), "update": True})
    page.reload()
    expect(page, "#corpus option[value=harbour]").to_have_count(1, timeout=WAIT_MS)
    page.select_option("#corpus", "harbour")
    assert page.locator("#documents").is_disabled()
    page.fill("#top-k", "1")
    sent = []
    page.on("request", lambda one: sent.append(one.post_data_json) if "chat/completions" in one.url else None)
    ask(page, "full")
    assert (sent[0]["chunkweave"]["corpus"], sent[0]["chunkweave"]["top_k"]) == ("harbour", 1)
    page.locator("article.answer summary").click()
    assert len(page.locator("article.answer tbody tr").all()) == 2, "the instruction and one passage"


def test_a_corpus_is_warmed_and_cleared(page, api):
    api.post("/corpora", json={"name": "quay"})
    api.post("/corpora/quay/documents", json={"documents": [PASSAGES], "update": True})
    page.reload()
    page.click("#warm-quay")
    expect(page, "#corpora-said").to_have_text("quay: 1 chunks, 1 computed", timeout=WAIT_MS)
    assert page.locator("#pin-quay").count() == (api.get("/server").json()["pins"] is True)
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#clear-quay")
    expect(page, "#corpora-said").to_contain_text("quay: 1 segments removed", timeout=WAIT_MS)


def test_files_are_added_to_a_new_corpus_and_asked_about(page, tmp_path):
    for name, text in zip(("ferry.txt", "pilots.md"), PASSAGES.split("\n\n"), strict=True):
        (tmp_path / name).write_text(text)
    page.fill("#name", "uploads")
    page.set_input_files("#files", [tmp_path / "ferry.txt", tmp_path / "pilots.md"])
    page.click("#upload button")
    expect(page, "#corpora-said").to_contain_text("2 added: ferry.txt, pilots.md", timeout=WAIT_MS)
    expect(page, "#corpora-said").to_contain_text("uploads has 2 documents in 2 chunks.")
    expect(page, "#corpus").to_have_value("uploads", timeout=WAIT_MS)
    ask(page, "full-reuse")
    (tmp_path / "ferry.txt").write_text("The ferry leaves at eight.")
    assert page.input_value("#into") == "uploads"
    page.set_input_files("#files", [tmp_path / "ferry.txt", tmp_path / "pilots.md"])
    page.click("#upload button")
    expect(page, "#corpora-said").to_contain_text("1 replaced: ferry.txt", timeout=WAIT_MS)
    expect(page, "#corpora-said").to_contain_text("1 unchanged: pilots.md")


def test_an_upload_that_is_refused_says_what_the_server_says(page, url, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    page.select_option("#into", "")
    page.fill("#name", "No Name!")
    page.set_input_files("#files", [tmp_path / "notes.txt"])
    page.click("#upload button")
    expect(page, "#corpora-said [role=alert]").to_contain_text("'No Name!' is not a valid corpus name", timeout=WAIT_MS)
    page.route(
        "**/documents/files*",
        lambda route: route.fulfill(status=415, json={"error": {"message": "no text in <b>it</b>"}}),
    )
    page.fill("#name", "refused")
    page.click("#upload button")
    expect(page, "#corpora-said [role=alert]").to_have_text("no text in <b>it</b>", timeout=WAIT_MS)


def test_it_says_which_answers_are_equal_to_that_of_full(page):
    ask(page, "full", "full-reuse", "prefix")
    texts, verdicts = {}, {}
    expect(page, "article.answer .verdict").to_have_count(3, timeout=WAIT_MS)
    for card in page.locator("article.answer").all():
        method = card.get_attribute("data-method")
        texts[method] = card.locator("blockquote").inner_text()
        verdicts[method] = card.locator(".verdict").inner_text()
    assert verdicts["full"] == "the answer that others are compared with"
    assert verdicts["prefix"] == "\u2713 same answer as full"
    reused = verdicts["full-reuse"]
    assert reused.startswith(
        "\u2713 same" if texts["full-reuse"] == texts["full"] else "\u2260 differs from full from word "
    )


def test_an_answer_that_differs_from_that_of_full_is_marked(page):
    answers = iter(["At seven, at noon.", "At seven and six."])

    def answered(route):
        reply = route.fetch()
        body = reply.json()
        body["choices"][0]["message"]["content"] = next(answers)
        route.fulfill(response=reply, json=body)

    page.route("**/chat/completions", answered)
    ask(page, "full", "full-reuse")
    expect(page, "[data-method=full-reuse] .verdict.differs").to_have_text(
        "\u2260 differs from full from word 2 on", timeout=WAIT_MS
    )


def test_without_full_it_says_how_to_compare(page):
    ask(page, "full-reuse")
    expect(page, ".verdict").to_contain_text("Choose full too", timeout=WAIT_MS)


def test_each_method_has_a_line_that_says_what_it_does(page):
    lines = page.locator("label.method").all_inner_texts()
    assert len(lines) == 8
    assert all(len(line.split()) > 6 for line in lines), lines


def test_totals_since_the_start_are_shown(page, url):
    ask(page, "full", "full-reuse")
    totals = httpx.get(f"{url}/v1/requests", headers=bearer(ADMIN_KEY)).json()["totals"]
    not_computed = f"{totals['tokens_not_computed']} of {totals['prompt_tokens']}"
    wanted = f"requests answered {totals['requests']} time saved, at least [0-9.]+ s tokens not computed {not_computed}"
    shown = re.compile("\\s*".join(wanted.split()))
    wait_until(lambda: shown.search(page.locator("#totals").inner_text().replace("\u202f", "")) is not None)


def test_rejected_requests_are_apart_and_open_with_their_reason(page, url):
    ask(page, "full-reuse")
    page.wait_for_selector("#requests button.link")
    body = {"messages": [{"role": "user", "content": "When?"}], "chunkweave": {"corpus": "nowhere"}}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(ADMIN_KEY)).status_code == 404
    page.wait_for_selector("#unanswered summary")
    assert "not found" not in page.locator("#requests tbody").inner_text()
    page.click("#unanswered summary")
    expect(page, "#unanswered tbody tr:first-child").to_contain_text("404 corpus not found", timeout=WAIT_MS)
    page.locator("#unanswered button.link").first.click()
    expect(page, "#request .reason").to_have_text("no corpus 'nowhere'", timeout=WAIT_MS)
    expect(page, "#request").to_contain_text("rejected (404 corpus not found)")


def test_a_server_that_ends_and_comes_again_is_found_again(page):
    page.route("**/v1/requests*", lambda route: route.abort())
    expect(page, "#state").to_contain_text("the server does not answer", timeout=WAIT_MS)
    page.unroute("**/v1/requests*")
    expect(page, "#now").to_be_visible(timeout=WAIT_MS)


def test_dark_is_dark(page):
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_on_a_narrow_screen_nothing_is_cut_and_no_word_is_broken(page, tmp_path):
    (tmp_path / "ferry.txt").write_text(PASSAGES)
    page.set_viewport_size(NARROW)
    page.select_option("#into", "")
    page.fill("#name", "narrow")
    page.set_input_files("#files", [tmp_path / "ferry.txt"])
    page.click("#upload button")
    expect(page, "#corpora-said").to_contain_text("narrow has", timeout=WAIT_MS)
    expect(page, "#corpus").to_have_value("narrow", timeout=WAIT_MS)
    ask(page, "full", "query-whole", "full-reuse")
    page.locator("#requests button.link").first.click()
    page.locator("#request summary").click()
    for card in page.locator("article.answer summary").all():
        card.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    assert page.evaluate(BROKEN_WORDS) == []
    wide = "[...document.querySelectorAll('#requests .wide')].map((one) => one.scrollWidth - one.clientWidth)"
    assert page.evaluate(wide) == [0], "the list of requests fits"
