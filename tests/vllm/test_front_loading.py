"""Loading while requests queue, with a real vLLM server: by the costs that it finds in its cache folder."""

import threading
import time
from importlib.resources import files

import openai
from transformers import AutoConfig

from chunkweave.models.fingerprint import fingerprint_folder
from chunkweave.planning.cost import CostModel, cost_model_path
from chunkweave_server.vllm_backend.process import free_port
from tests.vllm.fronts import PASSAGES, ask, front_process

REUSE = {"method": "full-reuse", "order": "fixed"}


def make_disk_slow(cache_dir) -> None:
    """A cost model by which a token comes in from disk in five times the time that computing it takes."""
    reader = files("chunkweave") / "assets" / "reader"
    fingerprint = fingerprint_folder(reader, AutoConfig.from_pretrained(reader, local_files_only=True), "float32")
    CostModel((0,), (1,), ((0.01,),), 1000, {"disk": 2e4}, fingerprint).save(cost_model_path(cache_dir, fingerprint))


def last_source(answer) -> str:
    """Where the KV of the last document came from; what is before it is an exact prefix, which is always taken."""
    return answer.model_extra["chunkweave"]["chunks"][-1]["kv_source"]


def test_what_queues_reads_ahead_from_a_tier_that_is_slower_than_computing(tmp_path):
    """Cache-Craft §3.5: alone it is computed; after a queue what was read there counts as in memory."""
    options = ("--cache-dir", str(tmp_path / "kv"), "--method", "full-reuse", "--max-num-seqs", "1")
    passages = [*PASSAGES, f"{PASSAGES[0]} So it was told in May."]
    with front_process(tmp_path, free_port(), *options) as front:
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        for passage in passages:
            ask(client, [passage], reuse=REUSE)
    make_disk_slow(tmp_path / "kv")
    with front_process(tmp_path, free_port(), *options) as front:
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        assert last_source(ask(client, passages[:2], reuse=REUSE)) == "computed"
        busy = threading.Thread(target=lambda: ask(client, [], ignore_eos=True, max_tokens=800, reuse=REUSE))
        busy.start()
        time.sleep(0.5)
        answer = ask(client, passages[2:], reuse=REUSE)
        busy.join()
    assert last_source(answer) == "reused", answer.model_extra
