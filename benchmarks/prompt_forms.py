"""Ten forms of RAG prompts as clients write them, documents in another order each time: share reused, first token.

    python benchmarks/prompt_forms.py --out prompt-forms-smollm2.json

Starts `chunkweave serve` twice, with `--find-chunks` and without, and sends each form `--requests` times over the same
bundled passages, rotated by one each time, with another question; both servers in turn. The forms are those of
published clients, in words of our own. A row has the mean share of the prompt's tokens that were exact or woven from
the second request on, the share that was found and computed for safety, and the median time to the first token of
both servers. A form that is started again with the same `--out` keeps its row.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import httpx
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from server_process import serving

from chunkweave.prompt.parts import FOUND

Message = dict[str, Any]
Form = Callable[[Sequence[str], str], list[Message]]


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def langchain(documents: Sequence[str], question: str) -> list[Message]:
    """LangChain's stuff chain: documents in the system message."""
    return [system("Answer from this context only.\n\n" + "\n\n".join(documents)), user(question)]


def llama_index(documents: Sequence[str], question: str) -> list[Message]:
    """LlamaIndex's question over context between rules."""
    rule = "-" * 21
    context = "\n\n".join(documents)
    return [
        system("You answer questions from given context, and mention neither."),
        user(f"The context is below.\n{rule}\n{context}\n{rule}\nAnswer from it.\nQuery: {question}\nAnswer: "),
    ]


def haystack(documents: Sequence[str], question: str) -> list[Message]:
    """Haystack's loop over documents, indented."""
    context = "\n".join(f"    {text}" for text in documents)
    return [user(f"With this information, answer.\n\nContext:\n{context}\n\nQuestion: {question}\nAnswer:")]


def open_webui(documents: Sequence[str], question: str) -> list[Message]:
    """Open WebUI's numbered sources in a context tag, the question outside."""
    sources = "\n".join(f'<source id="{n}" name="notes-{n}">{text}</source>' for n, text in enumerate(documents, 1))
    return [
        system(f"### Task:\nAnswer with citations such as [1].\n\n<context>\n{sources}\n</context>"),
        user(question),
    ]


def dify(documents: Sequence[str], question: str) -> list[Message]:
    """Dify's context tag in the system message."""
    context = "\n".join(documents)
    return [system(f"Learn what is in <context></context>.\n\n<context>\n{context}\n</context>\n"), user(question)]


def ragflow(documents: Sequence[str], question: str) -> list[Message]:
    """RAGFlow's knowledge base with numbered fragments."""
    fragments = "\n".join(f"\nID: {n}\n├── Title: notes\n└── Content: {text}" for n, text in enumerate(documents))
    return [system(f"Summarize the knowledge base for an answer.\n{fragments}\nThat is the base."), user(question)]


def anything_llm(documents: Sequence[str], question: str) -> list[Message]:
    """AnythingLLM's marked contexts behind the system prompt."""
    marked = "".join(f"[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n" for n, text in enumerate(documents))
    return [system(f"Answer the user.\nContext:\n    {marked}"), user(question)]


def tool_results(documents: Sequence[str], question: str) -> list[Message]:
    """An agent's search, whose results are a tool's."""
    function = {"name": "search", "arguments": json.dumps({"query": question})}
    results = json.dumps([{"title": f"note {n}", "text": text} for n, text in enumerate(documents)])
    return [
        user(question),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": results},
    ]


def question_first(documents: Sequence[str], question: str) -> list[Message]:
    """The question before its documents."""
    return [user(f"{question}\n\nUse these documents:\n\n" + "\n\n".join(documents))]


def one_document(documents: Sequence[str], question: str) -> list[Message]:
    """One document behind its question, another one each time, as graders and summarizers ask."""
    return [user(f"Is the answer to this question in the passage? {question}\n\nPassage: {documents[0]}")]


FORMS: Mapping[str, Form] = {
    form.__name__: form
    for form in (
        *(langchain, llama_index, haystack, open_webui, dify, ragflow, anything_llm),
        *(tool_results, question_first, one_document),
    )
}


def passages(count: int, rng: Random) -> list[str]:
    """Documents of two bundled passages each."""
    lines = (files("chunkweave") / "assets" / "corpus" / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    texts = rng.sample([json.loads(line)["text"] for line in lines], 2 * count)
    return [" ".join(texts[2 * n : 2 * n + 2]) for n in range(count)]


def asked(client: httpx.Client, messages: list[Message], how: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The report of an answer of one token, and the seconds until it was there."""
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "chunkweave": how}
    began_s = time.perf_counter()
    reply = client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    return dict(reply.json()["chunkweave"]), time.perf_counter() - began_s


def row_of(name: str, args: argparse.Namespace, finding: httpx.Client, plain: httpx.Client) -> dict[str, Any]:
    """One form over both servers."""
    rng = Random(name)
    documents = passages(args.documents, rng)
    how = {"method": args.method} if args.method else {}
    reused = []
    safe = []
    seconds: dict[str, list[float]] = {"found": [], "off": []}
    for number in range(args.requests):
        turn = number % len(documents)
        order = [*documents[turn:], *documents[:turn]]
        messages = FORMS[name](order, f"Which of these was opened first, as of day {number}?")
        for way in sorted(seconds, reverse=bool(number % 2)):
            report, spent_s = asked(finding if way == "found" else plain, messages, how)
            if not number:
                continue
            seconds[way].append(spent_s)
            if way == "off":
                continue
            kept = sum(report[f"{kind}_tokens"] for kind in ("prefix_exact", "reused", "recomputed"))
            chunks = (chunk for chunk in report["chunks"] if chunk["source"] == FOUND)
            computed = sum(chunk["tokens"] for chunk in chunks if chunk["kv_source"] == "computed")
            reused.append(kept / report["prompt_tokens"])
            safe.append(computed / report["prompt_tokens"])
    found_s = median(seconds["found"])
    off_s = median(seconds["off"])
    times = {"first_token_s": found_s, "off_s": off_s, "sooner": off_s / found_s}
    return {
        "form": name,
        "prompt_tokens": report["prompt_tokens"],
        "reused": fmean(reused),
        "safe": fmean(safe),
        **times,
    }


def measure(args: argparse.Namespace, done: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows that are not `done`."""
    missing = [name for name in FORMS if name not in done]
    if not missing:
        return
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        clients = []
        for port, flags in ((args.port, "--find-chunks"), (args.port + 1, "")):
            command = f"{args.serve} --model {args.model} --port {port} {flags}"
            url = f"http://127.0.0.1:{port}"
            stack.enter_context(serving(command, url, ready_path="/ready", log=log))
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=600)))
        for name in missing:
            yield row_of(name, args, *clients)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    heads = ("form", "tokens", "reused", "found, computed for safety", "first token sooner")
    rows = [
        [
            row["form"].replace("_", " "),
            str(row["prompt_tokens"]),
            f"{100 * row['reused']:.0f}%",
            f"{100 * row['safe']:.0f}%",
            f"{row['sooner']:.2f}x",
        ]
        for row in result["rows"]
    ]
    return {"prompt-forms": markdown_table(heads, rows)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--serve", default="chunkweave serve", help="the server, but for its model and port")
    parser.add_argument("--port", type=int, default=8126)
    parser.add_argument("--method", default="", help="instead of the server's default quality")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--requests", type=int, default=7)
    args = parse(parser, argv)
    config = settings(args, "port")
    rows: dict[str, dict[str, Any]] = {}
    if args.out is not None and args.out.is_file() and args.out.stat().st_size:
        before = json.loads(args.out.read_text(encoding="utf-8"))
        rows = {row["form"]: row for row in before["rows"]} if before["config"] == config else {}
    for row in measure(args, rows):
        rows[row["form"]] = row
        write("prompt-forms", args, config, list(rows.values()), complete=False)
    heads = ("form", "prompt_tokens", "reused", "safe", "first_token_s", "off_s", "sooner")
    show(heads, [[str(row[heads[0]]), *(f"{row[head]:.3g}" for head in heads[1:])] for row in rows.values()])
    write("prompt-forms", args, config, list(rows.values()))


if __name__ == "__main__":
    main()
