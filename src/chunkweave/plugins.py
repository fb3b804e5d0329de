"""Plug-ins: each module of a package is one, named for its file (`full_reuse.py` is "full-reuse")."""

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType

from chunkweave.errors import UnknownMethodError


@cache
def plugin_names(package: ModuleType) -> tuple[str, ...]:
    """The names of a package's plug-ins, sorted. The folder is read once."""
    return tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(package.__path__)))


@cache
def plugin(package: ModuleType, name: str, kind: str) -> ModuleType:
    """The module of the plug-in of that name; only now it is imported.

    Raises:
        UnknownMethodError: there is none; the message says of what `kind`, and lists those there are.
    """
    names = plugin_names(package)
    if name not in names:
        raise UnknownMethodError(f"unknown {kind} {name!r}; there are: {', '.join(names)}")
    return import_module(f"{package.__name__}.{name.replace('-', '_')}")
