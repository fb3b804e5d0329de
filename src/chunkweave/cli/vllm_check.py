"""`chunkweave vllm-check`: whether a model is woven inside vLLM."""

import os
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.markup import escape

from chunkweave.cli.console import Json, Output, status
from chunkweave.cli.options import warn
from chunkweave.errors import UsageError, install_extra


def vllm_check(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file, hub name, `smollm2` or `reader`.")],
    json: Json = False,
) -> None:
    """Say whether MODEL is woven inside the installed vLLM, and if not, why. Flags not listed here are vLLM's.

    Loads no weights: at start-up each worker also compares weaving with vLLM's own forward. Exit code 1: not woven.
    """
    if find_spec("vllm") is None:
        raise UsageError(f"vLLM is not installed here: {install_extra('vllm')}")
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # read at its import
    with status("asking vLLM for the model's configuration"):
        from chunkweave.vllm.check import check

        checked = check(model, ctx.args)
    output = Output(json)
    untested = "" if checked.tested else ", a release that was not tested"
    verdict = "woven" if checked.woven else "not woven, served by vLLM alone"
    output.show(f"{checked.architecture} in vLLM {checked.vllm}{untested}: {verdict}")
    output.show(*(f"  {escape(reason)}" for reason in checked.reasons))
    if checked.not_read:
        warn(f"not flags of vLLM's engine, and not read: {' '.join(checked.not_read)}")
    output.finish(asdict(checked))
    if not checked.woven:
        raise typer.Exit(1)
