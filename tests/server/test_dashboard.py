"""Every panel of the Grafana board has data behind vLLM; integration/test_server_metrics.py has our own engine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from chunkweave.weaving.stores import open_store, store_counts
from chunkweave_server.settings import resolve
from tests.server.conftest import wait_until
from tests.server.fronts import DOCUMENTS, running_front

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "chunkweave.json"
ASKED = [
    {"documents": documents, "chunkweave": {"method": "cacheblend"}, "max_tokens": 4, "temperature": 0}
    for documents in (DOCUMENTS, DOCUMENTS[::-1])
]
AT_WORK = ("prompt_tokens_by_source_total", "cache_queries_total", "cache_hits_total", "store_bytes")
"""Metrics that must be above zero once chunks were reused."""


def targets() -> Iterator[tuple[str, list[str]]]:
    """Each query of the board by its panel, as alternatives, any of which is enough."""
    for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].split(" or ")


def assert_every_panel_has_data(text: str) -> None:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    without = []
    for title, alternatives in targets():
        names = [re.findall(r"(?:chunkweave|vllm):\w+", one) for one in alternatives]
        assert all(names)
        if not any(samples.keys() >= set(one) for one in names):
            without.append((title, alternatives))
    assert without == []
    for name in AT_WORK:
        assert samples[f"chunkweave:{name}"] > 0, name
    assert not [name for name in samples if name.endswith("_created")]


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, str]:
    """A store with every tier that a machine without a GPU can have."""
    return {"cache_dir": str(tmp_path / "cache"), "remote_url": f"file://{tmp_path / 'remote'}"}


def test_behind_vllm(stores, vllm, compared):
    settings = resolve({"model": "reader", **stores}, {}).settings
    store = open_store(settings.store, "0" * 32, torch.device("cpu"))
    counts = store_counts(store)
    store.close()
    counts["levels"]["host"]["bytes"] = 4096
    with running_front(vllm) as front:
        for rank in range(2):
            vllm.send_counts(f"vllm/{rank}", counts)
        vllm.send_counts("vllm/1", counts)  # later counts take the place of earlier ones
        for asked in ASKED:
            assert front.ask(**asked).status_code == 200
        wait_until(lambda: "store_bytes" in front.get("/metrics").text)
        text = front.get("/metrics").text
        assert_every_panel_has_data(text)
        assert 'chunkweave:store_bytes{model_name="m",tier="host"} 8192.0' in text
        assert 'chunkweave:tier_available{model_name="m",tier="disk"} 1.0' in text
