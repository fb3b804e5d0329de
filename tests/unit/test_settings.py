"""One table of settings: constructors, commands, servers, connector, requests and docs say the same of each."""

from collections.abc import Iterator
from itertools import product
from math import nan
from typing import Any

import click
import pytest
import typer
from settings_page import PAGE, settings_table

from chunkweave.cli.app import app
from chunkweave.cli.ask import AnswerSettings
from chunkweave.cli.options import SplitSettings
from chunkweave.config import Backend, StoreConfig
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.settings import SERVERS, Place, Unit, settings_of
from chunkweave_server.requests import ReuseField
from chunkweave_server.settings import GROUPS, resolve, server_settings

ALL = {name: (kind, one) for kind in GROUPS.values() for name, one in settings_of(kind).items()}

BLOCKS = (AnswerSettings, SplitSettings)
"""Groups that only commands have."""

OTHER_MEANING = {
    *product(("study", "bench ttft", "bench fidelity", "calibrate"), ("recompute-ratio", "alpha")),
    *product(("ingest", "bench ttft", "bench fidelity", "calibrate", "study"), ("chunk-tokens", "overlap-tokens")),
    *product(("server warm", "server clear"), ("corpus",)),
    *product(("study", "ingest"), ("strict",)),
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


def test_every_name_is_declared_once_and_says_its_unit():
    assert len(ALL) == sum(len(settings_of(kind)) for kind in GROUPS.values())
    for name, (_, one) in ALL.items():
        assert one.meaning.endswith((".", "...")), name
        assert one.places, name
        for suffix, unit in (("_bytes", Unit.BYTES), ("_s", Unit.SECONDS)):
            assert one.attribute.endswith(suffix) == (one.unit is unit), name


@pytest.mark.parametrize(
    "values",
    [{"host_budget_bytes": "2GiB"}, {"cache_dir": "folder"}, {"max_variants": True}, {"ttl_s": 0}, {"ttl_s": nan}],
)
def test_constructors_take_fields_of_their_type_and_range(values: dict[str, Any]):
    with pytest.raises(UsageError, match=next(iter(values))):
        StoreConfig(**values)


def test_an_unknown_name_is_no_argument():
    kind, _ = ALL["policy"]
    with pytest.raises(TypeError, match="colour"):
        kind(colour="red")


def test_there_are_few_settings():
    assert len(ALL) <= 65


@pytest.mark.parametrize(("command", "most"), [("ask", 15), ("chat", 15), ("serve", 40), ("vllm-serve", 40)])
def test_the_help_begins_with_an_example_and_lists_what_most_need(command: str, most: int):
    flags = [name for name, _ in options(COMMANDS[command])]
    assert "set" in flags
    assert len(flags) + 1 <= most, "with --help"
    assert not any(option.hidden for _, option in options(COMMANDS[command]))
    assert COMMANDS[command].help.startswith(f"Example: chunkweave {command}")


@pytest.mark.parametrize("command", ["ask", "serve", "vllm-serve", "config show"])
def test_every_setting_of_a_command_has_a_flag_or_can_be_set(command: str):
    settings = COMMANDS[command].callback.settings
    place = {"ask": Place.COMMANDS, "vllm-serve": Place.VLLM}.get(command)
    taken = {name for name, (_, one) in ALL.items() if (place in one.places if place else SERVERS & one.places)}
    without = {"ask": {"deduplicate"}, "vllm-serve": {"model", "backend"}}.get(command, set())
    assert taken - without <= settings.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_options_say_what_their_setting_says(command: str):
    settings = getattr(COMMANDS[command].callback, "settings", {})
    declared = {name for kind in (*GROUPS.values(), *BLOCKS) for name in settings_of(kind)}
    for flag, option in options(COMMANDS[command]):
        one = settings.get(flag.replace("-", "_"))
        if one is None or (command, flag) in OTHER_MEANING:
            assert flag.replace("-", "_") not in declared or (command, flag) in OTHER_MEANING, f"{command} --{flag}"
            continue
        assert option.help == one.meaning
        assert option.default is None, "what is not given is for the other sources to say"
        assert option.show_default == (one.text(one.default) if one.default not in (None, "", False, ()) else False)


@pytest.mark.parametrize("name", ["method", "policy", "ordering"])
def test_a_plugin_that_there_is_not_is_refused_before_a_server_starts(name: str):
    for backend in Backend:
        with pytest.raises(UnknownMethodError, match="'biggest'; there are: "):
            resolve({name: "biggest"}, {}, backend=backend)


@pytest.mark.parametrize("backend", list(Backend))
def test_without_any_source_a_server_has_the_declared_defaults(backend: Backend):
    settings = resolve({}, {}, backend=backend).settings
    for group, kind in GROUPS.items():
        for name, one in settings_of(kind).items():
            if name not in server_settings(backend):
                assert not {Place(backend)} & one.places
            elif name != "backend":
                assert getattr(getattr(settings, group), one.attribute) == one.default, name


def test_settings_of_the_other_backend_are_refused_unless_vllm_has_them_too():
    with pytest.raises(UsageError, match="kv_tokens"):
        resolve({"kv_tokens": 64}, {}, backend=Backend.VLLM)
    with pytest.raises(UsageError, match="replicas"):
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
