"""What a new user types first: `-h`, `python -m chunkweave`, `--threads`, `status` without a URL."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chunkweave
from chunkweave.cli import running_server
from tests.integration.command_line import invoke

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


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "chunkweave", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"chunkweave {chunkweave.__version__}\n"), done.stderr


@pytest.mark.parametrize("command", ["demo", "serve", "calibrate"])
def test_threads_are_an_option_of_what_computes(command):
    assert "--threads" in invoke(*command.split(), "--help").output


@pytest.mark.parametrize(
    "command",
    [
        ("ask", "--max-new-tokens", 2, "Why?"),
        ("chat", "--max-new-tokens", 2),
        ("cache", "warm", "CACHE", "--docs", "DOC"),
        ("bench", "fidelity", "--questions", 1, "--chunks", 3, "--chunk-tokens", 16, "--new-tokens", 1),
    ],
)
def test_threads_are_what_torch_computes_with(command, tmp_path):
    (tmp_path / "notes.md").write_text("The ferry leaves at nine. " * 20, encoding="utf-8")
    places = {"CACHE": tmp_path / "cache", "DOC": tmp_path / "notes.md"}
    arguments = [places.get(one, one) for one in command]
    done = invoke(*arguments, "--shape", "demo", "--threads", 2, stdin="When?\n")
    assert done.exit_code == 0, done.output
    assert torch.get_num_threads() == 2
    assert "at least 1" in invoke(*arguments, "--shape", "demo", "--threads", 0).stderr


def test_status_asks_the_usual_address_if_it_is_given_none(monkeypatch):
    asked = []

    def call(url, path, *_, **__):
        asked.append(url)
        raise running_server.ServerError("no")

    monkeypatch.setattr(running_server, "_call", call)
    assert invoke("status").exit_code == 1
    assert asked == ["http://127.0.0.1:8000"]


def test_a_server_that_is_not_there_says_how_to_start_one():
    refused = invoke("status", "http://127.0.0.1:9")
    assert refused.exit_code == 1
    assert "start one with `chunkweave serve --model smollm2`" in refused.stderr


ROOT = Path(__file__).resolve().parents[2]


def test_no_example_names_the_model_that_reads_only_its_own_worlds():
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*_client.py"), *(ROOT / "deploy").rglob("*")]
    named = re.compile(r"""--model reader|"--model", "reader"|Engine\.load\("reader"|serve reader|:-reader""")
    text = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    assert len(text) > 15
    assert [file.name for file, content in text.items() if named.search(content)] == []
