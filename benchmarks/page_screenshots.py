"""Pictures of a running server's page for the documentation: idle, under load, one request open, methods compared.

apt-get install chromium && pip install playwright
chunkweave serve --model smollm2 --method query --recompute-ratio 0.1
python benchmarks/page_screenshots.py --url http://127.0.0.1:8000 --dataset xquad.en.json --out docs/images
"""

import argparse
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
from playwright.sync_api import Page, expect, sync_playwright

from chunkweave.calibration.questions import Example
from chunkweave_lab.datasets import load_dataset

REQUESTS, AT_ONCE, PASSAGES = 30, 4, 6
WAIT_MS = 300_000


def bodies(examples: list[Example]) -> list[dict[str, object]]:
    """Questions over passages that come back in other orders."""
    rng = Random(0)
    shared = list({chunk.text: chunk for example in examples[:24] for chunk in example.chunks}.values())[:16]
    made = []
    for example in examples[:REQUESTS]:
        chosen = rng.sample(shared, PASSAGES)
        documents = [{"title": f"Passage {shared.index(one) + 1}", "text": one.text} for one in chosen]
        messages = [{"role": "user", "content": example.question}]
        made.append({"messages": messages, "documents": documents, "temperature": 0, "max_tokens": 12})
    return made


def take(page: Page, out: Path, name: str) -> None:
    """Write one picture, without scrolling."""
    time.sleep(0.5)
    page.screenshot(path=str(out / f"page-{name}.png"))
    print(f"page-{name}.png")


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    asked = bodies(load_dataset(arguments.dataset))
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright, httpx.Client(base_url=arguments.url, timeout=300) as client:
        page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page(
            viewport={"width": 1360, "height": 860}
        )
        page.goto(arguments.url)
        page.wait_for_selector("#live .tiles")
        take(page, arguments.out, "idle")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = [pool.submit(client.post, "/v1/chat/completions", json=body) for body in asked]
            while sum(answer.done() for answer in answers) < REQUESTS * 0.7:
                time.sleep(0.5)
            time.sleep(2)
            take(page, arguments.out, "load")
        time.sleep(3)
        page.locator("#live button.link").first.click()
        page.wait_for_selector("#request .strip")
        page.locator("#request summary").click()
        page.emulate_media(color_scheme="dark")
        take(page, arguments.out, "request")
        page.emulate_media(color_scheme="light")
        page.fill("#question", str(asked[0]["messages"][0]["content"]))
        page.fill("#documents", "\n\n".join(one["text"] for one in asked[0]["documents"]))
        page.fill("#ratio", "0.1")
        page.click("#ask button")
        expect(page.locator("article.answer")).to_have_count(3, timeout=WAIT_MS)
        page.locator("#answers").scroll_into_view_if_needed()
        page.locator("article.answer").last.scroll_into_view_if_needed()
        take(page, arguments.out, "compare")


if __name__ == "__main__":
    main()
