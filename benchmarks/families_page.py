"""The table of model families in docs/results/tables-families.md, from the code (`results_check.py --update`)."""

from typing import Any

from docs_tables import markdown_table

from chunkweave.models.anatomy import families


def tables(_: dict[str, Any]) -> dict[str, str]:
    """Each family, and what its layers have otherwise than Llama's or why it is refused."""
    rows = [[f"`{one.model_type}`", "woven" if one.woven else "refused", one.why or "as Llama's"] for one in families()]
    return {"families": markdown_table(["family", "", "its layers"], rows)}
