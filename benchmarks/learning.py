"""A server that learns from its own answers: when it begins to weave, what that saves, and how near its answers are.

    python benchmarks/learning.py --dataset musique_150.json --folder learning --out learning-musique.json

Starts `chunkweave serve` with SmolLM2's weights, changed so that no calibration record names them: one weight by the
smallest step (`--weights one`), or the keys of the first two heads of each layer exchanged (`swapped`: a model that
does not bear reuse). Each question is asked over the `--top-k` passages that retrieval finds among the first
`--passages`, in random order, as plain `documents`; after each answer the program waits until the server is idle.
Once `balanced` weaves, or after `--most` answers, `--served` further questions are asked alternately by default and by
the method `prefix` (`cache: read`, so that the first asked does not help the other). `agreement` is not the server's:
the program loads the model, computes each prompt in full, and counts which tokens of the woven answer are the most
likely ones along that answer. A run that is started again with the same `--folder` keeps the server's caches and
evidence, and the answers that it has.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from shutil import copytree
from statistics import median
from typing import Any

import httpx
import torch
from bench_program import parse, settings, show, write
from safetensors.torch import load_file, save_file
from served_quality import found_by, ingest
from server_process import serving

from chunkweave import Chunk, Engine, Request
from chunkweave.calibration.results import QuestionLog
from chunkweave.calibration.summaries import mean_interval, median_interval
from chunkweave.cli.console import progress
from chunkweave.engine.runner import Decoding
from chunkweave.errors import ChunkweaveError
from chunkweave.models.gguf import checkpoint_folder
from chunkweave.planning.method_choice import MethodRequest
from chunkweave_lab.datasets import load_dataset

HEADS = ["weights", "weaves after", "method", "first token, sooner", "95 % interval", "agreement", "95 % interval"]
ANSWER_TOKENS = 16


def changed_weights(folder: Path, how: str) -> Path:
    """SmolLM2's checkpoint with changed weights, made once."""
    made = folder / f"smollm2-{how}"
    if not made.exists():
        partial = folder / "partial"
        copytree(checkpoint_folder("smollm2"), partial, dirs_exist_ok=True)
        [file] = partial.glob("*.safetensors")
        weights = load_file(file)
        keys = [name for name in sorted(weights) if name.endswith("k_proj.weight")]
        if how == "one":
            weights[keys[0]][0, 0] = torch.nextafter(weights[keys[0]][0, 0], torch.tensor(9.0).to(weights[keys[0]]))
        else:
            for name in keys:
                rows = weights[name].shape[0] // 3
                weights[name] = torch.cat(
                    [weights[name][rows : 2 * rows], weights[name][:rows], weights[name][2 * rows :]]
                )
        save_file(weights, file, metadata={"format": "pt"})
        partial.rename(made)
    return made


def shortened(text: str, characters: int) -> str:
    """The first words of a text."""
    return text if len(text) <= characters else text[:characters].rpartition(" ")[0]


def body_of(question: str, documents: Sequence[str], **reuse: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "documents": list(documents),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "chunkweave": {"order": "fixed", **reuse},
    }


def ask(client: httpx.Client, body: Mapping[str, Any]) -> dict[str, Any]:
    """One answer: its report and its text."""
    reply = client.post("/v1/chat/completions", json=body)
    if reply.status_code != httpx.codes.OK:
        raise ChunkweaveError(f"the server answers {reply.status_code}: {reply.text}")
    answer = reply.json()
    return {"report": answer["chunkweave"], "text": answer["choices"][0]["message"]["content"]}


def learned(client: httpx.Client) -> dict[str, Any]:
    """What the server has learned, once it compares nothing more."""
    while (state := client.get("/v1/cache").raise_for_status().json()["learned"])["pending"]:
        time.sleep(0.1)
    return dict(state)


def learn(client: httpx.Client, asked: Sequence[Mapping[str, Any]], most: int, log: QuestionLog) -> dict[str, Any]:
    """Ask until `balanced` weaves; returns what was learned."""
    state = learned(client)
    with progress("learning") as report:
        for number, body in enumerate(asked[:most]):
            if state["balanced"]["method"] is not None:
                break
            if number not in log:
                answer = ask(client, body)
                state = learned(client)
                log.add(number, {"measured": {"why": answer["report"]["why"], **state["balanced"]}})
            report(number + 1, most)
    return state


def both_ways(client: httpx.Client, body: Mapping[str, Any], first: int) -> dict[str, Any]:
    """One question by default and by exact prefixes, in turn; seconds to the first token at the server."""
    ways: dict[str, dict[str, str]] = {"default": {}, "prefix": {"method": "prefix"}}
    answers = {}
    for way in sorted(ways, reverse=bool(first % 2)):
        answers[way] = ask(client, {**body, "chunkweave": {**body["chunkweave"], "cache": "read", **ways[way]}})
    report = answers["default"]["report"]
    return {
        "quotient": answers["prefix"]["report"]["ttft_s"] / report["ttft_s"],
        "why": report["why"],
        "recomputed": report["recompute_fraction"],
        "tokens": report["prompt_tokens"],
        "new_tokens": report["new_tokens"],
        "text": answers["default"]["text"],
    }


def agreements(model: Path, asked: Sequence[Mapping[str, Any]], served: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of each woven answer, the share of its tokens that full prefill finds most likely along it."""
    found = []
    with Engine.load(model) as engine, progress("comparing") as report:
        for number, (body, one) in enumerate(zip(asked, served, strict=False)):
            request = Request(body["messages"][0]["content"], [Chunk(text) for text in body["documents"]])
            prepared = engine.preparer.prepare(request, MethodRequest("full"))
            prompt, ids = prepared.prompt, tuple(engine.builder.tokenizer.encode(one["text"]))
            assert len(prompt) == one["tokens"], "it is the server's prompt"
            if len(ids) != one["new_tokens"]:
                continue  # the text has other tokens than those that were generated
            prefilled = engine.runner.prefill(prompt, prepared.reuse_method, new_tokens=len(ids), capture=False)
            rows = [prefilled.logits[None]]
            if ids[1:]:
                rows.append(engine.runner.step([Decoding(prefilled.cache, ids[:-1], len(prompt), len(ids) - 1)], []))
            found.append(float((torch.cat(rows).argmax(-1) == torch.tensor(ids)).double().mean()))
            report(number + 1, len(served))
    return found


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="weights, caches and answers, kept for another run")
    parser.add_argument("--weights", choices=("one", "swapped"), default="one")
    parser.add_argument("--port", type=int, default=8979)
    parser.add_argument("--passages", type=int, default=300)
    parser.add_argument("--characters", type=int, default=700, help="of a passage at most")
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--most", type=int, default=600, help="answers after which learning ends")
    parser.add_argument("--served", type=int, default=100)
    args = parse(parser)
    examples = load_dataset(args.dataset)
    passages = list(dict.fromkeys(chunk.text for example in examples for chunk in example.chunks))[: args.passages]
    passages = [shortened(text, args.characters) for text in passages]
    questions = [example.question for example in examples]
    args.folder.mkdir(parents=True, exist_ok=True)
    model = changed_weights(args.folder, args.weights)
    root = args.folder / args.weights
    root.mkdir(exist_ok=True)
    config = {**settings(args, "folder", "port", "most", "served"), "dataset": args.dataset.name}
    log = QuestionLog(root / "asked.jsonl", config)
    url = f"http://127.0.0.1:{args.port}"
    serve = f"chunkweave serve --model {model} --threads 1 --host-budget 6GiB --port {args.port}"
    with (
        serving(
            f"{serve} --data-dir {root / 'data'} --cache-dir {root / 'kv'}", url, ready_path="/ready", log=root / "log"
        ),
        httpx.Client(base_url=url, timeout=7200) as client,
    ):
        ingest(client, passages)
        found = [found_by(client, [question], args.top_k) for question in questions]
        if log.found is None:
            log.begin({})
        draw = Random(7)
        rounds = -(-(args.most + args.served) // len(questions))
        pairs = [
            (q, draw.sample(documents, len(documents)))
            for _ in range(rounds)
            for q, documents in zip(questions, found, strict=True)
        ]
        asked = [body_of(question, documents) for question, documents in pairs]
        state = learn(client, asked, args.most, log)
        for number in range(args.served):
            if state["balanced"]["method"] is not None and args.most + number not in log:
                log.add(args.most + number, {"measured": both_ways(client, asked[args.most + number], number)})
    measured = log.of("measured")
    learning = [one for one in measured if "text" not in one]
    served = [one for one in measured if "text" in one]
    row: dict[str, Any] = {"weights": args.weights, "answers": len(learning), "state": state}
    if served:
        quotient = median_interval([one["quotient"] for one in served])
        agreed = agreements(model, asked[args.most :], served)
        agreement = mean_interval(agreed)
        row |= {
            "quotient": quotient.mean,
            "quotient_low": quotient.low,
            "quotient_high": quotient.high,
            "agreement": agreement.mean,
            "agreement_low": agreement.low,
            "agreement_high": agreement.high,
            "recomputed": median(one["recomputed"] or 0.0 for one in served),
            "served": len(served),
            "why": sorted({one["why"] for one in served}),
        }
    show(HEADS, [cells(row)])
    write("learning", args, config, [row], {"learning": learning, "agreements": agreed if served else []})


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    method = row["state"]["balanced"]["method"]
    if "quotient" not in row:
        return [row["weights"], f"not in {row['answers']}", "prefix", *["-"] * 4]
    return [
        row["weights"],
        str(row["answers"]),
        method,
        f"{row['quotient']:.2f}x",
        f"{row['quotient_low']:.2f} to {row['quotient_high']:.2f}",
        f"{row['agreement']:.1%}",
        f"{row['agreement_low']:.1%} to {row['agreement_high']:.1%}",
    ]


if __name__ == "__main__":
    main()
