"""chunkweave's own engine with a checkpoint of the tests, queried as the served ones are."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from chunkweave.models.fingerprint import fingerprint_folder
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.loading import LoadedModel, bundled_tokenizer
from chunkweave.planning.method_choice import MethodChooser, MethodRequest
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.vllm.request import Defaults, from_wire
from tests.integration.weaving import Bench, make_bench
from tests.vllm.checkpoints import BOS
from tests.vllm.prompts import Given, Scenario, at_ratio


@dataclass(frozen=True)
class OwnAnswer:
    """Log-probabilities `[vocab]` of the first new token, and what was computed again."""

    log_probs: torch.Tensor
    recomputed: list[int]
    recompute_fraction: float


@dataclass(frozen=True)
class OwnEngine:
    """Keeps what it computes, with what it attended to, as the engine does."""

    bench: Bench

    def prompt(self, given: Given) -> Prompt:
        params = {"chunks": given.spans}
        fingerprint = self.bench.loaded.fingerprint
        return from_wire(params, given.ids, fingerprint=fingerprint, salt="", start=(BOS,), defaults=Defaults()).prompt

    def precompute(self, scenario: Scenario) -> None:
        """What the scenario's chunks were computed in, one prompt after the other."""
        for first in scenario.first_prompts:
            self.bench.prefill(self.prompt(first), "prefix", keep=True)

    def records(self) -> dict[str, dict[str, Any]]:
        """What is stored, as the probe tells it of a worker."""
        return {
            record.id: {"exact": record.exact, "attention": record.attention and asdict(record.attention)}
            for record in self.bench.runner.store.records()
        }

    def prefill(self, given: Given, method: str, options: Mapping[str, Any], *, keep: bool = False) -> OwnAnswer:
        """Answer with a method and what a request to vLLM would say besides; the ratio as by `Given.ask`."""
        choice = MethodChooser().choose(MethodRequest(at_ratio(method, options.get("ratio"))))
        reuse = choice.reuse
        prefilled = self.bench.prefill(
            self.prompt(given),
            choice.method,
            ratio=reuse.recompute_ratio,
            keep=keep,
            alpha=reuse.alpha,
            focus=reuse.focus,
            query=reuse.query,
        )
        reused = prefilled.plan.tokens(KVSource.REUSED)
        work = prefilled.recompute_work / (self.bench.loaded.model.geometry.num_layers * reused) if reused else 0.0
        recomputed = [position for span in prefilled.recomputed for position in span.positions()]
        return OwnAnswer(torch.log_softmax(prefilled.logits, -1), recomputed, work)


def own_engine(folder: Path) -> OwnEngine:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    fingerprint = fingerprint_folder(folder, model.config, "float32")
    return OwnEngine(make_bench(LoadedModel(HuggingFaceModel(model.eval()), bundled_tokenizer(), fingerprint, "own")))
