"""vLLM servers as a backend: processes started and watched here, or running servers at given URLs."""

import asyncio
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.conversation.turns import TurnBuilder
from chunkweave.models.gguf import is_bundled_reader
from chunkweave.ordering.arrangement import COUNTS_FILE, Arranger
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.contexts import rule_of
from chunkweave.prompt.parts import neutral_passages
from chunkweave.prompt.template import template_for
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.vllm.report_socket import REPLICA, VARIABLE
from chunkweave_server.backend import BackendParts, Stage, Submission
from chunkweave_server.chats import ChatPrompts, details_of
from chunkweave_server.errors import HttpError
from chunkweave_server.metrics import MetricSample, comparison_samples, counted_samples
from chunkweave_server.requests import ChatBody, CompletionBody
from chunkweave_server.settings import Settings
from chunkweave_server.threads import TenantThreads, in_thread
from chunkweave_server.vllm_backend.answer import AnswerContext, VllmAnswer
from chunkweave_server.vllm_backend.cache import VllmCache
from chunkweave_server.vllm_backend.comparisons import VllmComparisons
from chunkweave_server.vllm_backend.fleet import Fleet, NoReplicaError, Replica, fleet_samples, labelled
from chunkweave_server.vllm_backend.parsing import PARSE, TOOL_FLAGS, is_forced
from chunkweave_server.vllm_backend.passthrough import Passthrough
from chunkweave_server.vllm_backend.prepare import chooser_for, load_tokenizer
from chunkweave_server.vllm_backend.process import Parsers, VllmFlags, VllmProcess
from chunkweave_server.vllm_backend.removal import FleetRemovals, RemovalJournal
from chunkweave_server.vllm_backend.reports import ReportInbox
from chunkweave_server.vllm_backend.upstream import Upstream, UpstreamLostError

logger = logging.getLogger(__name__)

_USUAL_CONTEXT = 4096
_POLL_S = 0.5
_WATCH_S = 2.0
_AT_A_TIME = 16
"""Chunks that are tokenized in one turn of a tenant."""

_UNSUPPORTED_IN_CHAT = (
    "functions",
    "function_call",
    "chat_template",
    "continue_final_message",
    "reasoning_effort",
    "thinking_token_budget",
)
"""Fields that only vLLM's chat endpoint supports: woven prompts are token ids and use the completions endpoint."""

_UNSUPPORTED = (
    "kv_transfer_params",
    "prompt_embeds",
    "suffix",
    "use_beam_search",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)


class VllmBackend:
    """One or several vLLM servers with the connector. `start` sets `fleet`, `context` and `cache`.

    `tokenizer` replaces the loaded one, for tests.
    """

    def __init__(self, settings: Settings, flags: VllmFlags, *, tokenizer: TextTokenizer | None = None) -> None:
        self.name = flags.name
        self.first_stage = Stage.STARTING_VLLM
        model = None if flags.adapter is None else self.name  # vLLM's default is the model without the adapter
        self.passthrough = Passthrough(self._started_fleet, model=model, finds=settings.finding.find_chunks)
        self.context: AnswerContext
        self.cache: VllmCache
        self.fleet: Fleet | None = None
        self.processes: list[VllmProcess] = []
        self._settings = settings
        self._flags = flags
        self._given_tokenizer = tokenizer
        self._upstreams: list[Upstream] = []
        self._watching: list[asyncio.Task[None]] = []
        self._inbox: ReportInbox | None = None
        self._removals: FleetRemovals | None = None
        self._parsers = flags.parsers

    @property
    def unavailable(self) -> str | None:
        """Set while no vLLM server is up."""
        return None if self.fleet is not None and self.fleet.ready else "no vLLM server is ready"

    async def start(self, threads: TenantThreads) -> BackendParts:
        """Start the servers, or wait for running ones, and load the tokenizer."""
        self._threads = threads
        settings = self._settings.fleet
        source = await in_thread(lambda: self._flags.source)  # dequantizes a GGUF file into a folder for vLLM
        passages = neutral_passages(self._settings.capture.neutral_file, Path(source))
        urls = {f"upstream-{number}": url for number, url in enumerate(settings.upstream)}
        if settings.report_socket is not None or not settings.upstream:
            self._inbox = ReportInbox(settings.report_socket if settings.upstream else None)
            await self._inbox.open()
        if not settings.upstream:
            self.processes = [self._process(number) for number in range(settings.replicas)]
            urls = {process.name: process.url for process in self.processes}
        ranks = range(self._flags.ranks) if self._flags.ranks > 1 else (None,)
        self._upstreams = [Upstream(name, url, rank=rank) for name, url in urls.items() for rank in ranks]
        fleet = Fleet(self._upstreams, self._settings)
        removals = self._removals = await in_thread(lambda: self._fleet_removals(fleet))
        tokenizer, _ = await asyncio.gather(in_thread(self._tokenizer), self._start_servers(removals))
        most_tokens = await self._upstreams[0].most_tokens() or _USUAL_CONTEXT
        if not self.processes and await self._upstreams[0].serves(PARSE):
            self._parsers = Parsers(tools=True)  # only a response shows whether it has a tool parser
        preparer = await in_thread(partial(self._preparer, tokenizer, most_tokens, passages, fleet))
        evidence = preparer.chooser.evidence
        comparisons = None if evidence is None else VllmComparisons(evidence, fleet)
        self._chats = ChatPrompts(preparer.builder, self.name, f"front:{self.name}")
        deadline_s = self._settings.batching.deadline_s
        first_token_s = settings.first_token_timeout_s
        self.context = AnswerContext(preparer, fleet, self._inbox, comparisons, deadline_s, first_token_s)
        self.cache = VllmCache(self.context, removals, threads, self._settings.improving, model=self.name)
        self.cache.improving.start()
        self.fleet = fleet
        return BackendParts(
            tokenizer,
            preparer.chooser.record is not None,
            most_tokens,
            max_prefill_batch=settings.max_prefill_batch or len(fleet.replicas),
            speculate=settings.speculate,
            order=preparer.order,
            reads_worlds_only=is_bundled_reader(self._flags.model),
            reorders=preparer.arranger.reorders,
        )

    async def stop(self) -> None:
        """Stop idle-time work and comparisons, then the vLLM servers."""
        if self.fleet is not None:
            await self.cache.improving.close()
            await in_thread(partial(self.context.preparer.save_counts, self._counts_file))
        if self.fleet is not None and self.context.comparisons is not None:
            await self.context.comparisons.close()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._removals is not None:
            await self._removals.close()
        await asyncio.gather(*(process.stop() for process in self.processes))
        for upstream in self._upstreams:
            await upstream.close()
        if self._inbox is not None:
            self._inbox.close()

    async def submit(self, submission: Submission, *, speculative: bool = False) -> VllmAnswer:
        """Tokenize in a thread. The answer chooses its replica when it is first read."""
        preparer = self.context.preparer
        build = partial(self._chats.build, details_of(submission.body))
        prepared = await self._threads.run(
            submission.tenant,
            lambda: preparer.prepare(
                submission.request, submission.method_request, speculative=speculative, build=build
            ),
        )
        body = self._upstream_body(submission.body, prepared)
        parsing = self._parsing(submission.body)
        return VllmAnswer(self.context, prepared, submission, body, parsing=parsing, speculative=speculative)

    def samples(self) -> Iterator[MetricSample]:
        """Metrics of the replicas, and sums over the segment stores in vLLM's workers."""
        assert self._removals is not None, "it has started"
        yield from fleet_samples(self.context.fleet, self.processes, self.context.retries)
        yield from self._removals.samples()
        yield from self.cache.improving.samples()
        if (comparisons := self.context.comparisons) is not None:
            yield from comparison_samples(comparisons.evidence, comparisons.counts)
        if self._inbox is not None and (counts := self._inbox.store_counts()) is not None:
            yield from counted_samples(counts)

    async def metrics(self) -> bytes:
        """Metrics of all vLLM servers that are up."""
        up = {replica.upstream.server: replica.upstream for replica in self._started_fleet().replicas if replica.up}
        texts = await asyncio.gather(*(upstream.text("/metrics") for upstream in up.values()), return_exceptions=True)
        exposed = {server: text for server, text in zip(up, texts, strict=True) if isinstance(text, str)}
        return labelled(exposed).encode()

    def check(self, body: CompletionBody) -> None:
        """Refuse fields that vLLM's completions do not support, and tools if vLLM does not parse them.

        Raises:
            HttpError: 400, such a field.
        """
        fields = {**body.passed_on, "echo": body.echo}
        refused = (*_UNSUPPORTED, "echo", *(_UNSUPPORTED_IN_CHAT if isinstance(body, ChatBody) else ()))
        if unsupported := [name for name in refused if fields.get(name) not in (None, [], {}, False)]:
            message = f"not supported with documents or chunkweave: {', '.join(unsupported)}"
            raise HttpError(400, message, param=unsupported[0], code="unsupported_field")
        if isinstance(body, ChatBody) and (body.tools or is_forced(body.tool_choice)):
            self._check_tools(body)

    def _check_tools(self, body: ChatBody) -> None:
        if body.tool_choice == "none":
            return
        if not body.tools:
            raise HttpError(400, "tool_choice needs tools", param="tool_choice")
        if not self._parsers.tools:
            message = f"tools need {TOOL_FLAGS} in the flags of this server or of the vLLM servers"
            raise HttpError(400, message, param="tools", code="unsupported_field")
        if body.stops:
            raise HttpError(400, "stop cannot be given with tools", param="stop", code="unsupported_field")

    def _parsing(self, body: CompletionBody) -> dict[str, Any] | None:
        """The chat request for vLLM's parsers; None if the answer is not parsed."""
        if not isinstance(body, ChatBody):
            return None
        calls = bool(body.tools) and body.tool_choice != "none"
        if not calls and (body.stops or not self._parsers.reasoning):  # a stop text ends the text, not the tokens
            return None
        chat: dict[str, Any] = {
            "model": body.model or self.name,
            "messages": [{"role": "user", "content": body.question.text}],
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        if calls:
            choice = {"tool_choice": body.tool_choice, "parallel_tool_calls": body.parallel_tool_calls}
            chat |= {"tools": body.tools, **choice}
        return chat

    def _upstream_body(self, body: CompletionBody, prepared: PreparedRequest) -> dict[str, Any]:
        fields = body.passed_on
        stops = set(fields.get("stop_token_ids") or ())
        if not fields.get("ignore_eos"):
            stops |= self.context.preparer.builder.tokenizer.stop_ids
        upstream: dict[str, Any] = {
            **fields,
            "model": body.model or self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "n": body.n,
            "stop_token_ids": sorted(stops),
        }
        if prepared.request.cache_salt:
            upstream["cache_salt"] = prepared.request.cache_salt
        logprobs = body.alternatives
        comparisons = self.context.comparisons
        compared = None if comparisons is None else comparisons.alternatives(prepared)
        if compared is not None:
            logprobs = max(logprobs or 0, compared)
            if body.alternatives is None:
                upstream["return_tokens_as_token_ids"] = True
        return upstream if logprobs is None else {**upstream, "logprobs": logprobs}

    def _started_fleet(self) -> Fleet:
        if self.fleet is None:
            raise NoReplicaError
        return self.fleet

    async def _start_servers(self, removals: FleetRemovals) -> None:
        if not self.processes:
            servers = {upstream.server: upstream for upstream in self._upstreams}
            await asyncio.gather(*(self._until_up(upstream) for upstream in servers.values()))
            for name, upstream in servers.items():
                removals.up(name)
                self._watching.append(asyncio.create_task(_follow(upstream, removals), name=f"watch {name}"))
            return
        for process in self.processes:
            process.on_change = partial(removals.answers, process.name)
        await asyncio.gather(*(process.start() for process in self.processes))

    def _fleet_removals(self, fleet: Fleet) -> FleetRemovals:
        """Removals, also those pending from an earlier run. Keys: names of our processes, URLs of other servers."""

        def key_of(replica: Replica) -> str:
            upstream = replica.upstream
            return replica.name if self.processes else f"{upstream.url}{replica.name.removeprefix(upstream.server)}"

        folder = self._settings.corpora.data_dir
        return FleetRemovals(fleet, RemovalJournal(folder, [key_of(replica) for replica in fleet.replicas]), key_of)

    async def _until_up(self, upstream: Upstream) -> None:
        until_s = time.monotonic() + self._settings.fleet.start_timeout_s
        while True:
            try:
                await upstream.text("/health")
                return
            except UpstreamLostError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(_POLL_S)

    def _process(self, number: int) -> VllmProcess:
        assert self._inbox is not None, "it was opened"
        settings = self._settings
        fleet = self._settings.fleet
        secrets = settings.connector_environment()
        name = f"replica-{number}"
        environment = {VARIABLE: self._inbox.path, REPLICA: name, **secrets, **fleet.environments().get(number, {})}
        config = settings.connector_config()
        command = partial(self._flags.command, connector=config)
        return VllmProcess(name, command, environment, fleet.start_timeout_s)

    def _tokenizer(self) -> TextTokenizer:
        if self._given_tokenizer is not None:
            return self._given_tokenizer
        flags = {name: self._flags.value(f"--{name.replace('_', '-')}") for name in ("revision", "chat_template")}
        return load_tokenizer(self._flags.tokenizer, flags)

    @property
    def _counts_file(self) -> Path | None:
        folder = self._settings.store.cache_dir
        return None if folder is None else folder / COUNTS_FILE

    def _preparer(
        self, tokenizer: TextTokenizer, most_tokens: int, passages: tuple[str, ...], fleet: Fleet
    ) -> RequestPreparer:
        settings = self._settings
        usual = self._settings.requests
        builder = PromptBuilder(tokenizer, template_for(tokenizer), f"front:{self.name}")
        chooser = chooser_for(
            self._flags.source,
            method=usual.method,
            quality=usual.quality,
            dtype=self._flags.value("--dtype"),
            adapter=self._flags.adapter,
        )
        record = chooser.record
        if settings.improving.compare and record is not None and any(map(record.spec, record.targets)):
            chooser = chooser.comparing(())
        preparer = RequestPreparer(
            builder,
            chooser,
            TurnBuilder(builder, deduplicate=settings.ordering.deduplicate),
            most_tokens,
            Arranger(settings.ordering, fleet.sent.tree),
            passages=passages,
            neutral_tokens=settings.capture.neutral_tokens,
            rule=rule_of(settings.capture),
            order=ChunkOrder.parse(usual.order or ""),
        )
        preparer.load_counts(self._counts_file)
        return preparer


async def _follow(upstream: Upstream, removals: FleetRemovals) -> None:
    """Watch a server that was not started here, and report whether it is up."""
    while True:
        await asyncio.sleep(_WATCH_S)
        try:
            await upstream.text("/health")
            removals.up(upstream.server)
        except UpstreamLostError as error:
            logger.warning("%s", error)
            removals.down(upstream.server)
