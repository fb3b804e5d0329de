"""`chunkweave vllm-serve`: vLLM's own server, with documents, routes and a queue before it."""

import logging
import os
from importlib.util import find_spec
from typing import Annotated

import typer

from chunkweave.cli.console import stderr
from chunkweave.cli.settings_options import with_settings
from chunkweave.errors import UsageError
from chunkweave.front.settings import FrontSettings
from chunkweave.server.settings_sources import KEYS_VARIABLE, Resolved

_NEEDED_FOR_VLLM = ("fastapi", "uvicorn", "httpx", "prometheus_client")


def _vllm_serve(
    *,
    resolved: Resolved[FrontSettings],
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint folder, hub name, or `reader`, the bundled model.")],
) -> None:
    """Serve MODEL with vLLM, and documents, orders, conversations and routes before it.

    Every flag that is not listed here goes to vLLM as it is: chunkweave vllm-serve MODEL --max-model-len 8192.
    """
    settings = resolved.settings
    if missing := [name for name in _NEEDED_FOR_VLLM if find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} is not installed: pip install 'chunkweave[server,vllm]'")
    if not settings.fleet.upstream and find_spec("vllm") is None:
        raise UsageError("vLLM is not installed here: pip install 'chunkweave[vllm]', or give --upstream URL")
    from chunkweave.front.app import create_front
    from chunkweave.front.service import FrontService
    from chunkweave.front.vllm_flags import VllmFlags
    from chunkweave.server.keys import read_keys
    from chunkweave.server.logs import LogForm, configure_logging
    from chunkweave.server.run import listening_socket, run_app
    from chunkweave.server.service import Stage

    console = stderr()
    keys = read_keys(settings.listen.keys_file, os.environ.get(KEYS_VARIABLE, ""))
    os.environ.pop(KEYS_VARIABLE, None)
    flags = VllmFlags(model, tuple(ctx.args))
    service = FrontService(settings, flags, keys)
    sock = listening_socket(settings.listen)
    host, port = sock.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def show(stage: Stage, seconds: float) -> None:
        console.print(f"{seconds:7.2f} s  {stage}" + (f": {where}/v1" if stage is Stage.READY else ""), soft_wrap=True)

    service.on_stage = show
    access = f"{len(keys)} API keys" if len(keys) else "no API keys: everybody who reaches it may use it"
    console.print(f"chunkweave serves [bold]{flags.name}[/bold] with vLLM on {where}, {access}", soft_wrap=True)
    configure_logging(LogForm(settings.watch.log_form), settings.watch.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    run_app(service, create_front(service), settings.listen, sock)
    console.print("stopped")


vllm_serve = with_settings(_vllm_serve, FrontSettings)
