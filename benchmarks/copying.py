"""Copying out of woven text: numbers, identifiers and quotations, in passages, tables, JSON and results of tools.

    python benchmarks/copying.py --out copying-smollm2.json

Starts `chunkweave serve` with `--find-chunks`. Every case is a plain prompt over `--documents` invented documents in
random order, each about another place with one detail, and asks for that of one of them; another one has a detail of
the same kind, so that a wrong one is at hand. The beginning of the answer is given (of a tool's result the call, by
`tool_choice`). A case is right if the answer has the detail, character for character. Each case is asked twice: woven,
and with the method `full` and `cache` `off`, which computes the same tokens. Documents were sent before in other
prompts. A run that is started again with the same `--out` keeps its cases.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import httpx
from bench_program import parse, settings, show, write
from server_process import serving

from chunkweave.calibration.summaries import mean_interval

KINDS = ("number", "identifier", "quotation")
EXCLUDED = ("tool", "table", "json")
_PLACES = ("Harbour", "Mill", "Library", "Chapel", "Quarry", "Lighthouse", "Orchard", "Bridge", "Market", "Station")
_NAMES = ("Brindal", "Osterby", "Kelmar", "Vintha", "Dorrick", "Halvane", "Suneth", "Marrow", "Tolby", "Ekerd")
_PEOPLE = ("Otto Gunmark", "Elsa Rovin", "Piet Hallen", "Ines Corvo", "Ruth Adebay", "Jon Sivert", "Mara Klint")
_VERBS = ("repair", "measure", "paint", "open", "close", "visit", "clean", "photograph")
_THINGS = ("the northern gate", "every wooden step", "the old clock", "both small towers", "the lower hall", "the well")
_TIMES = ("before the first snow", "when the ferries rest", "after the autumn fair", "while the river is low")
_FILLERS = (
    "In spring the paths around it are wet, and few people come by on foot.",
    "The council keeps a small fund for its upkeep, which is rarely used up.",
    "Older visitors remember that it was larger, though no drawing shows this.",
    "A guide from the village opens it at noon and locks it before dusk.",
    "Much of the stone was brought by boat from the other side of the bay.",
    "Schoolchildren draw it each year, and the best pictures hang in the hall.",
    "The roof was mended after a storm, and the beams are of oak since then.",
    "Its bell is heard as far as the ridge if the wind is from the west.",
)


@dataclass(frozen=True, slots=True)
class Document:
    """An invented text about one place, and its details by kind."""

    place: str
    kind: str
    text: str
    detail: str


@dataclass(frozen=True, slots=True)
class Case:
    """One question: documents in order, and the detail of one of them that is to be copied."""

    number: int
    kind: str
    documents: tuple[Document, ...]
    asked: Document

    @property
    def body(self) -> dict[str, Any]:
        """The request, but for its method."""
        texts = "\n\n".join(one.text for one in self.documents)
        place = self.asked.place
        if self.kind == "tool":
            function = {"name": "search", "arguments": json.dumps({"query": place})}
            call = {"id": "call-1", "type": "function", "function": function}
            form = {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}-[A-Z]$"}
            parameters = {"type": "object", "properties": {"file_number": form}}
            parameters |= {"required": ["file_number"], "additionalProperties": False}
            tool = {"name": "cite", "description": "Cite a place by its file number.", "parameters": parameters}
            return {
                "messages": [
                    {"role": "user", "content": f"Search for the {place}, then cite its file number."},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call-1", "content": f"{texts}\n\nThese are all results."},
                ],
                "tools": [{"type": "function", "function": tool}],
                "tool_choice": {"type": "function", "function": {"name": "cite"}},
                "max_tokens": 40,
            }
        question, begins = {
            "number": ("How many stones does the {} have?", "The {} has"),
            "quotation": ("What did the builder of the {} say?", 'The builder of the {} said: "'),
            "identifier": ("Which file number does the {} have?", "The {} has the file number"),
            "table": ("Repeat the row of the {}.", "| {} |"),
            "json": ("Repeat the item of the {}.", '{{"place": "{}", "file_number": "'),
        }[self.kind]
        asked = f"Answer from these notes.\n\n{texts}\n\nQuestion: {question.format(place)}"
        begun = {"role": "assistant", "content": begins.format(place)}
        return {"messages": [{"role": "user", "content": asked}, begun], "max_tokens": 24}


def documents(count: int, kind: str, rng: Random, places: Iterator[str]) -> list[Document]:
    """Documents of 100 to 250 tokens with a detail of this kind: of sentences, five rows of a table, or of JSON."""
    return [_document(next(places), kind, rng) for _ in range(count)]


def _document(place: str, kind: str, rng: Random) -> Document:
    number, identifier, said = _details(rng)
    if kind in ("table", "json"):
        rooms = ("hall", "gate", "tower", "yard")
        rows = [(f"{place}, {room}", *_details(rng)[:2]) for room in rooms]
        rows.insert(rng.randint(0, len(rows)), (place, number, identifier))
        lines = (f"| {name} | {file} | {stones} |" for name, stones, file in rows)
        table = "\n".join(("| place | file number | stones |", "|---|---|---|", *lines))
        items = json.dumps([{"place": name, "file_number": file, "stones": stones} for name, stones, file in rows])
        return Document(place, kind, table if kind == "table" else items, identifier)
    fact, detail = {
        "number": (f"The {place} has {number} stones, as counted by {rng.choice(_PEOPLE)}.", number),
        "identifier": (f"The {place} has the file number {identifier} in the archive.", identifier),
        "quotation": (f'The builder of the {place} said: "{said}"', said),
    }[kind]
    lines = rng.sample(_FILLERS, 6)
    lines.insert(rng.randint(1, len(lines)), fact)
    return Document(place, kind, f"The {place} is well known in the valley. " + " ".join(lines), detail)


def _details(rng: Random) -> tuple[str, str, str]:
    """A number, an identifier, and a quotation."""
    letters = "".join(rng.choices("ABCDEFGHKLMNPRSTVWXZ", k=3))
    said = f"We {rng.choice(_VERBS)} {rng.choice(_THINGS)} {rng.choice(_TIMES)}, and nothing else"
    return f"{rng.randint(1000, 99_999):,}", f"{letters[:2]}-{rng.randint(1000, 9999)}-{letters[2]}", said


def cases(args: argparse.Namespace, kinds: Sequence[str], each: int) -> tuple[list[list[Document]], list[Case]]:
    """The prompts that are sent before, and the cases, by kind in turn.

    A prompt has as many documents of each kind of detail; tables and JSON are not mixed with others.
    """
    rng = Random(args.seed)
    places = [f"{name} {place}" for name in _NAMES for place in _PLACES]
    rng.shuffle(places)
    named = iter(places)
    alone = [kind for kind in kinds if kind in ("table", "json")]
    mixed = list(KINDS) if len(alone) < len(kinds) else []
    pools = {kind: documents(args.pool, kind, rng, named) for kind in (*mixed, *alone)}
    groups = [mixed, *([kind] for kind in alone)]
    before = []
    for group in groups * 2:  # a text that was seen once is on probation
        texts = [text for kind in group for text in pools[kind]]
        rng.shuffle(texts)
        before += [texts[at : at + args.documents] for at in range(0, len(texts), args.documents)]
    made = []
    for number in range(each):
        for kind in kinds:
            detail = "identifier" if kind == "tool" else kind
            group = next(group for group in groups if detail in group)
            drawn = [text for one in group for text in rng.sample(pools[one], args.documents // len(group))]
            rng.shuffle(drawn)
            chosen = rng.choice([text for text in drawn if text.kind == detail])
            made.append(Case(number, kind, tuple(drawn), chosen))
    return before, made


def answered(client: httpx.Client, body: Mapping[str, Any], how: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of a greedy answer, or its call's arguments, and its report."""
    reply = client.post("/v1/chat/completions", json={**body, "temperature": 0, "chunkweave": how})
    reply.raise_for_status()
    whole = reply.json()
    message = whole["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return calls[0]["function"]["arguments"] if calls else message["content"], whole["chunkweave"]


def asked(client: httpx.Client, case: Case, method: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one case."""
    woven, report = answered(client, case.body, method)
    full, _ = answered(client, case.body, {"method": "full", "cache": "off"})
    share = (report["reused_tokens"] + report["recomputed_tokens"]) / report["prompt_tokens"]
    row = {"kind": case.kind, "case": case.number, "expected": case.asked.detail, "woven": woven, "full": full}
    right = {"woven_right": case.asked.detail in woven, "full_right": case.asked.detail in full}
    return row | right | {"woven_share": share, "prompt_tokens": report["prompt_tokens"]}


def measure(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that are not `done`."""
    known = {(row["kind"], row["case"]) for row in done}
    method = {"quality": args.quality} if args.method is None else {"method": args.method}
    url = f"http://127.0.0.1:{args.port}"
    kinds_of = [kind for kind in KINDS if kind in args.kinds], [kind for kind in EXCLUDED if kind in args.kinds]
    for kinds, count in zip(kinds_of, (args.cases, args.excluded), strict=True):
        if not kinds:
            continue
        before, made = cases(args, kinds, count // len(kinds))
        left = [case for case in made if (case.kind, case.number) not in known]
        if not left:
            continue
        command = f"{args.serve} --model {args.model} --port {args.port} --find-chunks"
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(command, url, ready_path="/ready", log=Path(folder) / "log"),
            httpx.Client(base_url=url, timeout=600) as client,
        ):
            for texts in before:
                notes = "\n\n".join(one.text for one in texts)
                content = f"Here are notes from the archive.\n\n{notes}\n\nAre they from one place?"
                answered(client, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}, method)
            for case in left:
                yield asked(client, case, method)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Right answers by kind, and over those that are woven by default."""
    found = []
    for name in (*KINDS, "by default", *EXCLUDED):
        of = [row for row in rows if row["kind"] == name or (name == "by default" and row["kind"] in KINDS)]
        if not of:
            continue
        right = {way: 100 * fmean(row[f"{way}_right"] for row in of) for way in ("full", "woven")}
        difference = mean_interval([100.0 * (row["woven_right"] - row["full_right"]) for row in of])
        same = 100 * fmean(row["woven"] == row["full"] for row in of)
        found.append(
            {
                "kind": name,
                "cases": len(of),
                **right,
                "difference": difference.mean,
                "low": difference.low,
                "high": difference.high,
                "same": same,
                "woven_share": 100 * fmean(row["woven_share"] for row in of),
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--serve", default="chunkweave serve", help="the server, but for its model and port")
    parser.add_argument("--port", type=int, default=8124)
    parser.add_argument("--quality", default="balanced")
    parser.add_argument("--method", help="instead of a quality")
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, *EXCLUDED), default=[*KINDS, *EXCLUDED])
    parser.add_argument("--cases", type=int, default=300, help="over what is woven by default")
    parser.add_argument("--excluded", type=int, default=150, help="over results of tools, tables and JSON")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--pool", type=int, default=16, help="documents of each kind of detail")
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser, argv)
    config = settings(args, "port")
    rows: list[dict[str, Any]] = []
    if args.out is not None and args.out.is_file() and args.out.stat().st_size:
        before = json.loads(args.out.read_text(encoding="utf-8"))
        rows = before["rows"] if before["config"] == config else []
    for row in measure(args, rows):
        rows.append(row)
        print(f"{len(rows)}: {row}", file=sys.stderr)
        write("copying", args, config, rows, complete=False)
    found = summary(rows)
    heads = ["kind", "cases", "full", "woven", "difference", "low", "high", "same", "woven_share"]
    show(heads, [[f"{one[head]:.1f}" if head not in heads[:2] else str(one[head]) for head in heads] for one in found])
    write("copying", args, config, rows, {"summary": found})


if __name__ == "__main__":
    main()
