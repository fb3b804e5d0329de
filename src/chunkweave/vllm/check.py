"""Whether the plug-in weaves a checkpoint with some flags of vLLM's, without loading its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.utils.argparse_utils import FlexibleArgumentParser

from chunkweave.errors import UsageError
from chunkweave.models.gguf import checkpoint_folder
from chunkweave.vllm.contract import broken_contract
from chunkweave.vllm.model_check import config_problems
from chunkweave.vllm.releases import untested_release, vllm_version


@dataclass(frozen=True, slots=True)
class Checked:
    """What the plug-in says of a model in this vLLM before it sees its layers.

    `architecture` is vLLM's class, `vllm` its version, `tested` whether that release was tested. The model is woven if
    there are no `reasons` against it; a worker decides it by its trial at start-up. The flags in `not_read` are not of
    vLLM's engine: those of its server, or wrong ones.
    """

    model: str
    architecture: str
    vllm: str
    tested: bool
    woven: bool
    reasons: tuple[str, ...]
    not_read: tuple[str, ...]


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM has no types
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"vLLM does not take these flags: {message}")


def check(model: str, flags: Sequence[str]) -> Checked:
    """Read the configuration that vLLM would make of a model and its flags.

    Raises:
        UsageError: vLLM refuses them.
    """
    folder = checkpoint_folder(model)
    source = model if folder == Path(model) else str(folder)
    try:
        parser = AsyncEngineArgs.add_cli_args(_Parser())
        args, other_arguments = parser.parse_known_args(["--model", source, *flags])
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        architecture, _ = get_model_architecture(config.model_config)
    except (ValueError, OSError, NotImplementedError, AssertionError) as error:
        raise UsageError(f"vLLM refuses this model or these flags: {error}") from error
    untested = untested_release()
    broken = None if untested is None else broken_contract()
    if broken is not None:
        reasons = [f"this release of vLLM was not tested, and the plug-in does not work with it ({broken})"]
    else:
        reasons = list(config_problems(architecture.__name__, config))
    return Checked(
        model=model,
        architecture=architecture.__name__,
        vllm=vllm_version(),
        tested=untested is None,
        woven=not reasons,
        reasons=tuple(reasons),
        not_read=tuple(other_arguments),
    )
