"""Methods from outside answer requests that name them, on both backends; what only benchmarks know does not."""

from pathlib import Path

import pytest

from chunkweave import plugins
from chunkweave.plugins import METHODS
from tests.outside import FILE, install_our_weaving
from tests.server.conftest import Client, report_of
from tests.server.fronts import Front
from tests.server.processes import ServerProcess
from tests.server.test_refusals import ask, error_of

FERRY = "The ferry leaves at seven, at noon and at six, and on Sundays at nine."
CHOIR = "The choir sings on Sundays."


def woven(client: Client, **reuse) -> dict:
    """The report of a request whose chunks were asked for before, in another order."""
    client.ask(documents=[CHOIR, FERRY], chunkweave=reuse)
    return report_of(client.ask(documents=[FERRY, CHOIR], chunkweave=reuse))


@pytest.fixture
def method_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plugins, "_FILES", {})
    file = tmp_path / "chunk_ends.py"
    file.write_text(FILE)
    return str(file)


def test_a_request_names_the_method_of_a_file(serve, method_file):
    client = serve(method_file=(method_file,))
    report = woven(client, method="chunk-ends:ratio=0.5")
    assert (report["method"], report["why"]) == ("chunk-ends", "asked for")
    assert report["parameters"] == {"recompute_ratio": 0.5}


def test_the_page_offers_the_method_of_a_file_with_its_first_line(serve, method_file):
    client = serve(method_file=(method_file,))
    (found,) = [one for one in client.get("/v1/server").json()["methods"] if one["name"] == "chunk-ends"]
    assert found["about"].startswith("The last `ceil(recompute_ratio * tokens)` tokens of every reused chunk"), found
    assert found["parameters"] == ["recompute_ratio"]


def test_a_method_of_a_file_declares_what_it_takes_and_short_names_of_values(serve, tmp_path, method_file):
    more = (
        'budget = RATIO_BUDGET\n    parameters = ("check_layers",)\n    settings = {"most": {"recompute_ratio": 0.9}}'
    )
    file = tmp_path / "ends_of_chunks.py"
    file.write_text(FILE.replace("budget = RATIO_BUDGET", more).replace("chunk-ends", "ends-of-chunks"))
    client = serve(method_file=(method_file, str(file)))
    report = woven(client, method="ends-of-chunks:most:layers=2")
    assert (report["method"], report["parameters"]) == (
        "ends-of-chunks",
        {"recompute_ratio": 0.9, "check_layers": [2]},
    )
    refused = {
        "unknown setting 'most' of chunk-ends; there are: ratio=VALUE": "chunk-ends:most",
        "'ends-of-chunks:most:ratio=0.5' sets twice what 'ratio=0.5' sets": "ends-of-chunks:most:ratio=0.5",
    }
    for message, method in refused.items():
        error = error_of(ask(client, documents=[FERRY], chunkweave={"method": method}))
        assert message in error["message"]


@pytest.mark.backend("engine")
def test_what_the_method_of_a_file_says_is_recomputed(serve, method_file):
    client = serve(method_file=(method_file,))
    assert "chunk-ends" in client.get("/openapi.json").text
    assert woven(client, method="chunk-ends:ratio=0.5")["recomputed_tokens"] > 0
    assert woven(client, method="chunk-ends:ratio=0.0")["recomputed_tokens"] == 0


def test_a_method_that_lacks_a_budget_is_refused_and_the_server_goes_on_answering(serve, tmp_path, method_file):
    file = tmp_path / "without_budget.py"
    file.write_text(FILE.replace("budget = RATIO_BUDGET", "").replace("chunk-ends", "without-budget"))
    client = serve(method_file=(str(file),))
    error = error_of(ask(client, documents=[FERRY], chunkweave={"method": "without-budget"}))
    assert "the reuse method 'without-budget' has no `budget`" in error["message"]
    assert client.ask(documents=[FERRY]).status_code == 200
    assert client.get("/").status_code == 200


@pytest.mark.backend("vllm")
def test_vllms_connector_is_given_the_file(serve, method_file):
    settings = serve(method_file=(method_file,), method="chunk-ends").service.settings
    assert settings.connector_config() == {"method_file": [method_file], "method": "chunk-ends"}


def test_no_request_names_a_file(client: Client, method_file: str):
    message = error_of(ask(client, chunkweave={"method_file": [method_file]}))["message"]
    assert "method_file" in message
    assert "chunk-ends" not in METHODS.names
    message = error_of(ask(client, chunkweave={"method": method_file}))["message"]
    assert f"unknown reuse method {method_file!r}; there are: {METHODS.listed}" in message


@pytest.mark.slow
def test_a_package_outside_answers_over_http_by_name(tmp_path: Path):
    """With our engine, in a process that has the package as an installer puts it there."""
    folder = install_our_weaving(tmp_path)
    flags = ("--model", "reader", "--policy", "largest-first", "--ordering", "shortest-first", "--order", "free")
    with ServerProcess(*flags, packages=(folder,)) as server:
        reuse = {"method": "chunk-ends:ratio=0.5"}
        orders = ([CHOIR, FERRY], [FERRY, CHOIR])
        with Front(base_url=server.url, timeout=60) as client:
            reports = [report_of(client.ask(documents=documents, chunkweave=reuse)) for documents in orders]
        assert [report["method"] for report in reports] == ["chunk-ends"] * 2
        assert [report["order"] for report in reports] == ["shortest-first"] * 2
        ranks = [[chunk["rank"] for chunk in one["chunks"] if chunk["rank"] is not None] for one in reports]
        assert ranks == [[0, 1], [1, 0]], "the shorter one first"
