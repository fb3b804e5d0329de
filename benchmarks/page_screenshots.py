"""Pictures of a running server's page for the documentation: a request open, and answers compared.

apt-get install chromium && pip install playwright
chunkweave serve --model smollm2 --method query --recompute-ratio 0.1
python benchmarks/page_screenshots.py --url http://127.0.0.1:8000 --out docs/images
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from random import Random

import httpx
from playwright.sync_api import Page, expect, sync_playwright

WAIT_MS = 300_000
PASSAGES = {
    "ferry": "The ferry to Brannoch leaves Skerrow pier at seven in the morning, at noon and at six in the "
    "evening. On Sundays there is no ferry at seven. The crossing takes fifty minutes in calm weather and "
    "over an hour when the wind is from the north. Cars have to be at the pier twenty minutes before the "
    "ferry leaves, bicycles ten.",
    "pilots": "Pilots board ships two miles west of the lighthouse. A ship of more than ninety metres must take a "
    "pilot, and one with dangerous goods always. The pilot boat is called Petrel and has a crew of three. "
    "Masters ask for a pilot by radio on channel twelve, at least two hours before they reach the "
    "lighthouse.",
    "lighthouse": "The lighthouse of Skerrow was built in 1871 from the grey stone of the island. It is thirty-four "
    "metres high and has two hundred and one steps. Its light was fired by oil until 1938 and is electric "
    "today. Visitors may climb it on the first Saturday of each month, if they have booked with the "
    "harbour office.",
    "fees": "The harbour office takes eleven crowns a night for a boat of up to eight metres, and two crowns for "
    "each metre more. Water is included, electricity is not. Boats that stay for a week pay for six "
    "nights. The office is open from eight to four, and until seven in July and August; outside these "
    "hours there is a box beside its door.",
}
QUESTIONS = (
    "When does the ferry leave?",
    "How many steps does the lighthouse have?",
    "Where do pilots board ships?",
    "What does a night cost for a boat of eight metres?",
)


def fill(client: httpx.Client) -> None:
    """Questions over passages that come in other orders, and one that is refused."""
    rng = Random(0)
    for number in range(16):
        chosen = rng.sample(sorted(PASSAGES), len(PASSAGES))
        body = {
            "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            "documents": [{"title": name, "text": PASSAGES[name]} for name in chosen],
            "chunkweave": {"method": ("full", "query", "query", "full-reuse")[number // 4]},
            "temperature": 0,
            "max_tokens": 16,
        }
        client.post("/v1/chat/completions", json=body).raise_for_status()
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "chunkweave": {"corpus": "harbor"}}
    assert client.post("/v1/chat/completions", json=body).status_code == 404


def add_corpus(page: Page) -> None:
    """Add the passages as files to a new corpus."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{name}.txt") for name in PASSAGES]
        for file in files:
            file.write_text(PASSAGES[file.stem])
        page.fill("#name", "harbour")
        page.set_input_files("#files", files)
        page.click("#upload button")
        expect(page.locator("#corpora-said")).to_contain_text("harbour has", timeout=WAIT_MS)


def take(page: Page, file: Path, *sections: str) -> None:
    """Write a picture of some sections, from the first one's top to the last one's end."""
    page.wait_for_timeout(2500)
    boxes = [page.locator(one).bounding_box() for one in sections]
    shown = [box for box in boxes if box is not None]
    top = min(box["y"] for box in shown) + page.evaluate("scrollY") - 8
    end = max(box["y"] + box["height"] for box in shown) + page.evaluate("scrollY") + 8
    clip = {"x": 0.0, "y": top, "width": float(page.evaluate("innerWidth")), "height": end - top}
    page.screenshot(path=str(file), full_page=True, clip=clip)
    print(file)


def main() -> None:
    """Take both, and with --all the same on a narrow screen and in the dark, to look at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright, httpx.Client(base_url=arguments.url, timeout=300) as client:
        page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page(
            viewport={"width": 1280, "height": 900}
        )
        page.goto(arguments.url)
        page.wait_for_selector("#current div")
        if arguments.all:
            take(page, arguments.out / "page-first.png", "body")
        fill(client)
        add_corpus(page)
        page.select_option("#corpus", "harbour")
        page.fill("#question", QUESTIONS[0])
        page.fill("#most", "24")
        page.fill("#ratio", "0.1")
        page.click("#ask button")
        expect(page.locator("article.answer .verdict")).to_have_count(3, timeout=WAIT_MS)
        take(page, arguments.out / "page-compare.png", "#asking", "#corpora")
        page.locator("#requests tr", has_text="query").first.locator("button").click()
        page.locator("#request summary").click()
        take(page, arguments.out / "page-request.png", "#live", "#request")
        if arguments.all:
            page.emulate_media(color_scheme="dark")
            take(page, arguments.out / "page-dark.png", "body")
            page.set_viewport_size({"width": 375, "height": 812})
            take(page, arguments.out / "page-narrow-dark.png", "body")
            page.emulate_media(color_scheme="light")
            take(page, arguments.out / "page-narrow.png", "body")


if __name__ == "__main__":
    main()
