"""LoRA adapters in PEFT's format: find, read, and merge them into the weights of a loaded model.

The package `peft` is not needed. Importing this module loads neither torch nor transformers.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from chunkweave.errors import ModelNotFoundError, UnsupportedModelError
from chunkweave.models.fingerprint import fingerprint_adapter

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_Number = TypeVar("_Number", int, float)

_ALL_LINEAR = "all-linear"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_REFUSED = {
    "use_dora": "DoRA scales whole rows of the weights",
    "modules_to_save": "it replaces whole modules",
    "fan_in_fan_out": "it is for transposed weights",
    "lora_bias": "it changes biases",
    "target_parameters": "it changes parameters that are no linear layers",
    "trainable_token_indices": "it changes embeddings",
    "layer_replication": "it changes the number of layers",
    "alora_invocation_tokens": "it is active from certain tokens on, and merged weights always are",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations for training that leave the base weights unchanged."""
_READ = {
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "init_lora_weights",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
}
_IDLE = {
    "peft_type",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "megatron_config",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "ensure_weight_tying",
}
"""Configuration fields without effect on merged weights."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The fields of PEFT's `LoraConfig` that affect merged weights.

    `targets` and `excluded` are a regular expression, or suffixes of module names. `layers` are the adapted layers
    (empty: all), whose number follows a name in `layer_names` (empty: any).
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    layer_names: tuple[str, ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _of_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on a module's product B A."""
        rank = self.rank_of(module)
        return _of_pattern(self.alphas, module, self.alpha) / (sqrt(rank) if self.rank_stabilized else rank)

    @property
    def highest_rank(self) -> int:
        """The highest rank of any module."""
        return max(self.rank, *(rank for _, rank in self.ranks)) if self.ranks else self.rank

    def adapts(self, module: str) -> bool:
        """Whether a linear module, by its name in the model, is adapted."""
        if _names(self.excluded, module):
            return False
        if self.targets == _ALL_LINEAR:
            return module.rpartition(".")[2] != "lm_head"
        if not _names(self.targets, module):
            return False
        return not self.layers or self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layer_names or (r"[^.]*",):
            if (match := re.match(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module)) is not None:
                return int(match["layer"])
        return None


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's folder and settings, without weights. `key` identifies its effect on a model."""

    name: str
    folder: Path
    settings: LoraSettings
    base: str
    """The base model named in its configuration; may be empty."""
    key: str


def adapter_folder(adapter: str | Path) -> Path:
    """The folder of an adapter: an existing folder, or else a bundled adapter of that name.

    Raises:
        ModelNotFoundError: neither exists.
    """
    path = Path(adapter)
    if path.is_dir():
        return path
    bundled = bundled_adapters()
    if str(adapter) in bundled:
        return bundled[str(adapter)]
    known = f"; bundled are: {', '.join(bundled)}" if bundled else ""
    raise ModelNotFoundError(f"no adapter folder at {adapter}: give one in PEFT's format{known}")


def bundled_adapters() -> Mapping[str, Path]:
    """The adapters that come with the package, by name."""
    home = Path(str(files("chunkweave") / "assets" / "adapters"))
    return {path.parent.name: path.parent for path in sorted(home.glob(f"*/{CONFIG_FILE}"))}


def read_adapter(adapter: str | Path) -> Adapter:
    """Read and check an adapter's folder.

    Raises:
        ModelNotFoundError: the folder or a file in it is missing or unreadable.
        UnsupportedModelError: it is no LoRA adapter, or has a feature that cannot be merged.
    """
    folder = adapter_folder(adapter)
    config = _read_config(folder)
    settings = _settings_of(config, folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        pickled = folder / "adapter_model.bin"
        why = " (adapter_model.bin is a pickle, which is never loaded: save it as safetensors)"
        raise ModelNotFoundError(f"{folder} has no {WEIGHTS_FILE}{why if pickled.exists() else ''}")
    try:
        key = fingerprint_adapter(asdict(settings), weights)
    except OSError as error:
        raise ModelNotFoundError(f"{weights} cannot be read: {error.strerror or error}") from error
    return Adapter(folder.resolve().name, folder, settings, str(config.get("base_model_name_or_path") or ""), key)


def merge_adapter(model: Any, adapter: Adapter) -> None:
    """Add an adapter to the weights of a transformers model: W + scale * B A, in float32, rounded once.

    Mutates `model`. Holds one module's weight in float32 at a time.

    Raises:
        ModelNotFoundError: the weights file is damaged.
        UnsupportedModelError: the adapter does not fit the model; do not use the model afterwards.
    """
    import torch

    halves = _read_halves(adapter)
    modules = dict(_adaptable(model, adapter))
    if not modules:
        _does_not_fit(adapter, "none of its target_modules are linear layers of the model")
    if beside := sorted(halves.keys() - modules.keys()):
        linear = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules))
        _does_not_fit(adapter, f"it has weights of {beside[0]}, which is none of the layers adapted here ({linear})")
    if missing := sorted(modules.keys() - halves.keys()):
        _does_not_fit(adapter, f"its target_modules name {missing[0]}, of which its file has no weights")
    with torch.no_grad():
        for name, module in modules.items():
            module.weight.copy_(_merged(name, module.weight, halves[name], adapter))


def warn_of_other_base(adapter: Adapter, model: str) -> None:
    """Log a warning if an adapter names another base model than `model`; a partial name matches."""
    base, name = Path(adapter.base).name.lower(), model.lower()
    if base and base not in name and name not in base:
        logger.warning("the adapter %s names %s as its base model, not %s", adapter.name, adapter.base, model)


def _merged(name: str, weight: "torch.Tensor", halves: "dict[str, torch.Tensor]", adapter: Adapter) -> "torch.Tensor":
    """The new weight of one module, `[out, in]` in float32, from A `[rank, in]` and B `[out, rank]`."""
    import torch

    rank = adapter.settings.rank_of(name)
    wanted = {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}
    for half, shape in wanted.items():
        if half not in halves:
            _does_not_fit(adapter, f"its file has no lora_{half} of {name}")
        if tuple(halves[half].shape) != shape:
            _does_not_fit(adapter, f"lora_{half} of {name} is {list(halves[half].shape)}, not {list(shape)}")
    down, up = (halves[half].to(weight.device, torch.float32) for half in "AB")
    merged = weight.float().addmm_(up, down, alpha=adapter.settings.scale_of(name))
    if not bool(torch.isfinite(merged.to(weight.dtype)).all()):
        _does_not_fit(adapter, f"{name} would get weights that are not finite in {weight.dtype}")
    return merged


def _adaptable(model: Any, adapter: Adapter) -> Iterator[tuple[str, Any]]:
    """The linear modules that an adapter changes, by name."""
    from torch import nn

    embedding = model.get_input_embeddings().weight
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not adapter.settings.adapts(name):
            continue
        if module.weight is embedding:
            _does_not_fit(adapter, f"{name} is tied to the embeddings, which merging would change too")
        yield name, module


def _read_halves(adapter: Adapter) -> "dict[str, dict[str, torch.Tensor]]":
    """The matrices A and B of each module."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = adapter.folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or not tensor.is_floating_point():
            _does_not_fit(adapter, f"its file has {key} ({tensor.dtype}), which is no matrix of a linear layer's LoRA")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    return halves


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} has no {CONFIG_FILE}: it is no adapter in PEFT's format")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(f"{path} cannot be read: it is no JSON object")
    return config


def _settings_of(config: Mapping[str, Any], folder: Path) -> LoraSettings:
    """Parse a configuration; every field with an effect must be known here.

    Raises:
        ModelNotFoundError: a value of a wrong type.
        UnsupportedModelError: a feature that cannot be merged.
    """
    if config.get("peft_type") != "LORA":
        _refuse(folder, f"it is of the type {config.get('peft_type')}; only LORA is supported")
    for name, why in _REFUSED.items():
        if config.get(name):
            _refuse(folder, f"{name} is not supported: {why}")
    if config.get("bias", "none") != "none":
        _refuse(folder, f"bias={config['bias']} is not supported: only weights are adapted")
    started = config.get("init_lora_weights", True)
    if started not in _PLAIN_STARTS:
        _refuse(folder, f"init_lora_weights={started} is not supported: it changes the base weights as well")
    for name, value in config.items():
        if value and name not in _READ | _IDLE:
            _refuse(folder, f"{name} is not supported: its effect on the weights is unknown")
    if config.get("layers_to_transform") is not None and isinstance(config.get("target_modules"), str):
        _refuse(folder, "layers_to_transform is for lists of target_modules, not for a regular expression")
    try:
        return LoraSettings(
            rank=_positive(config["r"]),
            alpha=float(config.get("lora_alpha", 8)),
            rank_stabilized=bool(config.get("use_rslora", False)),
            targets=_pattern_or_names(config["target_modules"]),
            excluded=_pattern_or_names(config.get("exclude_modules") or ()),
            layers=_listed(config.get("layers_to_transform"), int),
            layer_names=_listed(config.get("layers_pattern") or None, str),
            ranks=tuple((key, _positive(value)) for key, value in (config.get("rank_pattern") or {}).items()),
            alphas=tuple((key, float(value)) for key, value in (config.get("alpha_pattern") or {}).items()),
        )
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        why = f"{type(error).__name__}: {error}"
        raise ModelNotFoundError(f"{folder / CONFIG_FILE} cannot be used ({why})") from error


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no rank")
    return value


def _pattern_or_names(value: Any) -> str | tuple[str, ...]:
    """A regular expression, or suffixes of names, sorted."""
    if isinstance(value, str):
        re.compile(value)
        return value
    return tuple(sorted(map(str, value)))


def _listed(value: Any, kind: type[Any]) -> tuple[Any, ...]:
    return () if value is None else tuple(map(kind, value)) if isinstance(value, list) else (kind(value),)


def _names(pattern: str | tuple[str, ...], module: str) -> bool:
    if isinstance(pattern, str):
        return re.fullmatch(pattern, module) is not None
    return any(module == end or module.endswith(f".{end}") for end in pattern)


def _of_pattern(patterns: tuple[tuple[str, _Number], ...], module: str, usual: _Number) -> _Number:
    """The value of the first pattern that matches the end of a module's name, else `usual`."""
    fits = (value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    return next(fits, usual)


def _does_not_fit(adapter: Adapter, why: str) -> NoReturn:
    raise UnsupportedModelError(f"the adapter {adapter.name} does not fit the model: {why}")


def _refuse(folder: Path, why: str) -> NoReturn:
    raise UnsupportedModelError(f"the adapter in {folder} cannot be used: {why}")
