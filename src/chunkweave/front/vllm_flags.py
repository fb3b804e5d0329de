"""vLLM's own flags: what the front reads of them, what it refuses, and the command lines they become."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from chunkweave.errors import UsageError

BUNDLED_READER = "reader"
CONNECTOR = "ChunkweaveConnector"
SERVER = "vllm.entrypoints.openai.api_server"

_REFUSED = {
    "--api-key": "give keys to the front: --keys-file or CHUNKWEAVE_API_KEYS",
    "--kv-transfer-config": "the front sets it; give the connector's keys by --connector KEY=VALUE",
    "--uds": "vLLM listens on loopback, the front on --host and --port",
    "--ssl-keyfile": "put a proxy that speaks TLS before the front",
    "--ssl-certfile": "put a proxy that speaks TLS before the front",
    "--root-path": "put a proxy before the front",
    "--headless": "the front needs vLLM's API server",
    "--grpc": "the front needs vLLM's API server",
    "--model": "give the model first: chunkweave vllm-serve MODEL",
}


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """A model and the flags that go to vLLM as they are.

    Raises:
        UsageError: a flag that the front has to set itself.
    """

    model: str
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag in self.flags:
            name = flag.partition("=")[0].replace("_", "-")
            if flag.startswith("-") and name in _REFUSED:
                raise UsageError(f"{name} cannot be given to vLLM here: {_REFUSED[name]}")
        if self.flags and not self.flags[0].startswith("-"):
            raise UsageError(f"{self.flags[0]!r} is no flag of vLLM: give the model first, then flags")

    def value(self, *names: str) -> str | None:
        """The value that a flag has, by any of its names, the last one given counting; None if it is not given."""
        found: str | None = None
        for place, flag in enumerate(self.flags):
            name, equals, value = flag.partition("=")
            if name.replace("_", "-") not in names:
                continue
            found = value if equals else self.flags[place + 1] if place + 1 < len(self.flags) else None
        return found

    def given(self, *names: str) -> bool:
        """Whether a flag is given, with a value or without."""
        return any(flag.partition("=")[0].replace("_", "-") in names for flag in self.flags)

    @property
    def source(self) -> str:
        """The folder or hub name that vLLM loads: of the bundled model its folder."""
        if self.model == BUNDLED_READER and not Path(self.model).exists():
            return str(Path(str(files("chunkweave") / "assets" / "reader")))
        return self.model

    @property
    def name(self) -> str:
        """What clients call the model; never a path."""
        served = self.value("--served-model-name")
        if served is not None:
            return served
        return Path(self.source).name if Path(self.source).is_dir() else self.model

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.value("--tokenizer") or self.source

    def command(self, port: int, connector: Mapping[str, Any]) -> Sequence[str]:
        """The command line of one server on loopback; `connector` is the extra config of the connector.

        `python -m`: the `vllm` command of the CPU wheel fails.
        """
        transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": dict(connector)}
        command = [sys.executable, "-m", SERVER, "--model", self.source, *self.flags]
        command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
        if not self.given("--served-model-name"):
            command += ["--served-model-name", self.name]
        if not self.given("--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"):
            command += ["--enable-prompt-tokens-details"]
        return command
