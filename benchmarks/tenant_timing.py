"""Whether the time to the first token reveals to a tenant which texts another tenant has cached.

    python benchmarks/tenant_timing.py --serve "chunkweave serve --model reader --port 8123" --url http://127.0.0.1:8123

For each pair one tenant asks over a text. Another tenant then asks over the same text and over one that no tenant has
sent, in random order with each first equally often, and finally over the first again, which it has cached itself by
then. All texts are new and of equal length in tokens. The two samples of times are compared by the two-sample
Kolmogorov-Smirnov test. To show that the test would see a leak, the times of the text that the other tenant has cached
are shortened.

Exit code 1 if they differ (p <= .01), or if the test does not see a reduction by a tenth.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
from docs_tables import markdown_table
from scipy.stats import ks_2samp
from server_process import api_keys, serving

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import check_writable, progress, to_json, write_json
from chunkweave.errors import ChunkweaveError

WARM_UP = 6
LEAST_P = 0.01
"""Samples with p at most this count as different."""

SPEED_UPS = (0.01, 0.02, 0.03, 0.05, 0.1)
"""Shares by which times are shortened to check the test; it must see the last one."""

SENTENCES = tuple(
    f"The keeper of the {place} writes down every {thing} that comes in a storm."
    for place in ("mill", "cape", "pond", "wood", "gate", "hill", "farm", "dock")
    for thing in ("ship", "horse", "letter", "stranger", "bell", "cart")
)
"""Reordered, they are another text of equal length in tokens."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds to the first token, asked by one tenant, over texts of equal length."""

    seen_s: float
    """Another tenant has cached it."""
    fresh_s: float
    """No tenant has."""
    own_s: float
    """The tenant itself has."""
    seen_first: bool
    """Which of the first two was asked first."""


class Tenant:
    """Asks over one text, and measures from sending to the first piece of the answer."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120)

    def first_token_s(self, text: str) -> tuple[float, int]:
        """Seconds, and the tokens of the prompt.

        Raises:
            ChunkweaveError: the server does not answer as it should.
        """
        body = {
            "messages": [{"role": "user", "content": "What is written down?"}],
            "documents": [text],
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s, usage = None, None
        started = time.perf_counter()
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise ChunkweaveError(f"status {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ChunkweaveError(str(event["error"]))
                if first_s is None and any(
                    choice["finish_reason"] is not None or _says(choice) for choice in event["choices"]
                ):
                    first_s = time.perf_counter() - started
                usage = event.get("usage") or usage
        if first_s is None or usage is None:
            raise ChunkweaveError("the stream ended without a token")
        return first_s, usage["prompt_tokens"]


def _says(choice: dict[str, Any]) -> bool:
    return bool(choice["delta"].get("content"))


def text_of(draw: Random, sentences: int) -> str:
    """A text that no tenant has sent, as long as all others with this number of sentences."""
    return " ".join(("Log:", *draw.sample(SENTENCES[:sentences], sentences)))


def sentences_for(asker: Tenant, tokens: int, draw: Random) -> int:
    """The number of sentences for a text of about `tokens` tokens.

    Raises:
        ChunkweaveError: there are not enough sentences.
    """
    _, few = asker.first_token_s(text_of(draw, 8))
    _, many = asker.first_token_s(text_of(draw, 40))
    wanted = round(32 * tokens / (many - few))
    if not 8 <= wanted <= len(SENTENCES):
        raise ChunkweaveError(f"{tokens} tokens would be {wanted} sentences: there are from 8 to {len(SENTENCES)}")
    return wanted


def measure(
    url: str, keys: Sequence[str], pairs: int, tokens: int, seed: int, step: Callable[[int, int], None]
) -> tuple[list[Pair], int]:
    """All pairs, and the tokens of a prompt, after `WARM_UP` pairs that are not counted.

    Raises:
        ChunkweaveError: the server does not answer as it should, or prompts are not all of one length.
    """
    acme, bolt = (Tenant(url, key) for key in keys)
    draw = Random(seed)
    sentences = sentences_for(bolt, tokens, draw)
    found, lengths = [], set()
    seen_first = [number % 2 == 0 for number in range(WARM_UP + pairs)]
    draw.shuffle(seen_first)
    for index in range(-WARM_UP, pairs):
        seen, fresh = (text_of(draw, sentences) for _ in range(2))
        acme.first_token_s(seen)
        times = {}
        order = (seen, fresh) if seen_first[index + WARM_UP] else (fresh, seen)
        for text in order:
            times[text], length = bolt.first_token_s(text)
            lengths.add(length)
        own_s, _ = bolt.first_token_s(seen)
        if index >= 0:
            found.append(Pair(times[seen], times[fresh], own_s, order[0] == seen))
            step(index + 1, pairs)
    if len(lengths) > 1:
        raise ChunkweaveError(f"prompts of {sorted(lengths)} tokens: this tokenizer needs other texts")
    return found, lengths.pop()


def summary(found: Sequence[Pair]) -> dict[str, Any]:
    """The test's results, and the speed-up from which it finds a difference."""
    seen, fresh = [one.seen_s for one in found], [one.fresh_s for one in found]
    shortened = {f"{share:.0%}": _p([second * (1 - share) for second in seen], fresh) for share in SPEED_UPS}
    return {
        "p": _p(seen, fresh),
        "p_of_own": _p([one.own_s for one in found], fresh),
        "p_if_shorter_by": shortened,
        "median_seen_s": median(seen),
        "median_fresh_s": median(fresh),
        "median_own_s": median(one.own_s for one in found),
        "ok": _p(seen, fresh) > LEAST_P >= shortened[f"{SPEED_UPS[-1]:.0%}"],
    }


def _p(first: Sequence[float], second: Sequence[float]) -> float:
    return float(ks_2samp(first, second).pvalue)


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Median times by text, and the test's p against texts that are not cached."""
    heads = ["text cached by", "median TTFT", "p"]
    rows = [
        ["no tenant", f"{1000 * result['median_fresh_s']:.1f} ms", "-"],
        ["another tenant", f"{1000 * result['median_seen_s']:.1f} ms", f"{result['p']:.2g}"],
        *([f"the same, made shorter by {share}", "-", f"{p:.2g}"] for share, p in result["p_if_shorter_by"].items()),
        ["the tenant itself", f"{1000 * result['median_own_s']:.1f} ms", f"{result['p_of_own']:.2g}"],
    ]
    return {"tenant-timing": markdown_table(heads, rows)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="chunkweave serve --model reader --port 8123", help="starts the server")
    parser.add_argument("--url", default="http://127.0.0.1:8123")
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.out is not None:
        check_writable(chosen.out)
    return chosen


def main() -> None:
    options = arguments()
    keys = list(api_keys("acme", "bolt").values())
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(options.serve, options.url, ready_path="/ready", log=Path(folder) / "log"),
        progress("asking") as step,
    ):
        found, prompt_tokens = measure(options.url, keys, options.pairs, options.tokens, options.seed, step)
    config = {"serve": options.serve, "pairs": options.pairs, "tokens": options.tokens, "prompt_tokens": prompt_tokens}
    more = summary(found)
    result = BenchmarkResult(
        "tenant-timing", shlex.join(["python", *sys.argv]), options.seed, config, [asdict(one) for one in found], more
    ).as_dict()
    if options.out is not None:
        write_json(options.out, result)
    print(to_json(more))
    sys.exit(not more["ok"])


if __name__ == "__main__":
    main()
