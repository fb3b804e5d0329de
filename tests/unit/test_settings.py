"""One table of settings: constructors, commands, servers, connector, requests and docs say the same of each."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import click
import pytest
import typer
from settings_page import PAGE, settings_table

from chunkweave.cli.app import app
from chunkweave.config import Backend
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.settings import SERVERS, Place, Setting, Unit, settings_of
from chunkweave_server.requests import ReuseField
from chunkweave_server.settings import GROUPS, resolve, server_settings

ALL = {name: (kind, one) for kind in GROUPS.values() for name, one in settings_of(kind).items()}

_OUTPUT = {"json", "out"}
_DOCUMENTS = {"docs", "chunk-tokens", "overlap-tokens", "strict"}
_ANSWERS = {"corpus", "top-k", "max-new-tokens", "temperature", "system"}
NO_SETTINGS = {
    "ask": {*_OUTPUT, *_DOCUMENTS, *_ANSWERS, "precompute", "explain"},
    "chat": {*_OUTPUT, *_DOCUMENTS, *_ANSWERS},
    "demo": _OUTPUT,
    "cache warm": {*_OUTPUT, *_DOCUMENTS},
    "serve": {"config"},
    "vllm-serve": {"config"},
    "config show": {*_OUTPUT, "config"},
}
"""Commands whose every option is a setting, or one of these."""

OTHER_MEANING = {
    *product(("study", "bench ttft", "bench fidelity", "calibrate"), ("recompute-ratio", "alpha")),
    ("calibrate", "cache-dir"),
    *product(("simulate",), ("cost-model", "policy", "device-budget", "shape", "replicas")),
    *product(("ask", "chat", "ingest"), ("corpus",)),
}
"""Options called as a setting is that are none of it: what is compared, what is simulated, the corpus that is asked."""


def commands(group: Any = None, before: str = "") -> Iterator[tuple[str, click.Command]]:
    group = group or typer.main.get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


COMMANDS = dict(commands())


def options(command: click.Command) -> Iterator[tuple[str, Any]]:
    """Options, by name; of all settings, also those that the help does not list."""
    for parameter in command.params:
        if isinstance(parameter, typer.core.TyperOption):
            yield parameter.opts[0].removeprefix("--"), parameter


def flag(one: Setting) -> str:
    return one.name.replace("_", "-")


def value_of(one: Setting) -> Any:
    """A value that it may have."""
    return next(value for value in (one.default, 1) if value is not None)


def test_every_name_is_declared_once_and_says_its_unit():
    assert len(ALL) == sum(len(settings_of(kind)) for kind in GROUPS.values())
    for name, (_, one) in ALL.items():
        assert one.meaning.endswith((".", "...")), name
        assert one.places, name
        for suffix, unit in (("_bytes", Unit.BYTES), ("_s", Unit.SECONDS)):
            assert one.attribute.endswith(suffix) == (one.unit is unit), name


@pytest.mark.parametrize("name", [name for name, (_, one) in ALL.items() if one.unit is not None])
def test_constructors_take_text_and_the_name_without_unit(name: str):
    kind, one = ALL[name]
    value = value_of(one)
    text = one.unit.shown(value) if one.unit is not None else ""
    assert kind(**{one.attribute: text}) == kind(**{name: value}) == kind(**{one.attribute: value})
    with pytest.raises(UsageError, match="not a valid"):
        kind(**{name: "much"})


def test_an_unknown_name_is_no_argument():
    kind, _ = ALL["policy"]
    with pytest.raises(TypeError, match="colour"):
        kind(colour="red")


@pytest.mark.parametrize(("command", "most"), [("ask", 20), ("serve", 60), ("vllm-serve", 60)])
def test_the_help_lists_the_options_that_most_need(command: str, most: int):
    listed = [one for one in COMMANDS[command].params if isinstance(one, typer.core.TyperOption) and not one.hidden]
    assert len(listed) + 1 <= most, "with --help"
    assert "Every setting of docs/settings.md is an option" in COMMANDS[command].help


def test_every_setting_of_the_commands_is_an_option_of_some():
    shown = {name for command in COMMANDS.values() for name, _ in options(command)}
    assert {flag(one) for _, one in ALL.values() if Place.COMMANDS in one.places} <= shown


@pytest.mark.parametrize("command", COMMANDS)
def test_options_say_what_their_setting_says(command: str):
    place = {"vllm-serve": Place.VLLM, "serve": Place.ENGINE, "config show": Place.ENGINE}.get(command, Place.COMMANDS)
    places = SERVERS if place is Place.ENGINE else {place}
    for name, option in options(COMMANDS[command]):
        _, one = ALL.get(name.replace("-", "_"), (None, None))
        if one is None or not places & one.places or (command, name) in OTHER_MEANING:
            assert command not in NO_SETTINGS or name in NO_SETTINGS[command], f"{command} --{name} is declared nowhere"
            continue
        assert option.help == one.meaning
        default = one.default_at(place)
        assert option.default is None, "what is not given is for the other sources to say"
        assert option.show_default == (one.text(default) if default not in (None, "", False, ()) else False)
        assert name not in NO_SETTINGS.get(command, {})


@pytest.mark.parametrize("name", ["method", "policy", "ordering"])
def test_a_plugin_that_there_is_not_is_refused_before_a_server_starts(name: str):
    for backend in Backend:
        with pytest.raises(UnknownMethodError, match="'biggest'; there are: "):
            resolve({name: "biggest"}, {}, backend=backend)


@pytest.mark.parametrize(("command", "backend"), [("serve", None), ("vllm-serve", Backend.VLLM)])
def test_servers_have_a_flag_for_each_of_their_settings(command: str, backend: Backend | None):
    without = {"model", "backend"} if command == "vllm-serve" else set()
    declared = {flag(one) for name, one in server_settings(backend).items() if name not in without}
    assert {name for name, _ in options(COMMANDS[command])} == declared | {"config"}


@pytest.mark.parametrize("backend", list(Backend))
def test_without_any_source_a_server_has_the_declared_defaults(backend: Backend):
    settings = resolve({}, {}, backend=backend).settings
    for group, kind in GROUPS.items():
        for name, one in settings_of(kind).items():
            if name not in server_settings(backend):
                assert not {backend.place} & one.places
            elif name != "backend" and getattr(settings, group) is not None:
                assert getattr(getattr(settings, group), one.attribute) == one.default_at(backend.place), name


def test_settings_of_the_other_backend_are_refused_unless_vllm_has_them_too():
    with pytest.raises(UsageError, match="--kv-tokens"):
        resolve({"kv_tokens": 64}, {}, backend=Backend.VLLM)
    with pytest.raises(UsageError, match="--replicas"):
        resolve({"replicas": 2}, {})
    settings = resolve({"max_num_seqs": 4, "backend": "vllm", "dtype": "bfloat16"}, {}).settings
    assert settings.vllm_flags == ("--max-num-seqs", "4", "--dtype", "bfloat16")


def test_the_connector_gets_what_is_not_as_it_is_there():
    given = {"host_budget": "16GiB", "policy": "pgdsf", "method": "cacheblend:layers=1+2", "ttl": "7d"}
    secret = {"remote_url": "redis://:password@cache:6379"}
    settings = resolve({**given, **secret}, {}, backend=Backend.VLLM).settings
    assert settings.connector_config() == given
    assert settings.connector_environment() == {"CHUNKWEAVE_REMOTE_URL": secret["remote_url"]}
    assert resolve({}, {}, backend=Backend.VLLM).settings.connector_config() == {}


def test_requests_say_what_may_be_said_by_requests():
    others = {
        "corpus": "what is asked about",
        "top_k": "how much of it",
        "cache": "whether anything is kept",
    }
    assert set(ReuseField.model_fields) - set(others) == {
        name for name, (_, one) in ALL.items() if Place.REQUEST in one.places
    }


def test_the_page_of_settings_is_that_table():
    assert settings_table() in PAGE.read_text(encoding="utf-8"), "write it anew: python benchmarks/settings_page.py"
