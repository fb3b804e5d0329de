"""Checks numbers in the prose of documentation pages against the result files that they come from.

docs/results/claims.toml says of every number in a section that names a result file where it is from, by document and
heading:

    ["docs/evidence.md"]
    "Under load" = [
        "2.3 = server-load: rows/cacheblend/over_full/0",
        "0.10 s = server-load: rows/cacheblend/runs/1/ttft_p50_s",
        "2.28x = most loading: rows/*/rounds/*/speedup",
        "1.10 = server-load: rows/cacheblend/ttft_mean_s / server-load: rows/query/ttft_mean_s",
        "2.8, 5: RAGCache's",
    ]

A number (several where they share a source) and `=` with where it is, or `:` with a reason why it is in no file. A
place is the stem of a file in docs/results and a path of keys; an entry of a list is named by its number, by a value
that it has (`4`, `layers=4`), or by some of them with commas between; `*` means all. Operators `+ - * /` have spaces
around them and are applied from left to right, what is in brackets first; `least`, `most`, `mean`, `median` and `sum`
in front make one number of many. The result has to round to what is printed, in its unit.

Settings, which are numbers of the file's command and configuration, need no line; neither do whole numbers up to 12
without a unit, nor numbers in code, links, names, and references such as §5.1 or Figure 3.
"""

import re
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import docs_tables

COUNTED = 12
"""Whole numbers up to this one are words: "two runs", "layer 3"."""
_SAMPLES = 16
"""Longer lists of numbers are samples, which are not quoted individually."""
_UNITS = {
    "": 1.0,
    "x": 1.0,
    "s": 1.0,
    "/s": 1.0,
    "%": 100.0,
    "ms": 1e3,
    "us": 1e6,
    "min": 1 / 60,
    "h": 1 / 3600,
    "KB": 1e-3,
    "MB": 1e-6,
    "GB": 1e-9,
    "MB/s": 1e-6,
    "GB/s": 1e-9,
    "KiB": 2.0**-10,
    "MiB": 2.0**-20,
    "GiB": 2.0**-30,
}
_NUMBER = re.compile(
    r"(?<![\w.,@=/-])(?P<sign>[+-]?)(?P<digits>\d{1,3}(?:[ ,]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:(?P<x>x)|\s?(?P<unit>%|us|ms|min|s|h|[KMG]B/s|[KMG]i?B|/s))?(?![\w-]|\.\d|,\d)"
)
_NO_NUMBERS = re.compile(
    r"```[\s\S]*?```|<!--[\s\S]*?-->|`[^`\n]*`|\]\([^)]*\)|https?://\S+|^    .*$|^#+ .*$"
    r"|^\|.*\|\n(?=\|[-: |]+\|$)|^\|[-: |]+\|$"
    r"|\b95 %(?=[,; ]*(?:bootstrap )?(?:interval|percentile))|\b(?:v|version |seed )\d[\d.]*"
    r"|§+[\d.]+|\b(?:Figures?|Tables?|Algorithm|Theorem|eqs?\.|Sections?)\s\d[\d.]*(?:(?:, | and | to )\d[\d.]*)*",
    re.MULTILINE,
)
_NAMED = re.compile(r"(?:\bresults/|\]\()([\w.-]+?)\.json\b")
_REDUCED: dict[str, Callable[[Sequence[float]], float]] = {
    "least": min,
    "most": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "sum": sum,
}
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


Claims = Mapping[str, Mapping[str, Sequence[str]]]
"""Lines that name the sources of numbers, by document and heading."""


class FigureError(ValueError):
    """A claim cannot be read, or a place is not in its file."""


@dataclass(frozen=True, slots=True)
class Number:
    """A printed number with its unit (empty: none)."""

    digits: str
    unit: str

    def __str__(self) -> str:
        return f"{self.digits}{self.unit}" if self.unit in ("x", "/s", "") else f"{self.digits} {self.unit}"

    @property
    def value(self) -> Decimal:
        """The printed value without its unit."""
        return Decimal(re.sub(r"[ ,]", "", self.digits))

    def shows(self, found: float) -> bool:
        """Whether `found`, in seconds, bytes or shares, rounds to the printed number."""
        exact = Decimal(repr(found * _UNITS[self.unit]))
        half = Decimal(1).scaleb(int(self.value.as_tuple().exponent)) / 2
        return abs(exact - self.value) <= half * Decimal("1.000001")  # ties and float noise go either way

    def is_counted(self) -> bool:
        """Whether it is a small whole number without a unit."""
        return not self.unit and self.digits.isdigit() and int(self.digits) <= COUNTED


@dataclass(frozen=True, slots=True)
class Line:
    """The source of some numbers: a place in a file, or a reason why they are in none."""

    numbers: tuple[Number, ...]
    place: str
    reason: str

    @staticmethod
    def of(text: str) -> "Line":
        """Parse a line of the claims.

        Raises:
            FigureError: it is not such a line.
        """
        found = re.fullmatch(r"([^=:]+?)( = |: )(.+)", text.strip())
        numbers = tuple(numbers_of(found[1].replace(", ", " ; "))) if found else ()
        if found is None or not numbers:
            raise FigureError(f"cannot read the line {text.strip()!r}: give NUMBERS = PLACE, or NUMBERS: REASON")
        return Line(numbers, found[3] if "=" in found[2] else "", found[3] if ":" in found[2] else "")

    def covers(self, number: Number) -> bool:
        """Whether it covers a number of the text: the same digits, and the same unit if the line has one."""
        return any(one.digits == number.digits and one.unit in ("", number.unit) for one in self.numbers)


@dataclass(frozen=True)
class Section:
    """The text below one heading, with the result files that it names."""

    title: str
    text: str
    results: Path
    lines: tuple[Line, ...] = field(default=())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Stems of the JSON files that it names, in links, markers and lines."""
        in_lines = (stem for line in self.lines for stem in re.findall(r"([\w.-]+): ", line.place))
        sources = (Path(source) for table in docs_tables.marked_tables(self.text) for source in table.sources)
        in_markers = (source.stem for source in sources if source.suffix == ".json")
        return tuple(dict.fromkeys([*_NAMED.findall(self.text), *in_markers, *in_lines]))

    @cached_property
    def numbers(self) -> tuple[Number, ...]:
        """Every number that may be a measurement, without generated tables."""
        text = docs_tables.without_tables(self.text)
        return tuple(one for one in dict.fromkeys(numbers_of(_NO_NUMBERS.sub(" ; ", text))) if not one.is_counted())

    def problems(self) -> Iterator[str]:
        """Problems of its numbers."""
        results = {name: docs_tables.read_result(self.results / f"{name}.json") for name in self.names}
        settings = {value for result in results.values() for value in settings_of(result)}
        for line in self.lines:
            used = [number for number in self.numbers if line.covers(number)]
            if len({one.digits for one in used}) < len({one.digits for one in line.numbers}):
                yield f"a claim is about {_joined(line.numbers)}, which is not in the text"
            if line.place:
                yield from _wrong(line.place, used, results)
        for number in self.numbers:
            if any(line.covers(number) for line in self.lines):
                continue
            if results and not _is_setting(number, settings):
                yield f"{number}: no claim says where it is from{_guess(number, results)}"
            elif not results and _is_claim(number, self.text):
                yield f"{number}: the section names no result file, and no claim says where it is from"


def read_claims(path: Path) -> Claims:
    """Lines by document and heading; none if there is no file.

    Raises:
        FigureError: the file cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise FigureError(f"cannot read {path}: {error}") from error


def sections(page: Path, results: Path, claims: Mapping[str, Sequence[str]]) -> Iterator[Section]:
    """The sections of a page, from heading to heading, each with those of the page's `claims` that have its heading.

    Raises:
        FigureError: a line of the claims cannot be read, or no section has their heading.
    """
    fenced = re.sub(r"^```.*?^```", lambda code: re.sub(r"(?m)^#", " #", code[0]), page.read_text(), flags=re.M | re.S)
    left = dict(claims)
    for text in re.split(r"(?m)^(?=#+ )", fenced):
        title = text.partition("\n")[0].lstrip("# ")
        yield Section(title, text, results, tuple(map(Line.of, left.pop(title, ()))))
    if left:
        raise FigureError(f"claims.toml has lines for the section {next(iter(left))!r}, which is not there")


def numbers_of(text: str) -> Iterator[Number]:
    """Numbers in `text`, in order."""
    for found in _NUMBER.finditer(text.replace("..", " to ")):
        yield Number(found["sign"] + found["digits"], found["x"] or found["unit"] or "")


def evaluate(expression: str, results: Mapping[str, Mapping[str, Any]]) -> float:
    """The number that an expression names.

    Raises:
        FigureError: a file or place in it is not there, or it names several numbers.
    """
    while found := re.search(r"\(([^()]+)\)", expression):
        expression = expression.replace(found[0], repr(evaluate(found[1], results)))
    reduced, _, rest = expression.partition(" ")
    reduce = _REDUCED.get(reduced)
    parts = re.split(r" ([-+*/]) ", rest if reduce else expression)
    values = _operand(parts[0], results)
    for operator, operand in zip(parts[1::2], parts[2::2], strict=True):
        others = _operand(operand, results)
        if len(others) not in (1, len(values)):
            raise FigureError(f"{expression}: {len(values)} numbers {operator} {len(others)} numbers")
        others = others * (len(values) // len(others)) if len(others) == 1 else others
        values = [_OPERATORS[operator](one, other) for one, other in zip(values, others, strict=True)]
    if reduce:
        return float(reduce(values))
    if len(values) != 1:
        raise FigureError(f"{expression}: names {len(values)} numbers; put {', '.join(_REDUCED)} in front")
    return values[0]


def settings_of(result: Mapping[str, Any]) -> Iterator[Decimal]:
    """Numbers of the command line and the configuration, and the seed."""
    for _, value in _leaves([result.get("command", ""), result.get("config", {}), result.get("seed", 0)], ""):
        if isinstance(value, str):
            yield from (Decimal(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*[a-zA-Z])", value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield Decimal(repr(value))


def _operand(text: str, results: Mapping[str, Mapping[str, Any]]) -> list[float]:
    if re.fullmatch(r"-?[\d.]+(?:e[-+]?\d+)?", text):
        return [float(text)]
    stem, colon, path = text.rpartition(": ")
    if not colon:
        raise FigureError(f"{text}: say of which file: {', '.join(f'{name}: ...' for name in results) or 'NAME: ...'}")
    result = results.get(stem)
    if result is None:
        raise FigureError(f"{text}: there is no result {stem}")
    found: list[Any] = [result]
    for key in path.split("/"):
        found = [value for one in found for value in _entries(one, key)]
    if not found or not all(isinstance(one, int | float) for one in found):
        raise FigureError(f"{text}: no number there")
    return [float(one) for one in found]


def _entries(value: object, key: str) -> Iterator[object]:
    if isinstance(value, Mapping):
        if key == "*":
            yield from value.values()
        elif key in value:
            yield value[key]
    elif isinstance(value, list):
        if key == "*":
            yield from value
        elif re.fullmatch(r"-?\d+", key) and -len(value) <= int(key) < len(value):
            yield value[int(key)]
        else:
            entries = [(one, _values(one)) for one in value if isinstance(one, Mapping)]
            wanted = {key} if any(key in values for _, values in entries) else set(key.split(","))
            yield from (one for one, values in entries if wanted <= values)


def _values(entry: Mapping[str, Any]) -> set[str]:
    """The names of a list's entry: its values, and `key=value`."""
    return {text for key, value in entry.items() for text in (str(value), f"{key}={value}")}


def _wrong(place: str, used: Sequence[Number], results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    try:
        found = evaluate(place, results)
    except (FigureError, ZeroDivisionError) as error:
        yield str(error)
        return
    for number in used:
        if not number.shows(found):
            yield f"{number}: {place} is {found * _UNITS[number.unit]:.6g}"


def _is_setting(number: Number, settings: set[Decimal]) -> bool:
    return number.value in settings or (number.unit == "%" and number.value / 100 in settings)


def _is_claim(number: Number, text: str) -> bool:
    """A speed-up or an F1 score."""
    return number.unit == "x" or re.search(rf"{re.escape(number.digits)} F1\b", text) is not None


def _guess(number: Number, results: Mapping[str, Mapping[str, Any]]) -> str:
    places = (
        f"{name}: {place}"
        for name, result in results.items()
        for place, value in _leaves(result, "")
        if isinstance(value, int | float) and not isinstance(value, bool) and number.shows(value)
        if not place.startswith(("config", "samples", "seed"))
    )
    found = list(islice(places, 4))
    return f"; perhaps {'; '.join(found)}" if found else ""


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Every value that is not a container, with its path; without samples."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list | tuple) and (len(value) <= _SAMPLES or isinstance(value[0], Mapping)):
        for place, one in enumerate(value):
            yield from _leaves(one, f"{path}/{_entry_name(one, place)}")
    elif not isinstance(value, list | tuple):
        yield path, value


def _entry_name(entry: object, place: int) -> str:
    names = ("method", "way", "contender", "ordering", "part", "step", "policy", "embedder")
    return next((str(entry[name]) for name in names if isinstance(entry, Mapping) and name in entry), str(place))


def _joined(numbers: Sequence[Number]) -> str:
    return ", ".join(map(str, numbers))
