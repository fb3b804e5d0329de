"""The engines that benchmarks/embedded_peers.py compares, each in its own process.

Transformers and our engine answer in a child process, which takes the times itself; llama.cpp and vLLM are servers, and
times are those of a client on the same machine.
"""

import json
import multiprocessing
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from server_process import peak_rss_bytes, serving
from sustained_engines import FULL, TOP, FirstToken

from chunkweave.calibration.contenders import make_contenders
from chunkweave.config import StoreConfig
from chunkweave.engine.prefill import Prefilled
from chunkweave.engine.runner import Decoding
from chunkweave.errors import ChunkweaveError
from chunkweave.kv.request_cache import RequestCache, keep_freed_memory
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.scheduling.drafts import Drafts, StepCosts
from chunkweave_server.vllm_backend.process import SERVER

TRANSFORMERS, LLAMA, LLAMA_SHIFTING, VLLM, OWN = "transformers", "llama.cpp", "llama.cpp:cache-reuse", "vllm", "own"
FAILURES = (ChunkweaveError, httpx.HTTPError, json.JSONDecodeError, OSError, EOFError)
"""Errors that make a contender unavailable."""
NATIVE, DRAFTS = "native", "drafts"
_MODEL = "peers"
_MOST_DRAFTS = 8
_MIB = 1 << 20
_ANSWER_S = 600.0
_SHIFTED_TOKENS = 256
"""The least that llama.cpp takes over from another place of the prompt before, with `--cache-reuse`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all contenders: weights, precision, threads, context, and KV bytes for earlier prompts.

    `folder` has the checkpoint, `gguf` the same weights as llama.cpp reads them; `llama_server` is its program, and
    `python` that of an environment with vLLM.
    """

    folder: Path
    dtype: str
    threads: int
    max_tokens: int
    kept_bytes: int
    llama_server: Path
    gguf: Path
    python: str
    port: int
    log: Path
    at_once: int = 1
    """Requests that servers accept at once."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The first token, how many there were, and the seconds from the first to the last.

    Without log-probabilities `first.likeliest` is empty. `server_s` is what a server itself counts as prefill.
    """

    first: FirstToken
    tokens: int
    decode_s: float
    server_s: float | None = None


class Contender(Protocol):
    """An engine that answers prompts greedily with a fixed number of tokens."""

    def answer(self, prompt: Prompt, new_tokens: int) -> Answered:
        """Answer one prompt, with the engine's own caching; with log-probabilities if one token is requested."""

    def together(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        """Answer prompts at once; returns the seconds to the last token of all."""

    def peak_rss_bytes(self) -> int:
        """Peak physical memory of its processes."""


@contextmanager
def opened(name: str, settings: Settings, number: int) -> Iterator[Contender]:
    """The contender of that name, with empty caches; a server listens `number` ports above the first.

    Raises:
        ChunkweaveError: it does not start, or there is no such method.
        OSError: there is no such program.
    """
    url = f"http://127.0.0.1:{settings.port + number}"
    if name in (LLAMA, LLAMA_SHIFTING):
        command = llama_command(settings, settings.port + number, shifting=name == LLAMA_SHIFTING)
        with _server(command, url, settings) as (client, pid):
            yield LlamaServer(client, pid)
    elif name == VLLM:
        with _server(vllm_command(settings, settings.port + number), url, settings) as (client, pid):
            yield VllmServer(client, pid)
    else:
        child = Child(name, settings)
        try:
            yield child
        finally:
            child.close()


class InProcess(Protocol):
    """A contender inside a child process."""

    def answer(self, prompt: Prompt, new_tokens: int) -> Answered:
        """As `Contender.answer`."""


class Child:
    """A contender in a process that this one has started."""

    def __init__(self, name: str, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_answer_all, args=(theirs, name, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def answer(self, prompt: Prompt, new_tokens: int) -> Answered:
        answered: Answered = self._ask("answer", prompt, new_tokens)
        return answered

    def together(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        seconds: float = self._ask("together", prompts, new_tokens)
        return seconds

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(self._process.pid or 0)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(30.0)
        self._process.kill()

    def _ask(self, *call: Any) -> Any:
        self._connection.send(call)
        return self._receive()

    def _receive(self) -> Any:
        try:
            found = self._connection.recv()
        except EOFError as error:
            self._process.join(10.0)
            raise ChunkweaveError(f"its process ended with {self._process.exitcode}") from error
        if isinstance(found, str):
            raise ChunkweaveError(found)
        return found


def _answer_all(connection: Connection, name: str, settings: Settings) -> None:
    """Main function of the child process: reports that it is ready, then answers until the connection closes."""
    torch.set_num_threads(settings.threads)
    kind, _, spec = name.partition(":")
    try:
        engine: InProcess = Transformers(settings) if kind == TRANSFORMERS else OwnEngine(spec, settings)
        connection.send(None)
        while True:
            name, *arguments = connection.recv()
            connection.send(getattr(engine, name)(*arguments))
    except EOFError:
        return
    except (ChunkweaveError, ImportError, OSError, RuntimeError, ValueError) as error:
        connection.send(f"{type(error).__name__}: {error}")


class Transformers:
    """Hugging Face's own forward, with its cache."""

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=getattr(torch, settings.dtype)).eval()

    @torch.inference_mode()
    def answer(self, prompt: Prompt, new_tokens: int) -> Answered:
        started = time.perf_counter()
        output = self._model(torch.tensor([prompt.token_ids]), use_cache=True, logits_to_keep=1)

        def decode(token: int, _: int) -> torch.Tensor:
            nonlocal output
            output = self._model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
            logits: torch.Tensor = output.logits[0, -1]
            return logits

        return _decoded(output.logits[0, -1], decode, new_tokens, started, 0)


class OwnEngine:
    """chunkweave's engine with one method and a store of its own, by its runner: as the others it gets token ids.

    `METHOD+native` computes with the quantized weights of the file as they are, `METHOD+drafts` with draft tokens.
    """

    def __init__(self, spec: str, settings: Settings) -> None:
        from chunkweave import Engine

        keep_freed_memory()
        written, *variants = spec.split("+")
        if unknown := {*variants} - {NATIVE, DRAFTS}:
            raise ChunkweaveError(f"no variant {min(unknown)!r}: there are {NATIVE} and {DRAFTS}")
        ((self._name, self._method),) = make_contenders([written]).items()
        self._drafts, self._costs = _MOST_DRAFTS * (DRAFTS in variants), StepCosts()
        model, weights = (settings.gguf, "native") if NATIVE in variants else (settings.folder, "auto")
        store = StoreConfig(host_budget_bytes=settings.kept_bytes)
        self._runner = Engine.load(model, dtype=settings.dtype, weights=weights, store=store).runner

    def answer(self, prompt: Prompt, new_tokens: int) -> Answered:
        started = time.perf_counter()
        prefilled = self._prefill(prompt, new_tokens)
        drafts = Drafts(prompt.token_ids) if self._drafts else None
        generated: list[int] = []

        def decode(token: int, place: int) -> torch.Tensor:
            generated.append(token)
            return self._step(prefilled.cache, drafts, generated, len(prompt) + place, new_tokens - place - 2)

        plan = prefilled.plan
        stored = plan.tokens(KVSource.EXACT) + plan.tokens(KVSource.REUSED)
        answered = _decoded(prefilled.logits.flatten(), decode, new_tokens, started, stored)
        self._keep(prefilled)
        return answered

    def together(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        started, tokens, caches = time.perf_counter(), list[int](), list[RequestCache]()
        for prompt in prompts:
            prefilled = self._prefill(prompt, new_tokens)
            tokens.append(int(prefilled.logits.argmax()))
            caches.append(prefilled.cache)
            self._keep(prefilled)
        for place in range(new_tokens - 1):
            logits = self._runner.decode(caches, tokens, [len(prompt) + place for prompt in prompts])
            tokens = logits.argmax(-1).tolist()
        return time.perf_counter() - started

    def _prefill(self, prompt: Prompt, new_tokens: int) -> Prefilled:
        return self._runner.prefill(prompt, self._method, new_tokens=new_tokens, capture=self._name != FULL)

    def _keep(self, prefilled: Prefilled) -> None:
        if self._name != FULL:
            self._runner.store_new(prefilled)

    def _step(
        self, cache: RequestCache, drafts: Drafts | None, generated: list[int], position: int, most: int
    ) -> torch.Tensor:
        """Logits behind the last token, and behind each draft token that was right: `[tokens, vocab]`."""
        found = () if drafts is None or self._costs.stale(1) else drafts.find(generated, min(most, self._drafts))
        if drafts is not None and found:
            found = found[: self._costs.allot([(len(found), drafts.acceptance)], len(found))[0]]
        since_s = time.perf_counter()
        logits = self._runner.step([Decoding(cache, (generated[-1], *found), position, 1 + len(found))], [])
        self._costs.ran(1, len(found), time.perf_counter() - since_s)
        chosen = logits.argmax(-1).tolist()
        right = next((place for place, token in enumerate(found) if token != chosen[place]), len(found))
        if drafts is not None:
            drafts.checked(len(found), right)
        generated += found[:right]
        return logits[: 1 + right]


def _decoded(
    logits: torch.Tensor, decode: Callable[[int, int], torch.Tensor], new_tokens: int, started: float, stored: int
) -> Answered:
    """Greedy decoding from the first logits on.

    `decode` gives those behind a token, by its place in the answer, and those behind right guesses of what follows it.
    """
    token, place = int(logits.argmax()), 0
    first_s = time.perf_counter()
    while place < new_tokens - 1:
        *_, token = chosen = decode(token, place).argmax(-1).reshape(-1).tolist()
        place += len(chosen)
    ended = time.perf_counter()
    logs, tokens = logits.float().log_softmax(-1).topk(TOP)
    likeliest = dict(zip(tokens.tolist(), logs.tolist(), strict=True)) if new_tokens == 1 else {}
    return Answered(FirstToken(first_s - started, stored, likeliest), new_tokens, ended - first_s)


@contextmanager
def _server(command: str, url: str, settings: Settings) -> Iterator[tuple[httpx.Client, int]]:
    with (
        serving(command, url, ready_path="/health", log=settings.log) as pid,
        # llama.cpp may close an idle connection at the moment of the next request.
        httpx.Client(base_url=url, timeout=_ANSWER_S, limits=httpx.Limits(max_keepalive_connections=0)) as client,
    ):
        yield client, pid


def llama_command(settings: Settings, port: int, *, shifting: bool) -> str:
    """llama.cpp's server with its prompt cache, also over prompts before the last one, and a slot for each request.

    With `shifting` it has one slot, and also reuses pieces of the last prompt from other positions, by rotation.
    """
    call = [str(settings.llama_server), "--model", str(settings.gguf), "--host", "127.0.0.1", "--port", str(port)]
    slots = 1 if shifting else settings.at_once
    call += ["--threads", str(settings.threads), "--threads-batch", str(settings.threads), "--parallel", str(slots)]
    call += ["--ctx-size", str(slots * settings.max_tokens), "--cache-ram", str(settings.kept_bytes // _MIB)]
    return shlex.join([*call, *(["--cache-reuse", str(_SHIFTED_TOKENS)] if shifting else [])])


def vllm_command(settings: Settings, port: int) -> str:
    """The command of vLLM for CPUs as it is installed, with its prefix cache."""
    call = [settings.python, "-m", SERVER, "--model", str(settings.folder), "--served-model-name", _MODEL]
    call += ["--dtype", settings.dtype, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    call += ["--max-num-seqs", str(settings.at_once), "--max-model-len", str(settings.max_tokens)]
    call += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    return shlex.join([*call, "--kv-cache-memory-bytes", str(settings.kept_bytes)])


def _at_once(contender: Contender, prompts: Sequence[Prompt], new_tokens: int) -> float:
    """`Contender.together` of a server."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(lambda prompt: contender.answer(prompt, new_tokens), prompts))
    return time.perf_counter() - started


@dataclass(slots=True)
class Stream:
    """What came of a streamed answer: when the first and the last tokens came, how many, and the last event."""

    started: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0

    def note(self, tokens: int) -> None:
        """So many tokens have come now."""
        if tokens:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.tokens += tokens

    def answered(self, stored: int, likeliest: Mapping[int, float], server_s: float | None = None) -> Answered:
        """All of it."""
        first = FirstToken(self.first_s - self.started, stored, likeliest)
        return Answered(first, self.tokens, self.last_s - self.first_s, server_s)


def _events(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer.

    Raises:
        ChunkweaveError: the server refused it.
    """
    with client.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise ChunkweaveError(f"status {response.status_code}: {response.read()[:200].decode()}")
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise ChunkweaveError(str(event["error"])[:200])
                yield event


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama.cpp's server, asked by its own `/completion`."""

    client: httpx.Client
    pid: int

    def answer(self, prompt: Prompt, new_tokens: int) -> Answered:
        body = {"prompt": list(prompt.token_ids), "n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"stream": True, "cache_prompt": True, "return_tokens": True, "n_probs": TOP if new_tokens == 1 else 0}
        stream, likeliest, last = Stream(time.perf_counter()), dict[int, float](), dict[str, Any]()
        for event in _events(self.client, "/completion", body):
            if not event.get("stop"):
                stream.note(len(event.get("tokens", ())))
            for one in event.get("completion_probabilities", ())[:1]:
                likeliest = likeliest or llama_likeliest(one)
            last = event
        if last["tokens_evaluated"] != len(prompt):
            raise ChunkweaveError(f"a prompt of {len(prompt)} tokens became one of {last['tokens_evaluated']}")
        timings = last["timings"]
        return stream.answered(len(prompt) - timings["prompt_n"], likeliest, timings["prompt_ms"] / 1e3)

    def together(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        return _at_once(self, prompts, new_tokens)

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(self.pid)


def llama_likeliest(entry: Mapping[str, Any]) -> dict[int, float]:
    """Log-probabilities of a token's likeliest alternatives, from one of `completion_probabilities`."""
    return {int(one["id"]): float(one["logprob"]) for one in entry["top_logprobs"]}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """vLLM's OpenAI-compatible server."""

    client: httpx.Client
    pid: int

    def answer(self, prompt: Prompt, new_tokens: int) -> Answered:
        body = {"model": _MODEL, "prompt": list(prompt.token_ids), "max_tokens": new_tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        if new_tokens == 1:
            body |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
        stream, likeliest, usage = Stream(time.perf_counter()), dict[int, float](), dict[str, Any]()
        for event in _events(self.client, "/v1/completions", body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                stream.note(1)
                if choice.get("logprobs"):
                    likeliest = likeliest or vllm_likeliest(choice["logprobs"]["top_logprobs"][0])
        if usage["prompt_tokens"] != len(prompt):
            raise ChunkweaveError(f"a prompt of {len(prompt)} tokens became one of {usage['prompt_tokens']}")
        stream.tokens = usage["completion_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return stream.answered(cached, likeliest)

    def together(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        return _at_once(self, prompts, new_tokens)

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(self.pid)


def vllm_likeliest(top: Mapping[str, float]) -> dict[int, float]:
    """The same from `top_logprobs`, which have a token as `token_id:NUMBER`."""
    return {int(token.partition(":")[2]): float(value) for token, value in top.items()}
