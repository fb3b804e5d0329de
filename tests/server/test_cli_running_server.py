"""`chunkweave status` and `chunkweave server` against a running server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.command_line import invoke
from tests.server.conftest import ADMIN_KEY, KEYS, key_ring, listening, toy_service


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(toy_service(keys=key_ring())) as server:
        yield server.url


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for name in ("ferry", "choir"):
        (tmp_path / f"{name}.txt").write_text(f"The {name} is there on Sundays. " * 5)
    return tmp_path


def told(*arguments: object) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def in_words(table: str) -> str:
    """A table without its lines."""
    return " ".join(re.findall(r"[\w.,]+", table))


def test_status_shows_what_the_key_may_see(url: str, monkeypatch):
    own = told("status", url, "--key", KEYS["acme"])
    assert (own["ready"], own["models"]) == (True, ["toy"])
    assert "tenant" in own["cache"]
    assert "store" not in own["cache"]
    monkeypatch.setenv("CHUNKWEAVE_API_KEY", ADMIN_KEY)
    assert "host" in told("status", f"{url}/v1")["cache"]["store"]["levels"]
    shown = invoke("status", url)
    assert shown.exit_code == 0
    assert {"ready", "toy", "host"} <= set(shown.output.split())


def test_status_shows_what_reuse_has_saved_for_all_tenants_to_an_admin(url: str):
    body = {"messages": [{"role": "user", "content": "When?"}], "documents": ["The ferry leaves at six."] * 2}
    for method in ("full", "full-reuse"):
        asked = {**body, "max_tokens": 2, "chunkweave": {"method": method}}
        headers = {"authorization": f"Bearer {KEYS['bolt']}"}
        httpx.post(f"{url}/v1/chat/completions", json=asked, headers=headers).raise_for_status()
    counts = told("status", url, "--key", KEYS["bolt"])["cache"]["tenant"]
    assert counts["requests"] == 2
    assert counts["tokens_not_computed"] > 0
    for key in (KEYS["bolt"], ADMIN_KEY):
        shown = in_words(invoke("status", url, "--key", key).output)
        assert re.search(r"time saved -?[0-9.]+ s", shown), shown
        assert f"tokens not computed {counts['tokens_not_computed']}" in shown
    assert "time saved not known yet" in in_words(invoke("status", url, "--key", KEYS["acme"]).output)


def test_a_cache_is_warmed_and_emptied(url: str, docs: Path, monkeypatch):
    monkeypatch.setenv("CHUNKWEAVE_API_KEY", KEYS["acme"])
    assert told("server", "warm", url, "--docs", docs) == {"chunks": 2, "computed": 2}
    assert told("server", "warm", url, "--docs", docs) == {"chunks": 2, "computed": 0}
    assert told("server", "clear", url, "--docs", docs)["segments_removed"] == 2
    assert "computed 2 of 2 chunks" in invoke("server", "warm", url, "--docs", docs).output


def test_what_is_refused_says_why(url: str, docs: Path):
    for arguments, code, said in (
        (("status", "127.0.0.1:8000"), 2, "is no URL"),
        (("status", "http://127.0.0.1:9"), 1, "no server answers"),
        (("server", "warm", url, "--docs", docs), 1, "needs an API key: set CHUNKWEAVE_API_KEY"),
        (("server", "clear", url, "--all", "--key", KEYS["acme"]), 1, "only an admin"),
        (("status", url), 1, "needs an API key: set CHUNKWEAVE_API_KEY, or give --key"),
        (("status", url, "--key", "not-a-key"), 1, "does not know this API key: set CHUNKWEAVE_API_KEY"),
        (("server", "clear", url), 2, "--docs or --corpus"),
        (("server", "warm", url, "--corpus", "none", "--key", KEYS["acme"]), 1, "(404)"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == code, result.output
        assert said in " ".join(result.output.split())
