"""Plug-ins: each module of a package is one, named for its file (`full_reuse.py` is "full-reuse").

A module whose name begins with `_` is none: what several plug-ins share may lie beside them.
"""

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from chunkweave.errors import UnknownMethodError, UsageError


@cache
def plugin_names(package: ModuleType) -> tuple[str, ...]:
    """The names of a package's plug-ins, sorted. The folder is read once."""
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name.replace("_", "-") for name in modules if not name.startswith("_")))


@cache
def plugin(package: ModuleType, name: str, kind: str, constant: str) -> Any:
    """What builds the plug-in of that name: the `constant` of its module, which is imported only now.

    Raises:
        UnknownMethodError: there is none; the message says of what `kind`, and lists those there are.
        UsageError: its module has no such constant.
    """
    names = plugin_names(package)
    if name not in names:
        raise UnknownMethodError(f"unknown {kind} {name!r}; there are: {', '.join(names)}")
    module = import_module(f"{package.__name__}.{name.replace('-', '_')}")
    if not hasattr(module, constant):
        raise UsageError(f"{module.__name__} has no {constant}: end it with `{constant} = <the class of the {kind}>`")
    return getattr(module, constant)
