"""What a new user types first: `-h`, `python -m chunkweave`, `--threads`, `status` without a URL."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chunkweave
from chunkweave.cli import running_server
from tests.integration.command_line import invoke, refusal, succeed

pytestmark = pytest.mark.usefixtures("one_thread")

COMMANDS = (
    "",
    *("ask", "chat", "demo", "serve", "vllm-serve", "status", "server", "server warm", "config", "config show", "keys"),
    *("ingest", "corpus", "corpus list", "cache", "cache warm", "cache clear", "models"),
    *("calibrate", "bench", "bench ttft", "bench fidelity", "study", "simulate", "analyze"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_short_flag_for_help(command):
    long, short = invoke(*command.split(), "--help"), invoke(*command.split(), "-h")
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage:" in short.output


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = sys.modules["transformers"] = None
runpy.run_module("chunkweave", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("option", "shown"), [("--version", f"chunkweave {chunkweave.__version__}\n"), ("--help", "bench")]
)
def test_the_package_runs_as_a_module_and_needs_no_torch_for_its_help(option, shown):
    command = [sys.executable, "-c", WITHOUT_TORCH, option]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize("command", ["demo", "serve", "calibrate"])
def test_threads_are_an_option_of_what_computes(command):
    assert "--threads" in invoke(*command.split(), "--help").output


@pytest.mark.parametrize(
    ("command", "by_set"),
    [
        (("ask", "--max-new-tokens", 2, "Why?"), True),
        (("chat", "--max-new-tokens", 2), True),
        (("cache", "warm", "CACHE", "--docs", "DOC"), False),
        (("bench", "fidelity", "--questions", 1, "--chunks", 3, "--chunk-tokens", 16, "--new-tokens", 1), False),
    ],
)
def test_threads_are_what_torch_computes_with(command, by_set, tmp_path):
    (tmp_path / "notes.md").write_text("The ferry leaves at nine. " * 20, encoding="utf-8")
    places = {"CACHE": tmp_path / "cache", "DOC": tmp_path / "notes.md"}
    arguments = [places.get(one, one) for one in command]
    arguments += ("--set", "shape=demo") if by_set else ("--shape", "demo")
    threads = {count: ("--set", f"threads={count}") if by_set else ("--threads", count) for count in (0, 2)}
    succeed(*arguments, *threads[2], stdin="When?\n")
    assert torch.get_num_threads() == 2
    assert "at least 1" in invoke(*arguments, *threads[0]).stderr


def test_status_asks_the_usual_address_if_it_is_given_none(monkeypatch):
    asked = []

    def call(url, path, *_, **__):
        asked.append(url)
        raise running_server.ServerError("no")

    monkeypatch.setattr(running_server, "_call", call)
    assert invoke("status").exit_code == 1
    assert asked == ["http://127.0.0.1:8000"]


def test_a_server_that_is_not_there_says_how_to_start_one():
    assert "start one with `chunkweave serve --model smollm2`" in refusal("status", "http://127.0.0.1:9", code=1)


ROOT = Path(__file__).resolve().parents[2]
