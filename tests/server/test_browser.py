"""The page in a real browser, without a screen; skipped where there is no Chromium (`apt-get install chromium`)."""

import shutil
from collections.abc import Iterator

import pytest
from benchmarks.server_thread import ServerThread

from chunkweave_server.backend import Stage
from tests.server.conftest import ADMIN_KEY, key_ring, toy_service, wait_until

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PASSAGES = "The ferry leaves at seven, at noon and at six.\n\nPilots board ships two miles west of the lighthouse."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    service = toy_service(keys=key_ring())
    with ServerThread(service) as server:
        wait_until(lambda: service.stage is Stage.READY)
        yield server.url


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, url):
    """The page with an admin's key; it may ask nothing of any other server, and complain of nothing."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(20_000)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "content security" in said.text.lower() else None)
    page.goto(url)
    page.fill("#key", ADMIN_KEY)
    page.press("#key", "Enter")
    page.wait_for_selector("#live .tiles")
    yield page
    page.close()
    assert all(one.startswith((url, "data:")) for one in asked)
    assert complaints == []


def ask(page, *methods: str) -> None:
    page.fill("#question", "When does the ferry leave?")
    page.fill("#documents", PASSAGES)
    page.fill("#most", "3")
    for box in page.query_selector_all("input[name=methods]"):
        box.set_checked(box.get_attribute("value") in methods)
    page.click("#ask button")
    sync_api.expect(page.locator("article.answer")).to_have_count(len(methods), timeout=20_000)


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
    page.wait_for_selector("#live button.link")
    newest = page.locator("#live button.link").first
    newest.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#request .strip")
    assert page.locator("#request summary").count() == 1
    page.locator("#request summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#request table").is_visible()


def test_the_focus_stays_while_new_requests_come_in(page):
    listed = page.locator("#live button.link").count()
    ask(page, "full-reuse")
    sync_api.expect(page.locator("#live button.link")).to_have_count(listed + 1, timeout=20_000)
    page.locator("#live button.link").first.focus()
    focused = page.evaluate("document.activeElement.id")
    page.evaluate("document.getElementById('ask').requestSubmit()")
    sync_api.expect(page.locator("#live button.link")).to_have_count(listed + 2, timeout=20_000)
    page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.id") == focused


def test_what_went_wrong_is_said_in_place(page):
    page.fill("#question", "x")
    page.fill("#documents", "")
    page.fill("#top-k", "")
    for box in page.query_selector_all("input[name=methods]"):
        box.set_checked(False)
    page.click("#ask button")
    assert page.locator("#answers [role=alert]").inner_text() == "choose a method"


def test_what_the_api_refuses_is_said_in_place(page):
    page.fill("#question", " ")
    page.fill("#documents", PASSAGES)
    for box in page.query_selector_all("input[name=methods]"):
        box.set_checked(box.get_attribute("value") == "full")
    page.click("#ask button")
    sync_api.expect(page.locator("#answers [role=alert]")).to_have_text("the question is empty", timeout=20_000)


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
    sync_api.expect(page.locator("#corpora [role=status]")).to_contain_text("segments removed", timeout=20_000)


def test_a_wrong_key_is_said(browser, url):
    page = browser.new_page()
    page.goto(url)
    page.fill("#key", "not a key of anybody at all")
    page.press("#key", "Enter")
    sync_api.expect(page.locator("#live [role=alert]")).to_have_text("no such API key")
    page.close()


def test_dark_and_narrow(page):
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.set_viewport_size({"width": 380, "height": 800})
    ask(page, "full-reuse")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
