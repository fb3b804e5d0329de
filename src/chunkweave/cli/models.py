"""`chunkweave models`: which families of models can be woven."""

from dataclasses import asdict

from rich.markup import escape

from chunkweave.cli.console import Json, Output, status, table_of
from chunkweave.models.anatomy import families


def models(json: Json = False) -> None:
    """List the families of models that can be woven, and those that cannot, with the reason.

    A family is the `model_type` in a checkpoint's config.json. A family that is not listed is tried if its layers are
    Llama's, and checked against the model's own forward before use.
    """
    with status("comparing layers"):
        listed = families()
    output = Output(json)
    table = table_of(
        listed,
        ("family", lambda family: family.model_type),
        ("state", lambda family: "woven" if family.woven else "refused"),
        ("its layers", lambda family: escape(family.why or "as Llama's")),
        left=3,
    )
    output.show(table)
    output.finish({"families": [asdict(family) for family in listed]})
