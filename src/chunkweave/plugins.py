"""Plug-ins by name: reuse methods, orderings and eviction policies.

Each kind has plug-ins of this package, of installed packages (entry points in the kind's groups), and of files that the
operator names: `chunk_ends.py` with a `METHOD` in it defines the method `chunk-ends`. All are looked up the same way,
so an external plug-in works wherever a bundled one does. A file is code that runs, so no request may name one.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from chunkweave.errors import UnknownMethodError, UsageError

_FILES: dict[str, ModuleType] = {}
"""Modules loaded by `load_plugin_files`, by the name of their plug-ins."""


@dataclass(frozen=True)
class Plugins:
    """The plug-ins of one kind.

    `kind` is its name in messages, `constant` its name in a file, `groups` its entry point groups. `bundled` maps names
    of this package's plug-ins to their location, written as in an entry point.
    """

    kind: str
    constant: str
    groups: tuple[str, ...]
    bundled: Mapping[str, str]

    @cached_property
    def _entries(self) -> tuple[EntryPoint, ...]:
        bundled = [EntryPoint(name, value, "") for name, value in self.bundled.items()]
        return (*bundled, *(entry for group in self.groups for entry in _installed().select(group=group)))

    @cached_property
    def _by_name(self) -> dict[str, EntryPoint]:
        by_name: dict[str, EntryPoint] = {}
        for entry in self._entries:
            if entry.name in by_name:
                raise UsageError(
                    f"two {self.kind}s are called {entry.name!r}: one of {_origin(by_name[entry.name])} and one of "
                    f"{_origin(entry)}; uninstall that package, or rename its entry point"
                )
            by_name[entry.name] = entry
        return by_name

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all plug-ins, sorted."""
        files = (name for name, module in _FILES.items() if hasattr(module, self.constant))
        return tuple(sorted({*(entry.name for entry in self._entries), *files}))

    @property
    def listed(self) -> str:
        """`names`, joined by commas."""
        return ", ".join(self.names)

    def get(self, name: str) -> Any:
        """The factory of the plug-in with this name; imports its module on first use.

        Raises:
            UnknownMethodError: no such plug-in; the message lists the known ones.
            UsageError: it cannot be imported, or two packages have one of the same name; the message names them.
        """
        if hasattr(_FILES.get(name), self.constant):
            return getattr(_FILES[name], self.constant)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> Any:
        entry = self._by_name.get(name)
        if entry is None:
            raise UnknownMethodError(f"unknown {self.kind} {name!r}; there are: {self.listed}")
        try:
            return entry.load()
        except Exception as error:
            raise UsageError(
                f"the {self.kind} {name!r} of {_origin(entry)} cannot be loaded from {entry.value}: {_said(error)}"
            ) from error


METHODS = Plugins(
    "reuse method",
    "METHOD",
    ("chunkweave.methods",),
    {
        "cacheblend": "chunkweave.planning.methods.cacheblend:CacheBlend",
        "cachecraft": "chunkweave.planning.methods.cachecraft:CacheCraft",
        "epic": "chunkweave.planning.methods.positional:Epic",
        "full": "chunkweave.planning.methods.positional:FullPrefill",
        "full-reuse": "chunkweave.planning.methods.positional:FullReuse",
        "prefix": "chunkweave.planning.methods.positional:ExactPrefix",
        "query": "chunkweave.planning.methods.query:QueryAware",
        "query-whole": "chunkweave.planning.methods.query:QueryWhole",
    },
)
ORDERINGS = Plugins(
    "ordering",
    "ORDERING",
    ("chunkweave.orderings",),
    {
        "frequency": "chunkweave.ordering.ordering:FrequencyOrder",
        "original": "chunkweave.ordering.ordering:OriginalOrder",
    },
)
POLICIES = Plugins(
    "eviction policy",
    "POLICY",
    ("chunkweave.policies",),
    {
        "fifo": "chunkweave.store.eviction:FIFOPolicy",
        "gdsf": "chunkweave.store.eviction:GDSFPolicy",
        "lfu": "chunkweave.store.eviction:LFUPolicy",
        "lru": "chunkweave.store.eviction:LRUPolicy",
        "pgdsf": "chunkweave.store.eviction:PGDSFPolicy",
        "reuse-frequency": "chunkweave.store.eviction:ReuseFrequencyPolicy",
    },
)


def load_plugin_files(paths: Iterable[str]) -> None:
    """Run files and add the plug-ins that they define. A file that is already loaded is skipped.

    Raises:
        UsageError: a file is missing, fails, defines no plug-in, or uses a name that is taken; the message names it.
    """
    for path in paths:
        file = Path(path).expanduser().resolve()
        name = file.stem.replace("_", "-")
        if name in _FILES and _FILES[name].__file__ == str(file):
            continue
        module = _run(file)
        kinds = (METHODS, ORDERINGS, POLICIES)
        brought = [kind for kind in kinds if hasattr(module, kind.constant)]
        if not brought:
            raise UsageError(f"{file} has no plug-in: it defines none of {', '.join(kind.constant for kind in kinds)}")
        if name in _FILES:
            raise UsageError(f"{file} and {_FILES[name].__file__} both define {name!r}: rename one of them")
        if taken := [kind.kind for kind in brought if name in kind.names]:
            raise UsageError(f"{file} defines {name!r}, but another {taken[0]} has that name: rename the file")
        _FILES[name] = module


def _run(file: Path) -> ModuleType:
    """The module that results from running a file."""
    spec = spec_from_file_location(f"chunkweave_file_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UsageError(f"{file} is not a Python file")
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise UsageError(f"{file} cannot be loaded: {_said(error)}") from error
    return module


@cache
def _installed() -> Any:
    """The entry points of all installed packages, read once for all kinds."""
    return entry_points()


def _origin(entry: EntryPoint) -> str:
    return "chunkweave itself" if entry.dist is None else f"the package {entry.dist.name}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
