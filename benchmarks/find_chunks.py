"""Chunks found in plain prompts against chunks that are named: tokens found, divergence, and the cost of novel text.

    python benchmarks/find_chunks.py --serve "chunkweave serve --model smollm2" --out find-chunks-engine.json
    python benchmarks/find_chunks.py --requests 100 --measure-every 2 --out find-chunks-kl.json

Each request has 14 documents of 128 to 512 tokens, drawn by Zipf's law from a pool and shuffled, with prose before and
between them and a question behind. `marks` names them as documents; `found` sends one message, whose chunks are found.
With `--serve` each row has a server of its own over HTTP. Without, requests are prefilled in this process: of every
`--measure-every`-th one the next-token distribution after weaving and after full reuse is compared with that after full
prefill of the same tokens. Then novel prompts are prefilled, each once as it is and once with chunks found,
alternating, and the last requests are sent again. A run that is started again with the same `--out` keeps its finished
rows.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import httpx
import torch
from bench_program import parse, settings, show, write
from server_process import serving
from transformers import AutoTokenizer

from chunkweave.calibration.summaries import ratio_interval
from chunkweave.config import StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.models.gguf import checkpoint_folder
from chunkweave.planning.method import make_method
from chunkweave.planning.method_choice import FIELD, MethodChooser, MethodRequest
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.find_chunks import ChunkFinder, TokenTable
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.prompt.runs import RunIndex
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer, TextTokenizer

QUESTION = "Which of these places was opened first, and who leads it today?"
PROSE = "Read what our colleagues have collected, and answer from nothing else. The order of the notes has no meaning."
LINKS = ("Another note from the same archive:", "From the files:", "This was found later:", "See also:")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its documents in order, and the lines between them."""

    documents: tuple[str, ...]
    links: tuple[str, ...]

    @property
    def message(self) -> str:
        """All of it as one text."""
        notes = (text for pair in zip(self.links, self.documents, strict=True) for text in pair)
        return "\n\n".join((PROSE, *notes, f"Question: {QUESTION}"))


def documents(tokenizer: TextTokenizer, count: int, rng: Random) -> list[str]:
    """Different documents of 128 to 512 tokens, of bundled passages; every third has several paragraphs."""
    lines = (files("chunkweave") / "assets" / "corpus" / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    passages = [json.loads(line)["text"] for line in lines]
    found = []
    while len(found) < count:
        parts, wanted = [], rng.randint(128, 512)
        while len(tokenizer.encode(" ".join(parts))) < wanted:
            parts.append(rng.choice(passages))
        text = ("\n\n" if len(found) % 3 == 0 else " ").join(parts[:-1] or parts)
        found.append(text)
    return found


def requests(pool: Sequence[str], count: int, each: int, rng: Random) -> list[Asked]:
    """Requests over `each` documents that Zipf's law draws, without repetition, in random order."""
    asked = []
    for _ in range(count):
        keys = [rng.random() ** rank for rank in range(1, len(pool) + 1)]  # weights 1 / rank
        drawn = sorted(range(len(pool)), key=keys.__getitem__, reverse=True)[:each]
        rng.shuffle(drawn)
        asked.append(Asked(tuple(pool[one] for one in drawn), tuple(rng.choice(LINKS) for _ in drawn)))
    return asked


class Prompts:
    """Builds prompts of requests, with marks or without."""

    def __init__(self, engine: Engine) -> None:
        self._builder = engine.builder
        table = TokenTable.of(engine.loaded.tokenizer)
        self._finder = ChunkFinder(table, RunIndex(lambda chunk: engine.store.chunk_tokens(chunk) > 0))

    def marks(self, asked: Asked) -> Prompt:
        """The prompt of a request that names its documents."""
        return self._builder.build(QUESTION, asked.documents, system=PROSE)

    def found(self, asked: Asked) -> Prompt:
        """The prompt of a request that is one message."""
        return self.found_in(asked.message)

    def found_in(self, text: str) -> Prompt:
        """The prompt of a message, which is stored to be found again."""
        return self._builder.recut(self._ids(text), self._finder)

    def plain(self, text: str) -> Prompt:
        """The same tokens, of which nothing is stored or found."""
        return Prompt((PromptPart(PartKind.QUESTION, self._ids(text)),))

    def _ids(self, text: str) -> tuple[int, ...]:
        tokenizer = self._builder.tokenizer
        rendered = tokenizer.render_chat([{"role": "user", "content": text}])
        return tuple(tokenizer.encode(rendered or text, control_tokens=True))


def served(engine: Engine, prompt: Prompt, method: Any) -> tuple[torch.Tensor, int, float]:
    """The next token's log-probabilities, the tokens of the prompt that were found, and the seconds to prefill it."""
    began = time.perf_counter()
    prefilled = engine.runner.prefill(prompt, method)
    engine.runner.store_new(prefilled)
    spent_s = time.perf_counter() - began
    found = len(prompt) - prefilled.plan.tokens(KVSource.COMPUTED)
    return prefilled.logits.float().log_softmax(-1), found, spent_s


def divergences(engine: Engine, prompt: Prompt, woven: torch.Tensor) -> tuple[float, float]:
    """KL of the next token's distribution after full prefill from that after weaving, and after full reuse."""
    prefill = partial(engine.runner.prefill, prompt, capture=False, counts_as_request=False)
    full, reused = (prefill(make_method(name)).logits.float().log_softmax(-1) for name in ("full", "full-reuse"))
    kl, most = (float((full.exp() * (full - one)).sum()) for one in (woven, reused))
    return kl, most


def row_of(engine: Engine, name: str, prompts: Iterator[Prompt], method: Any, every: int) -> dict[str, Any]:
    """One row over requests in sequence."""
    tokens = found = count = 0
    spent_s, measured = 0.0, []
    for number, prompt in enumerate(prompts):
        woven, taken, took_s = served(engine, prompt, method)
        tokens, found, count, spent_s = tokens + len(prompt), found + taken, count + 1, spent_s + took_s
        if every and number % every == every - 1:
            measured.append(divergences(engine, prompt, woven))
    row = {"row": name, "requests": count, "prompt_tokens": tokens, "found_tokens": found, "found": found / tokens}
    row |= {"measured": len(measured), "seconds": spent_s}
    if measured:
        kls, most = zip(*measured, strict=True)
        left = ratio_interval(kls, most)
        row |= {"kl": fmean(kls), "kl_full_reuse": fmean(most), "left": left.mean, "left_ends": [left.low, left.high]}
    return row


def row_over_http(url: str, name: str, asked: Sequence[Asked], count: int) -> dict[str, Any]:
    """One row of requests to a server, in sequence."""
    tokens = found = 0
    began = time.perf_counter()
    with httpx.Client(base_url=url, timeout=600) as client:
        for one in asked[:count]:
            said = {"system": PROSE, "user": QUESTION} if name == "marks" else {"user": one.message}
            messages = [{"role": role, "content": text} for role, text in said.items()]
            body = {"messages": messages, "max_tokens": 1, "temperature": 0}
            body |= {"documents": one.documents} if name == "marks" else {}
            reply = client.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            whole = reply.json()
            report = whole.get(FIELD) or whole["kv_transfer_params"][FIELD]  # of vLLM itself
            tokens += whole["usage"]["prompt_tokens"]
            found += sum(report[f"{way}_tokens"] for way in ("prefix_exact", "reused", "recomputed"))
    row = {"row": name, "requests": count, "prompt_tokens": tokens, "found_tokens": found, "found": found / tokens}
    return row | {"seconds": time.perf_counter() - began}


def served_rows(args: argparse.Namespace, done: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows over HTTP that are not `done`."""
    rng = Random(args.seed)
    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(checkpoint_folder(args.model)))
    asked = requests(documents(tokenizer, args.pool, rng), args.requests, args.documents, rng)
    url = f"http://127.0.0.1:{args.port}"
    flags = f"--port {args.port} --method {args.method}:ratio={args.ratio} --host-budget {args.budget_mib}MiB"
    for name in [name for name in ("marks", "found") if name not in done]:
        command = f"{args.serve} {flags} {'--find-chunks' if name == 'found' else ''}"
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(command, url, ready_path="/ready", log=Path(folder) / "log"),
        ):
            yield row_over_http(url, name, asked, args.requests)


def novel_text(pool: Sequence[str], number: int, words: int) -> str:
    """Text of the pool's words that occurs in no other prompt."""
    rng = Random(f"novel {number}")
    source = " ".join(pool).split()
    return " ".join((f"Note {number}.", *rng.choices(source, k=words), QUESTION))


def novel_rows(engine: Engine, prompts: Prompts, pool: Sequence[str], count: int, words: int) -> dict[str, Any]:
    """Seconds of novel prompts as they are and with chunks found, alternating, and how many times as long it takes."""
    method, spent_s = make_method("prefix"), {"plain": 0.0, "found": 0.0}
    for number in range(count):
        text = novel_text(pool, number, words)
        for name in sorted(spent_s, reverse=bool(number % 2)):
            began = time.perf_counter()
            prompt = prompts.plain(text) if name == "plain" else prompts.found_in(text)
            spent_s[name] += time.perf_counter() - began if name == "found" else 0.0
            spent_s[name] += served(engine, prompt, method)[2]
    ratio = spent_s["found"] / spent_s["plain"]
    return {"row": "novel", "requests": count, "seconds": spent_s["found"], "plain_s": spent_s["plain"], "times": ratio}


def rows(args: argparse.Namespace, done: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that are not `done`; those of one store are measured together."""
    choice = MethodChooser().choose(MethodRequest(f"{args.method}:ratio={args.ratio}"))
    method = choice.made
    store = StoreConfig(host_budget_bytes=args.budget_mib << 20)
    for name in ("marks", "found"):
        if name in done and (name == "marks" or "again" in done):
            continue
        with Engine.load(args.model, dtype="float32", store=store) as engine:
            rng = Random(args.seed)
            pool = documents(engine.loaded.tokenizer, args.pool, rng)
            asked, prompts = requests(pool, args.requests, args.documents, rng), Prompts(engine)
            build = prompts.marks if name == "marks" else prompts.found
            yield row_of(engine, name, map(build, asked), method, args.measure_every)
            if name == "marks":
                continue
            last = asked[-args.again :]
            yield row_of(engine, "before", map(build, last), method, 0)
            yield novel_rows(engine, prompts, pool, args.novel, args.novel_words)
            yield row_of(engine, "again", map(build, last), method, 0)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print rows, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--serve", help="a server's command, but for its port, method and budget")
    parser.add_argument("--port", type=int, default=8125)
    parser.add_argument("--method", default="cacheblend")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--documents", type=int, default=14)
    parser.add_argument("--pool", type=int, default=60)
    parser.add_argument("--measure-every", type=int, default=10)
    parser.add_argument("--again", type=int, default=20)
    parser.add_argument("--novel", type=int, default=1000)
    parser.add_argument("--novel-words", type=int, default=200)
    parser.add_argument("--budget-mib", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser, argv)
    torch.set_num_threads(args.threads)
    config = settings(args, "threads", "port")
    done: dict[str, dict[str, Any]] = {}
    if args.out is not None and args.out.is_file() and args.out.stat().st_size:
        before = json.loads(args.out.read_text(encoding="utf-8"))
        done = (
            {row["row"]: row for row in before["rows"]} if before["config"] == settings(args, "threads", "port") else {}
        )
    for row in (rows if args.serve is None else served_rows)(args, done):
        done[row["row"]] = row
        write("find-chunks", args, config, list(done.values()), complete=False)
    more = {"found_of_marks": done["found"]["found"] / done["marks"]["found"]}
    if args.serve is None:
        more |= {"hot_before": done["before"]["found"], "hot_after": done["again"]["found"]}
        more |= {"novel_times": done["novel"]["times"], "left_of_marks": done["found"]["left"] / done["marks"]["left"]}
    heads = ("row", "requests", "prompt_tokens", "found", "kl", "left", "seconds")
    show(heads, [[_shown(row.get(head)) for head in heads] for row in done.values()])
    write("find-chunks", args, config, list(done.values()), more)


if __name__ == "__main__":
    main()
