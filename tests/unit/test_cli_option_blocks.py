"""Options that come in blocks: what Typer sees of a command, and what the command gets."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from chunkweave.cli.options import given_settings, how_to_set, with_blocks
from chunkweave.config import FindConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.planning.calibration import Quality
from chunkweave.plugins import METHODS, ORDERINGS, POLICIES
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.settings import Place, settings_at
from tests.integration.command_line import invoke
from tests.unit.test_settings import COMMANDS


@dataclass(frozen=True, slots=True)
class Colours:
    """How it is painted. With paint."""

    front: Annotated[str, typer.Option(help="The front.")]
    back: Annotated[str, typer.Option("--behind", help="The back.")] = "white"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is of it, and where."""

    width: Annotated[int, typer.Option(min=1)] = 3


@pytest.fixture
def seen() -> list[tuple[object, ...]]:
    return []


@pytest.fixture
def app(seen) -> typer.Typer:
    made = typer.Typer()

    @with_blocks
    def paint(
        name: Annotated[str, typer.Argument(metavar="NAME")], *, colours: Colours, twice: bool = False, sizes: Sizes
    ) -> None:
        """Paint something."""
        seen.append((name, colours, twice, sizes))

    made.command()(paint)
    return made


def test_the_command_gets_blocks_made_of_their_options(app, seen):
    done = CliRunner().invoke(app, ["door", "--front", "red", "--behind", "blue", "--twice", "--width", "7"])
    assert done.exit_code == 0, done.output
    assert seen == [("door", Colours("red", "blue"), True, Sizes(7))]


def test_what_is_left_out_has_the_default_of_its_field(app, seen):
    assert CliRunner().invoke(app, ["door", "--front", "red"]).exit_code == 0
    assert seen == [("door", Colours("red", "white"), False, Sizes(3))]


@pytest.mark.parametrize("arguments", [["door"], ["door", "--front", "red", "--width", "0"], ["--front", "red"]])
def test_options_of_a_block_are_required_and_bounded_as_they_say(app, seen, arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert seen == []


def test_the_help_shows_every_option_of_a_block_under_its_heading(app):
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "Paint something." in shown
    names = ("Options", "--twice", "How it is painted ─", "--front", "--behind", "How much there is of it ─", "--width")
    places = [shown.index(name) for name in names]
    assert places == sorted(places)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_that_takes_plugins_or_qualities_lists_them(name):
    listed = {"method": METHODS.names, "methods": METHODS.names, "quality": sorted(Quality)}
    listed |= {"policy": POLICIES.names, "ordering": ORDERINGS.names, "orderings": ORDERINGS.names}
    for parameter in COMMANDS[name].params:
        said = getattr(parameter, "help", None) or ""
        assert [one for one in listed.get(parameter.name, ()) if one not in said] == []


def test_commands_with_many_options_have_them_in_panels():
    for name, command in COMMANDS.items():
        panels = {getattr(one, "rich_help_panel", None) for one in command.params}
        assert len(command.params) < 16 or len(panels) > 2, name


GROUPS = (FindConfig, StoreConfig, BatchingConfig)
SETTINGS = {name: where for group in GROUPS for name, where in settings_at(group, Place.ENGINE).items()}


def given(*assignments: str, **flags: Any) -> dict[str, Any]:
    return given_settings(SETTINGS, {"assignments": list(assignments), **flags})


@pytest.mark.parametrize("assignments", [["tenant_weight=a:1,b:2"], ["tenant-weight=a:1", "tenant_weight=b:2"]])
def test_a_list_may_be_repeated_or_separated_by_commas(assignments):
    assert given(*assignments) == {"tenant_weight": ("a:1", "b:2")}


def test_settings_are_read_from_flags_and_from_set():
    assert given("ttl=1h", "ttl=2h", "find_chunks=yes", host_budget="2GiB") == {
        "ttl": 7200.0,
        "find_chunks": True,
        "host_budget": 2 << 30,
    }
    assert given("max_variants=none") == {"max_variants": None}


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["ttl"], "--set takes NAME=VALUE, not 'ttl'"),
        (["tttl=1h"], r"no such setting: tttl \(did you mean ttl\?\)"),
        (["ttl=soon"], "--set ttl: 'soon' is not a valid ttl: .*not a duration"),
        (["codec=fp8"], "give either --codec or --set codec=..., not both"),
    ],
)
def test_what_cannot_be_set_is_refused(assignments, message):
    with pytest.raises(UsageError, match=message):
        given(*assignments, codec="int8")


def test_a_flag_that_a_command_does_not_have_is_refused_with_how_to_set_it():
    assert how_to_set("--ttl=1h", SETTINGS) == "--ttl is not a flag of this command: write --set ttl=VALUE"
    assert how_to_set("--no-find-chunks", SETTINGS).endswith("write --set find_chunks=false")
    assert how_to_set("--tttl", SETTINGS) == ""
    for command in (("ask", "--ttl", "1h", "Why?"), ("serve", "--ttl", "1h"), ("vllm-serve", "m", "--ttl=1h")):
        refused = invoke(*command)
        assert (refused.exit_code, "write --set ttl=VALUE" in " ".join(refused.output.split())) == (2, True), command
