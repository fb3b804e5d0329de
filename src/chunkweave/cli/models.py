"""`chunkweave models`: which families of models can be woven."""

from dataclasses import asdict

from rich.table import Table

from chunkweave.cli.console import Json, Output, status
from chunkweave.models.anatomy import families


def models(json: Json = False) -> None:
    """List the families of models that can be woven, and those that cannot, with the reason.

    A family is the `model_type` in a checkpoint's config.json. One that is not listed is tried if its layers are
    Llama's, and compared with its own forward before it is used.
    """
    with status("comparing layers"):
        found = families()
    output = Output(json)
    table = Table("family", "state", "its layers")
    for family in found:
        table.add_row(family.model_type, "woven" if family.woven else "refused", family.why or "as Llama's")
    output.show(table)
    output.finish({"families": [asdict(family) for family in found]})
