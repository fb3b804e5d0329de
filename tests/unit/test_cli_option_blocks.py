"""Options that come in blocks: what Typer sees of a command, and what the command gets."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from chunkweave.cli.options import with_blocks


@dataclass(frozen=True, slots=True)
class Colours:
    front: Annotated[str, typer.Option(help="The front.")]
    back: Annotated[str, typer.Option("--behind", help="The back.")] = "white"


@dataclass(frozen=True, slots=True)
class Sizes:
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


def test_the_help_shows_every_option_of_a_block_in_its_place(app):
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "Paint something." in shown
    places = [shown.index(name) for name in ("--front", "--behind", "--twice", "--width")]
    assert places == sorted(places)
