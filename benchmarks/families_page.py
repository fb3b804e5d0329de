"""Tables of model families and of what is woven inside vLLM, from the code (`results_check.py --update`)."""

import sys
from pathlib import Path
from typing import Any

from docs_tables import markdown_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.vllm.support import FLAGS, NOT_WOVEN

from chunkweave.models.anatomy import families
from chunkweave.vllm.architectures import ARCHITECTURES, MULTIMODAL, RUN_BY_TRANSFORMERS
from chunkweave.vllm.releases import TESTED


def tables(_: dict[str, Any]) -> dict[str, str]:
    """Each family of our own engine, with what its layers have otherwise than Llama's; vLLM's classes; its flags."""
    rows = [[f"`{one.model_type}`", "woven" if one.woven else "refused", one.why or "as Llama's"] for one in families()]
    classes = {
        "releases": ", ".join(TESTED),
        "classes": _named(ARCHITECTURES),
        "families that vLLM runs by transformers": _named(RUN_BY_TRANSFORMERS),
        "text prompts of": _named(MULTIMODAL),
        "**not woven**": "; ".join(NOT_WOVEN),
    }
    flags = [[one.name, str(one.verdict), one.note] for one in FLAGS]
    return {
        "families": markdown_table(["family", "", "its layers"], rows),
        "vllm-models": markdown_table(["woven", ""], [list(row) for row in classes.items()]),
        "vllm-flags": markdown_table(["flag of vLLM's", "", ""], flags),
    }


def _named(names: Any) -> str:
    return ", ".join(f"`{name.removesuffix('ForCausalLM').removesuffix('ForConditionalGeneration')}`" for name in names)
