"""What is attacked: our own engine, and the server before something that looks like vLLM."""

import shutil
from contextlib import ExitStack

from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.template import template_for
from chunkweave.types import Chunk
from chunkweave_server.tenants import Tenant
from tests.adversary.arena import Arena
from tests.adversary.servers import ADMIN, Reply, Server
from tests.adversary.texts import QUESTIONS, reader_tokenizer, text
from tests.integration.redis_server import Server as RemoteServer


class EngineArena(Arena):
    """Our own engine with the bundled reader. KV is in memory, on disk, and in Valkey or Redis if that is there."""

    backend = "engine"
    faults: tuple[str, ...] = ("full", "readonly", "slow")

    def open(self, stack: ExitStack) -> list[Server]:
        # In bfloat16 two tokens may be equally likely, and what else is in a batch decides.
        common = ["serve", "--model", "reader", "--dtype", "float32", "--set", "log_level=ERROR"]
        flags = [*common, "--set", "speculate=false", "--host-budget", "6MiB"]
        for name in ("attacked", "swapped"):
            disk = self.folder / name / "disk"
            kept = ["--cache-dir", str(disk / "cache"), "--disk-budget", "24MiB"]
            self.twins.append(Server(self.forks, self.folder / name, [*flags, *kept, "--data-dir", str(disk / "data")]))
        if shutil.which("valkey-server") or shutil.which("redis-server"):
            (self.folder / "remote").mkdir()
            self.remote = RemoteServer(self.folder / "remote")
            self.remote.start()
            stack.callback(self.remote.kill)
            for number, twin in enumerate(self.twins):
                twin.give("--remote-url", f"{self.remote.url.removesuffix('/0')}/{number}")
            self.faults = (*self.faults, "remote")
        self.lone = Server(self.forks, self.folder / "lone", common)
        return [*self.twins, self.lone]

    def begin_fault(self, kind: str) -> None:
        if kind == "remote":
            self.remote.kill()
        elif self.fault == "remote":
            self.remote.start()
        super().begin_fault("" if kind == "remote" else kind)
        self.fault = kind

    def emptied(self, server: Server) -> bool:
        if server.send("POST", "/v1/cache/clear", ADMIN, {"everything": True}).status != 200:
            return False
        self.check_status(server.send("POST", "/v1/cache/warm", ADMIN, {"documents": [text(0)]}))
        server.settle_writes()
        levels = server.settle()["store"]["levels"]
        written = all(level["segments"] > 0 for level in levels.values())
        cleared = server.send("POST", "/v1/cache/clear", ADMIN, {"everything": True})
        return written and cleared.status == 200 and not server.settle()["store"]["segments"]

    def check_answer(self, tenant: str, numbers: list[int], question: int, method: str, reply: Reply) -> None:
        super().check_answer(tenant, numbers, question, method, reply)
        if method not in ("full", "prefix"):
            self.replay(tenant, numbers, question, method, reply)

    def replay(self, tenant: str, numbers: list[int], question: int, method: str, reply: Reply) -> None:
        """Give the lone server the segments that were reused and ask it: the answer has to be the same."""
        parts = reply.report["chunks"]
        chunks = [one for one in parts if one["rank"] is not None]
        self.lone.send("POST", "/v1/cache/clear", ADMIN, {"everything": True})
        exact = sum(one["kv_source"] == "prefix-exact" for one in chunks)
        if exact:
            before = self.body(tenant, numbers[:exact], 0, "prefix") | {"max_tokens": 1}
            self.lone.send("POST", "/v1/chat/completions", tenant, before)
        reused = [number for number, one in zip(numbers, chunks, strict=True) if one["kv_source"] == "reused"]
        if reused:
            self.lone.send("POST", "/v1/cache/warm", tenant, {"documents": [text(number) for number in reused]})
        again = self.lone.send("POST", "/v1/chat/completions", tenant, self.body(tenant, numbers, question, method))
        sources = [[(one["variant"], one["kv_source"]) for one in each] for each in (parts, again.report["chunks"])]
        if sources[0] != sources[1]:
            self.counts["woven answers with segments of other prompts"] += 1
            return
        self.counts["woven answers replayed"] += 1
        for name in ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens"):
            assert again.report[name] == reply.report[name], self.told(f"{name}: {again.report} {reply.report}")
        assert again.text == reply.text, self.told(f"replayed {again.text!r}, not {reply.text!r}")


class FrontArena(Arena):
    """The server before something that looks like vLLM: what goes up is what a lone server would send."""

    backend = "vllm"
    faults = ("full", "readonly", "slow", "upstream")

    def open(self, stack: ExitStack) -> list[Server]:
        from tests.server.fake_vllm import FakeVllm

        self._fakes: list[FakeVllm] = []
        self._asked: set[tuple[str, int]] = set()
        for name in ("attacked", "swapped"):
            (self.folder / name).mkdir()
            reports = str(self.folder / name / "reports")
            fake = stack.enter_context(FakeVllm(reports))
            flags = ["vllm-serve", "reader", "--upstream", fake.url]
            flags += ["--set", f"report_socket={reports}", "--set", "speculate=false"]
            data = self.folder / name / "disk" / "data"
            self.twins.append(
                Server(self.forks, self.folder / name, [*flags, "--set", "log_level=ERROR", "--data-dir", str(data)])
            )
            self._fakes.append(fake)
        tokenizer = reader_tokenizer()
        self._builder = PromptBuilder(tokenizer, template_for(tokenizer), "front:reader")
        return self.twins

    def emptied(self, server: Server) -> bool:
        self._asked.clear()
        for fake in self._fakes:
            for held in (fake.stored, fake.means, fake.first_passes):
                held.clear()
            fake.behave = None
        return server.send("GET", "/ready", ADMIN).status == 200

    def begin_fault(self, kind: str) -> None:
        from starlette.responses import JSONResponse

        super().begin_fault("" if kind == "upstream" else kind)
        self.fault = kind
        for fake in self._fakes:
            broken = kind == "upstream"
            fake.behave = (lambda body: JSONResponse({"error": {"message": "broken"}}, 500)) if broken else None

    def check_answer(self, tenant: str, numbers: list[int], question: int, method: str, reply: Reply) -> None:
        super().check_answer(tenant, numbers, question, method, reply)
        prompt = self.prompt(tenant, numbers, question)
        salts = {one.get("cache_salt") for one in self._fakes[0].seen if one["prompt"] == prompt}
        assert salts, self.told("vLLM was sent another prompt than a lone server sends")
        self.counts["prompts compared"] += 1
        assert Tenant(tenant).salt("") in salts, self.told(f"{tenant} has the salt of another: {salts}")
        before = {number for number in numbers if (tenant, number) in self._asked and method != "full"}
        if self.in_step:
            assert bool(reply.report["reused_tokens"] + reply.report["prefix_exact_tokens"]) == bool(before), self.told(
                f"{tenant} asked {before} before: {reply.report}"
            )
        self.answered(tenant, numbers, question, method)

    def prompt(self, tenant: str, numbers: list[int], question: int) -> list[int]:
        chunks = [Chunk(text(number)) for number in numbers]
        return list(self._builder.build(QUESTIONS[question], chunks).token_ids)

    def warmed(self, tenant: str, numbers: list[int]) -> None:
        self._asked |= {(tenant, number) for number in numbers}

    def forgotten(self, tenant: str, numbers: list[int]) -> None:
        self._asked -= {(tenant, number) for number in numbers}

    def answered(self, tenant: str, numbers: list[int], question: int, method: str) -> None:
        self.warmed(tenant, numbers)
