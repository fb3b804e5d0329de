"""`chunkweave serve`: an OpenAI-compatible server on this engine."""

import logging
import os
from importlib.util import find_spec

from chunkweave.cli.console import stderr
from chunkweave.cli.settings_options import with_settings
from chunkweave.errors import UsageError
from chunkweave.server.settings import Settings
from chunkweave.server.settings_sources import KEYS_VARIABLE, Resolved

_NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")


@with_settings
def serve(*, resolved: Resolved[Settings]) -> None:
    """Serve answers over documents and corpora, as OpenAI's clients ask for them.

    Settings come from flags, else the environment (CHUNKWEAVE_<NAME>), else the file, else their defaults;
    `chunkweave config show` says which. Stop it with Ctrl-C or SIGTERM: answers that run get to end.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} is not installed: pip install 'chunkweave[server]'")
    settings = resolved.settings
    if settings.model.model is None and settings.model.shape is None:
        raise UsageError("which model? give --model FOLDER, or --model reader for the bundled one")
    from chunkweave.server.keys import read_keys
    from chunkweave.server.logs import LogForm, configure_logging
    from chunkweave.server.run import listening_socket, run
    from chunkweave.server.service import Service, Stage

    console = stderr()
    keys = read_keys(settings.listen.keys_file, os.environ.get(KEYS_VARIABLE, ""))
    os.environ.pop(KEYS_VARIABLE, None)
    service = Service(settings, keys)
    sock = listening_socket(settings.listen)
    host, port = sock.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def show(stage: Stage, seconds: float) -> None:
        console.print(f"{seconds:7.2f} s  {stage}" + (f": {where}/v1" if stage is Stage.READY else ""), soft_wrap=True)

    service.on_stage = show
    access = f"{len(keys)} API keys" if len(keys) else "no API keys: everybody who reaches it may use it"
    console.print(f"chunkweave serves [bold]{settings.model.name}[/bold] on {where}, {access}", soft_wrap=True)
    configure_logging(LogForm(settings.watch.log_form), settings.watch.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    run(service, sock)
    console.print("stopped")
