"""Parts of the front alone: flags, settings, merged metrics, compared distributions, reports on their way."""

import asyncio
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chunkweave.config import Backend
from chunkweave.conversation.answer import PartReport, PrefillReport
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.models.adapters import Adapter, read_adapter
from chunkweave.planning.plan import KVSource
from chunkweave.types import spans_of
from chunkweave.vllm.report_socket import CountsSender, ReportSender
from chunkweave_server.settings import FleetSettings, resolve
from chunkweave_server.vllm_backend.comparisons import compare
from chunkweave_server.vllm_backend.fleet import labelled
from chunkweave_server.vllm_backend.process import VllmFlags, VllmProcess, VllmStartError
from chunkweave_server.vllm_backend.reports import ReportInbox

ID = "0123456789abcdef" * 2


def test_flags_go_to_vllm_as_they_are():
    flags = VllmFlags("some/model", ("--max-model-len", "1024", "--dtype=float32", "-tp", "2"))
    command = list(flags.command(8001, {"host_budget": "1GiB"}))
    place = command.index("--max-model-len")
    assert command[place : place + 5] == list(flags.flags)
    assert "--no-use-tqdm-on-load" in command, "its lines go to a log"
    kept = VllmFlags("some/model", ("--use-tqdm-on-load",)).command(8001, {})
    assert "--no-use-tqdm-on-load" not in kept
    assert command[command.index("--disable-access-log-for-endpoints") + 1] == "/health,/metrics"
    for flag in ("--disable-uvicorn-access-log", "--disable-access-log-for-endpoints=/ping"):
        own = VllmFlags("some/model", (flag,)).command(8001, {})
        assert [one for one in own if "access-log" in one] == [flag]
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"host_budget": "1GiB"}
    assert command[command.index("--served-model-name") + 1] == "some/model"
    assert (flags.value("--dtype"), flags.value("--max_model_len", "--max-model-len")) == ("float32", "1024")


def adapter(folder: Path, **config: object) -> Adapter:
    """One as far as flags look at it."""
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return read_adapter(folder)


def test_an_adapter_is_a_model_of_its_own_beside_the_one_without_it(tmp_path):
    mine = adapter(tmp_path / "mine")
    for flags, rank in (((), "8"), (("--max-lora-rank", "64"), "64")):
        made = VllmFlags("some/model", flags, mine)
        command = list(made.command(8001, {}))
        assert made.name == "some/model+mine"
        assert command[command.index("--served-model-name") + 1] == "some/model"
        assert command.count("--served-model-name") == command.count("--max-lora-rank") == 1
        assert command[command.index("--max-lora-rank") + 1] == rank
        module = json.loads(command[command.index("--lora-modules") + 1])
        path = str((tmp_path / "mine").resolve())
        assert module == {"name": "some/model+mine", "path": path, "base_model_name": "some/model"}
        assert "--enable-lora" in command
    wide = VllmFlags("m", (), adapter(tmp_path / "mine", rank_pattern={"q_proj": 17})).command(8001, {})
    assert wide[list(wide).index("--max-lora-rank") + 1] == "32"


def test_the_name_that_is_given_is_that_of_model_and_adapter(tmp_path):
    mine = adapter(tmp_path / "mine")
    for flags in (
        ("--served-model-name", "nicer", "--dtype", "float32"),
        ("--dtype", "float32", "--served_model_name=nicer"),
    ):
        made = VllmFlags("some/model", flags, mine)
        command = list(made.command(8001, {}))
        assert made.name == json.loads(command[command.index("--lora-modules") + 1])["name"] == "nicer"
        assert command[command.index("--served-model-name") + 1] == "some/model"
        assert "--served_model_name=nicer" not in command
        assert command[command.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (("--lora-modules", "a=b"), {}, "either --adapter or"),
        (("--served-model-name", "a", "b"), {}, "give one --served-model-name"),
        ((), {"r": 513}, "up to rank 512"),
    ],
)
def test_what_does_not_go_with_an_adapter_is_refused(tmp_path, flags, config, message):
    with pytest.raises(UsageError, match=message):
        VllmFlags("m", flags, adapter(tmp_path / "mine", **config))


def test_an_adapter_is_not_for_servers_that_run_already():
    with pytest.raises(UsageError, match="give those of upstream --lora-modules"):
        resolve({"adapter": "mine", "upstream": ("http://a:1",)}, {}, backend=Backend.VLLM)


def test_a_folder_is_served_by_its_name_alone(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    assert VllmFlags(str(folder)).name == "llama"
    assert VllmFlags(str(folder), ("--served-model-name", "nicer")).name == "nicer"
    assert Path(VllmFlags("reader").source, "config.json").is_file()


@pytest.mark.parametrize("flag", ["--api-key", "--kv-transfer-config={}", "--ssl_keyfile", "--model"])
def test_flags_that_the_front_sets_are_refused(flag):
    with pytest.raises(UsageError, match="cannot be given to vLLM here"):
        VllmFlags("m", (flag, "x"))


def test_the_environment_of_replicas():
    fleet = FleetSettings(replicas=2, replica_env=("0:CUDA_VISIBLE_DEVICES=0,1", "1:A=b=c"))
    assert fleet.environments() == {0: {"CUDA_VISIBLE_DEVICES": "0,1"}, 1: {"A": "b=c"}}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"replica_env": ("1:A=b",)}, "below 1"),
        ({"upstream": ("host:80",)}, "must be a URL"),
        ({"routing": "sticky"}, "unknown routing"),
        ({"replicas": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(wrong, told):
    with pytest.raises(ChunkweaveError, match=told):
        FleetSettings(**wrong)


def test_samples_of_one_metric_stand_together_under_one_description():
    text = '# HELP a A.\n# TYPE a counter\na 1\na_b{x="y"} 2.0\n# HELP c C.\n# TYPE c gauge\nc{} 3\n'
    assert labelled({"one": text, "two": text}).splitlines() == [
        "# HELP a A.",
        "# TYPE a counter",
        'a{replica="one"} 1',
        'a_b{replica="one",x="y"} 2.0',
        'a{replica="two"} 1',
        'a_b{replica="two",x="y"} 2.0',
        "# HELP c C.",
        "# TYPE c gauge",
        'c{replica="one"} 3',
        'c{replica="two"} 3',
    ]
    assert labelled({}) == ""


def test_divergence_of_the_likeliest_tokens():
    half = {"a": math.log(0.5), "b": math.log(0.5)}
    skewed = {"a": math.log(0.9), "b": math.log(0.1)}
    found = compare(half, skewed)
    assert found.kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), abs=1e-6)
    assert found.agreement == 1.0
    assert compare({"a": -0.1}, {"b": -0.1}).agreement == 0.0
    assert compare({"a": -0.1}, {"b": -0.1}).kl > 1


def drawn_report(rng: random.Random) -> PrefillReport:
    tokens = rng.randint(10, 60)
    source_of = [rng.choice(list(KVSource)) for _ in range(tokens)]
    spans = {source: spans_of(at for at in range(tokens) if source_of[at] is source) for source in KVSource}
    reused = [at for at in range(tokens) if source_of[at] is KVSource.REUSED]
    recomputed = sorted(rng.sample(reused, rng.randint(0, len(reused))))
    return PrefillReport(
        spans,
        recomputed,
        len(recomputed),
        rng.random(),
        {"recompute_ratio": 0.3},
        tuple(rng.sample(range(8), 2)),
        rng.choice([None, 3]),
        {"host": 12, "vllm": 4},
        rng.randint(0, tokens),
        {0: PartReport(reasons={"cfo": 0.5}, contexts=2), 7: PartReport(contexts=1), 9: PartReport(reasons={"cci": 1})},
    )


def test_a_report_is_read_as_it_was_sent_and_its_tokens_sum_to_the_prompt():
    rng = random.Random(5)
    for _ in range(300):
        report = drawn_report(rng)
        fields = json.loads(json.dumps(report.as_dict()))
        assert PrefillReport.from_dict(fields).as_dict() == fields
        short = {name: value for name, value in fields.items() if not isinstance(value, list)}
        assert PrefillReport.from_dict(short).cached_tokens == report.cached_tokens, "too long to be sent whole"
        first, stop = sorted((rng.randint(0, fields["prompt_tokens"]), rng.randint(0, fields["prompt_tokens"])))
        for told in (report, report.clipped(first, stop, fields["prompt_tokens"])):
            counts = told.as_dict()
            names = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
            assert sum(counts[name] for name in names) == counts["prompt_tokens"] == fields["prompt_tokens"]


async def opened(folder: Path) -> tuple[ReportInbox, ReportSender]:
    """An inbox, and a sender to it."""
    inbox = ReportInbox(folder / "reports")
    await inbox.open()
    return inbox, ReportSender(inbox.path)


def test_reports_are_found_by_the_fronts_own_id(tmp_path):
    async def exchange():
        inbox, sender = await opened(tmp_path)
        sender.send(f"cmpl-{ID}-0-ab12cd34", {"chunkweave": {"method": "prefix"}})
        sender.send("cmpl-somebody-else", {"chunkweave": {}})
        sender.send("plain", None)
        first = await inbox.report(ID, 5)
        later = asyncio.create_task(inbox.report(ID[::-1], 5))
        await asyncio.sleep(0)
        sender.send(f"0_cmpl-{ID[::-1]}-0", {"chunkweave": {"method": "epic"}})
        found = await later
        missing = await inbox.report("f" * 32, 0.01)
        inbox.close()
        sender.send(f"cmpl-{ID}", {"chunkweave": {}})
        sender.close()
        return first, found, missing

    assert asyncio.run(exchange()) == ({"method": "prefix"}, {"method": "epic"}, None)


def test_workers_say_what_their_stores_count(tmp_path, monkeypatch):
    async def exchange():
        inbox, _ = await opened(tmp_path)
        assert inbox.store_counts() is None
        monkeypatch.setenv("CHUNKWEAVE_REPORT_SOCKET", inbox.path)
        monkeypatch.setenv("CHUNKWEAVE_REPLICA", "replica-0")
        counts = [{"hits": number, "tiers": {"host": {"failures": 1, "available": number == 1}}} for number in (1, 2)]
        senders = [CountsSender(rank, lambda rank=rank: {"store": counts[rank]}, every_s=0.01) for rank in range(2)]
        await asyncio.sleep(0.05)
        counts[1] = {**counts[1], "hits": 5}  # the last word is sent when they are closed
        for sender in senders:
            await asyncio.to_thread(sender.close)
        await asyncio.sleep(0.05)
        inbox.close()
        return inbox.store_counts()

    assert asyncio.run(exchange()) == {"hits": 6, "tiers": {"host": {"failures": 2, "available": False}}}


def test_a_server_that_weaves_nothing_says_why_until_it_weaves(tmp_path, monkeypatch):
    async def exchange():
        inbox, sender = await opened(tmp_path)
        monkeypatch.setenv("CHUNKWEAVE_REPLICA", "replica-0")
        sender.send_off("this is vLLM 0.99.0")
        await asyncio.sleep(0.05)
        before = dict(inbox.off)
        assert inbox.store_counts() is None
        sender.send_counts("replica-1/0", {"store": {}})
        sender.send_counts("replica-0/1", {"store": {}})
        await asyncio.sleep(0.05)
        sender.close()
        inbox.close()
        return before, inbox.off

    assert asyncio.run(exchange()) == ({"replica-0": "this is vLLM 0.99.0"}, {})


def test_nothing_is_counted_for_nobody(monkeypatch):
    monkeypatch.delenv("CHUNKWEAVE_REPORT_SOCKET", raising=False)
    CountsSender(0, lambda: pytest.fail("nobody asked")).close()


def test_a_killed_servers_socket_is_taken_over_and_a_report_that_is_too_long_goes_without_positions(tmp_path):
    async def exchange():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
            killed.bind(str(tmp_path / "reports"))
        inbox, sender = await opened(tmp_path)
        with pytest.raises(UsageError, match="in use"):
            await ReportInbox(tmp_path / "reports").open()
        sender.send(ID, {"chunkweave": {"method": "epic", "recomputed": list(range(10**6))}})
        try:
            return await inbox.report(ID, 5)
        finally:
            sender.close()
            inbox.close()

    assert asyncio.run(exchange()) == {"method": "epic"}


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death is Linux's")
def test_a_server_ends_with_its_front_even_if_that_is_killed(tmp_path):
    note = tmp_path / "pid"
    inner = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(60)"
    leash = [sys.executable, "-m", "chunkweave_server.vllm_backend.parent_death_signal", sys.executable, "-c", inner]
    outer = f"import subprocess; subprocess.Popen({leash!r}).wait()"
    front = subprocess.Popen([sys.executable, "-c", outer], env=dict(os.environ))
    try:
        _until(lambda: note.exists() and note.read_text())
    finally:
        front.send_signal(signal.SIGKILL)
        front.wait()
    _until(lambda: not _alive(int(note.read_text())))


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(condition):
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)


def test_a_server_that_does_not_start_names_its_first_error():
    log = ["WARNING [x.py:1] like `OSError: no`", "ERROR [y.py:2] ValueError: too little memory", *["a line"] * 60]
    program = f"print(*{log!r}, 'RuntimeError: see above', sep=chr(10)); raise SystemExit(1)"
    process = VllmProcess("replica-0", lambda _: [sys.executable, "-c", program], {}, 30.0)
    with pytest.raises(
        VllmStartError, match=r"RuntimeError: see above\nIts first error:\nValueError: too little memory$"
    ):
        asyncio.run(process.start())
