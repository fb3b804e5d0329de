"""Tables of model families and of what is woven inside vLLM, from the code (`results_check.py --update`)."""

import sys
from pathlib import Path
from typing import Any

from docs_tables import markdown_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.vllm.support import FLAGS, NOT_WOVEN, Verdict

from chunkweave.models.anatomy import families
from chunkweave.vllm.architectures import ARCHITECTURES, MULTIMODAL, RUN_BY_TRANSFORMERS
from chunkweave.vllm.releases import TESTED


def tables(_: dict[str, Any]) -> dict[str, str]:
    """Families of our own engine by what their layers have otherwise than Llama's; vLLM's classes and flags."""
    layers: dict[tuple[bool, str], list[str]] = {}
    for one in families():
        layers.setdefault((one.woven, one.why or "as Llama's"), []).append(f"`{one.model_type}`")
    rows = [[", ".join(named), "woven" if woven else "refused", why] for (woven, why), named in layers.items()]
    inside = {
        "releases": ", ".join(TESTED),
        "classes": _named(ARCHITECTURES),
        "families that vLLM runs by transformers": _named(RUN_BY_TRANSFORMERS),
        "text prompts of": _named(MULTIMODAL),
    }
    for verdict in Verdict:
        found = [one for one in FLAGS if one.verdict is verdict]
        inside[f"{verdict}, flags"] = "; ".join(f"{one.name} ({one.note})" if one.note else one.name for one in found)
    inside[f"{Verdict.REFUSED}, models"] = "; ".join(NOT_WOVEN)
    return {
        "families": markdown_table(["family", "", "its layers"], rows),
        "vllm-models": markdown_table(["woven", ""], [list(row) for row in inside.items()]),
    }


def _named(names: Any) -> str:
    return ", ".join(f"`{name.removesuffix('ForCausalLM').removesuffix('ForConditionalGeneration')}`" for name in names)
