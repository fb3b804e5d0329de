"""`make results-check`: what it finds in result files and pages that are wrong, and that it finds nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from bench_tables import contexts, side_by_side  # noqa: E402
from computations import definitions, note_change  # noqa: E402
from docs_figures import FigureError, Line, evaluate, numbers_of  # noqa: E402
from docs_tables import command_block, main, markdown_table, rewrite_page, selected, without_places  # noqa: E402
from results_check import check, program_of  # noqa: E402

from chunkweave.errors import DocumentError  # noqa: E402

ROW = {"ttft_median_s": 1.5, "speedup": 2.04, "speedup_p10": 1.9, "speedup_p90": 2.2, "flops_limit": 2.5}
ROW |= {"limit_share": 0.8, "recompute_fraction": 0.15, "method": "epic"}
PAGE = """# Page

## Times

`epic` is 2.0 times as fast with 512 tokens (CacheBlend: 3.3), [all](results/a.json), as §5.1 says of 2 layers.

<!-- ttft: results/a.json -->
<!-- /ttft -->
"""
CLAIMS = """["docs/page.md"]
"Times" = [
    "2.0 = a: rows/epic/speedup",
    "3.3: the paper's",
]
"""
COMPUTATIONS = """[times]
about = "how soon answers come"
digest = ""
commands = ["bench ttft", "benchmarks/later.py"]
files = ["src/chunkweave/loop.py", "src/chunkweave/rows.py"]
earlier = []
"""
LOOP = '''"""The loop."""

from chunkweave import rows


def run(batch: list[int]) -> int:
    """Run it."""
    return _sum(batch)
'''
ROWS = "import math\n\nLONGEST = 3\n\n\ndef _sum(batch):\n    return math.fsum(batch)\n"


class Checkout:
    """A repository with one script, one result and one page, in order until a test changes something."""

    def __init__(self, root: Path) -> None:
        self.root, self.results = root, root / "docs" / "results"
        self.results.mkdir(parents=True)
        (root / "benchmarks").mkdir()
        (root / "benchmarks" / "some.py").write_text("", encoding="utf-8")
        (root / "src" / "chunkweave" / "cli").mkdir(parents=True)
        (root / "src" / "chunkweave" / "cli" / "bench.py").write_text("def ttft(): ...\n", encoding="utf-8")
        (root / "README.md").write_text("# Project\n\nAnswers start 2 times sooner.\n", encoding="utf-8")
        self.git("init", "-q", ".")
        self.git("add", ".")
        self.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
        self.result = {
            "benchmark": "ttft",
            "command": "chunkweave bench ttft --chunk-tokens 512",
            "commit": self.git("rev-parse", "HEAD"),
            "machine": {"cpu": "one"},
            "seed": 0,
            "config": {},
            "rows": [ROW],
        }
        self.write("a.json")
        self.page = root / "docs" / "page.md"
        self.page.write_text(PAGE, encoding="utf-8")
        self.claims = self.results / "claims.toml"
        self.claims.write_text(CLAIMS, encoding="utf-8")
        self.computations = self.results / "computations.toml"
        self.computations.write_text(COMPUTATIONS, encoding="utf-8")
        self.source = root / "src" / "chunkweave"
        (self.source / "loop.py").write_text(LOOP, encoding="utf-8")
        (self.source / "rows.py").write_text(ROWS, encoding="utf-8")
        note_change(root, self.results, {}, "times", same=True)
        rewrite_page(self.page)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self.root), *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def write(self, name: str, **changes: object) -> None:
        (self.results / name).write_text(json.dumps({**self.result, **changes}), encoding="utf-8")

    def replace(self, old: str, new: str) -> None:
        """Change the page or, if they have the text, the claims."""
        file = self.claims if old in CLAIMS else self.page
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")

    def said(self, allowed: dict[str, str] | None = None) -> list[str]:
        lines: list[str] = []
        assert check(self.root, allowed or {}, lines.append) == int(lines[-1].split(": ")[1].split()[0])
        return lines


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    return Checkout(tmp_path)


def test_nothing_is_found_where_everything_is_in_order(checkout):
    assert checkout.said() == ["1 files, 2 pages: 0 problems, 0 files allowed"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": ""}, "a.json: says no command"),
        ({"machine": None}, "a.json: says no machine"),
        ({"commit": None}, "a.json: says no commit"),
        ({"commit": "0" * 40}, "not in the history"),
        ({"command": "python benchmarks/gone.py"}, "benchmarks/gone.py is not there any more"),
        ({"command": "chunkweave bench gone"}, "has no such command"),
        ({"command": "sh run"}, "no known program"),
        ({"rows": [{**ROW, "speedup": 2.14}]}, "2.0: a: rows/epic/speedup is 2.14"),
        ({"rows": [{**ROW, "limit_share": 0.7}]}, "the table 'ttft' is not what results/a.json makes"),
        ({"rows": [{**ROW, "method": "query"}]}, "rows/epic/speedup: no number there"),
    ],
)
def test_a_result_that_is_wrong_is_found(checkout, changes, said):
    checkout.write("a.json", **changes)
    assert any(said in line for line in checkout.said()[:-1])


def test_a_commit_has_the_script_and_no_changed_files(checkout):
    script = checkout.root / "benchmarks" / "later.py"
    script.write_text("", encoding="utf-8")
    checkout.write("a.json", command="python benchmarks/later.py", commit=f"{checkout.result['commit']}+")
    said = checkout.said()
    assert any("has no benchmarks/later.py" in line for line in said)
    assert any("changed files" in line for line in said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("2.0 times", "2.1 times", "2.1: no claim says where it is from"),
        ("512 tokens", "513 tokens", "513: no claim says where it is from"),
        ("| 80% |", "| 81% |", "the table 'ttft' is not what"),
        ("2.0 = a: rows/epic/speedup", "2.0 = a: rows/epic/speed", "rows/epic/speed: no number there"),
        ("2.0 = a: rows/epic/speedup", "2.0 = rows/epic/speedup", "rows/epic/speedup: say of which file: a: ..."),
        ("3.3: the paper's", "3.3, 3.4: the paper's", "3.3, 3.4, which is not in the text"),
        ("3.3: the paper's", "3.3 the paper's", "cannot read the line"),
        ('"Times" =', '"Hours" =', "claims.toml has lines for the section 'Hours', which is not there"),
        ("docs/page.md", "docs/gone.md", "claims.toml: there is no page docs/gone.md"),
        ('"Times" = [', '"Times" = ', "claims.toml: "),
        ("(results/a.json)", "(results/b.json)", "names results/b.json, which is not there"),
        ("<!-- ttft: results/a.json -->", "<!-- ttft -->", "names no file that it is made from"),
        ("<!-- ttft: results/a.json -->", "<!-- times: results/a.json -->", "no table"),
    ],
)
def test_a_page_that_says_something_else_is_found(checkout, old, new, said):
    checkout.replace(old, new)
    if "times:" in new:
        checkout.replace("<!-- /ttft -->", "<!-- /times -->")
    assert any(said in line for line in checkout.said()[:-1]), checkout.said()


def test_tables_beside_the_results_are_checked_as_those_of_pages(checkout):
    tables = checkout.results / "tables-a.md"
    tables.write_text("# A\n\n1.5 s of 2.04x.\n\n<!-- ttft: a.json -->\n<!-- /ttft -->\n", encoding="utf-8")
    assert sum("docs/results/tables-a.md" in line for line in checkout.said()) == 3  # the table, and two numbers
    rewrite_page(tables)
    claims = """["docs/results/tables-a.md"]
"A" = ["1.5 = a: rows/epic/ttft_median_s", "2.04 = a: rows/epic/speedup"]
"""
    checkout.claims.write_text(CLAIMS + claims, encoding="utf-8")
    assert checkout.said() == ["1 files, 3 pages: 0 problems, 0 files allowed"]


def test_a_claim_needs_a_file_where_a_section_names_none(checkout):
    (checkout.root / "docs" / "b.md").write_text("# B\n\nIt is 4.5x sooner and loses 0.1 F1.\n", encoding="utf-8")
    assert sum("names no result file" in line for line in checkout.said()) == 2


def test_every_file_is_named_and_every_picture_drawn_from_one(checkout):
    checkout.write("b.json")
    (checkout.results / "c.png").write_bytes(b"")
    said = checkout.said()
    assert "b.json: is named on no page" in said
    assert "c.png: no result file says that it draws it" in said
    checkout.write("b.json", command="chunkweave bench ttft --plot docs/results/c.png")
    assert not any("draws" in line for line in checkout.said())


def test_text_says_where_it_is_from_in_its_head(checkout):
    (checkout.root / "Makefile").write_text("prove:\n", encoding="utf-8")
    checkout.replace("[all]", "[faults](results/f.txt), [all]")
    text = checkout.results / "f.txt"
    text.write_text("PASSED\n", encoding="utf-8")
    assert "f.txt: says no command and no commit and no machine" in checkout.said()
    text.write_text(
        f"command: make prove\ncommit: {checkout.result['commit']}\nmachine: one\n\nPASSED\n", encoding="utf-8"
    )
    assert [line for line in checkout.said() if "f.txt" in line] == [
        f"f.txt: its commit {str(checkout.result['commit'])[:8]} has no Makefile with this command"
    ]


def test_what_is_allowed_is_shown_and_no_longer_than_needed(checkout):
    checkout.write("a.json", commit=f"{checkout.result['commit']}+")
    said = checkout.said({"a.json": "takes two hours"})
    assert "allowed: takes two hours" in said[0]
    assert said[-1].endswith("0 problems, 1 files allowed")
    checkout.write("a.json")
    assert any("does not need" in line for line in checkout.said({"a.json": "takes two hours"}))
    assert any("not there" in line for line in checkout.said({"b.json": ""}))


def test_without_history_it_says_so_and_checks_the_rest(checkout):
    shutil.rmtree(checkout.root / ".git")
    checkout.write("a.json", commit="0" * 40)
    assert checkout.said()[0].endswith("commits were not looked up")
    checkout.write("a.json", machine=None)
    assert "a.json: says no machine" in checkout.said()


def test_a_move_changes_no_computation(checkout):
    (checkout.source / "rows.py").unlink()
    (checkout.source / "loop.py").write_text(f"{LOOP}\n\nLONGEST = 3\n", encoding="utf-8")
    (checkout.source / "sums.py").write_text("import math as m\n\n\n" + ROWS.partition("3\n\n\n")[2], encoding="utf-8")
    assert any("cannot read src/chunkweave/rows.py" in line for line in checkout.said())
    text = checkout.computations.read_text(encoding="utf-8").replace("chunkweave/rows.py", "chunkweave/sums.py")
    checkout.computations.write_text(text, encoding="utf-8")
    assert checkout.said() == ["1 files, 2 pages: 0 problems, 0 files allowed"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """Run it."""\n', "    # as it comes\n"),
        ("batch: list[int]) -> int:", "batch: 'Sequence[int]') -> 'int':"),
        ("from chunkweave import rows", "if TYPE_CHECKING:\n    from collections.abc import Sequence"),
        ("_sum(batch)", "(\n        sum(batch)\n    )"),
    ],
)
def test_formats_words_and_imports_change_no_computation(old, new):
    assert old in LOOP
    assert definitions(LOOP.replace(old, new)) == definitions(LOOP)


@pytest.mark.parametrize(("old", "new"), [("_sum(batch)", "_sum(batch[1:])"), ("run(", "walk("), ("batch: l", "*b: l")])
def test_a_computation_is_what_is_computed(old, new):
    assert definitions(LOOP.replace(old, new)) != definitions(LOOP)


def test_changed_code_makes_results_earlier_unless_it_gives_the_same(checkout):
    origins = {"a.json": checkout.result}
    (checkout.source / "rows.py").write_text(ROWS.replace("fsum", "prod"), encoding="utf-8")
    assert any("the code of times is not what it was" in line for line in checkout.said())
    note_change(checkout.root, checkout.results, origins, "times", same=True)
    assert checkout.said() == ["1 files, 2 pages: 0 problems, 0 files allowed"]
    (checkout.source / "rows.py").write_text(ROWS, encoding="utf-8")
    note_change(checkout.root, checkout.results, origins, "times", same=False)
    assert checkout.said()[:-1] == ["times: 1 of 1 results are of earlier code"]
    (checkout.source / "rows.py").write_text(ROWS.replace("fsum", "prod"), encoding="utf-8")
    assert checkout.said()[-1].endswith("0 problems, 0 files allowed")  # no result says that it measured this code
    with pytest.raises(DocumentError, match="no family hours, only times"):
        note_change(checkout.root, checkout.results, origins, "hours", same=True)


def test_every_result_belongs_to_a_computation(checkout):
    text = checkout.computations.read_text(encoding="utf-8")
    checkout.computations.write_text(text.replace('"bench ttft"', '"bench loading"'), encoding="utf-8")
    assert any("a.json: its command belongs to no family" in line for line in checkout.said())
    checkout.computations.write_text(text.replace("earlier = [", 'earlier = ["gone.json"'), encoding="utf-8")
    assert any("times has no result gone.json" in line for line in checkout.said())
    checkout.computations.write_text(text.replace("about", "for"), encoding="utf-8")
    assert any("cannot read computations.toml" in line for line in checkout.said())


def test_a_place_is_a_path_and_may_be_reckoned_with():
    rows = [{"method": "a", "layers": 8, "s": 2.0, "each": [1.0, 3.0]}, {"method": "a", "layers": 24, "s": 4.0}]
    results = {"one": {"rows": rows}}
    assert evaluate("one: rows/a,24/s / one: rows/a,8/s", results) == 2.0
    assert evaluate("one: rows/0/each/-1 - 1 * 2", results) == 4.0
    assert evaluate("most one: rows/*/s * 10", results) == 40.0
    assert evaluate("mean one: rows/0/each/*", results) == 2.0
    assert evaluate("(sum one: rows/*/s) / (most one: rows/0/each/*)", results) == 2.0
    assert evaluate("one: rows/layers=8/s - 1e-1", results) == pytest.approx(1.9)
    for wrong in ("one: rows/*/s", "two: rows/0/s", "one: rows/a/none", "one: rows/0/each/* / one: rows/*/none"):
        with pytest.raises(FigureError):
            evaluate(wrong, results)
    with pytest.raises(FigureError, match="say of which file"):
        evaluate("rows/0/s", {**results, "two": {}})


def test_numbers_are_read_with_their_units_and_names_are_none():
    text = "SmolLM2-135M, int8, 1,234 MB, +0.05, 3.2x, 4 x 5, 95 %, 0.15..0.2, p99, 7.5/s, 10 000, -.5"
    assert [str(one) for one in numbers_of(text)] == [
        "1,234 MB", "+0.05", "3.2x", "4", "5", "95 %", "0.15", "0.2", "7.5/s", "10 000", "-.5"
    ]  # fmt: skip
    number = next(numbers_of("12.5 %"))
    assert number.shows(0.1254)
    assert not number.shows(0.1256)
    assert Line.of("1.0 s, 2x = rows/0/s").covers(next(numbers_of("2x")))


def test_a_command_is_broken_before_options():
    assert command_block("python a.py --one 'b c'") == "    python a.py --one 'b c'"
    long = f"python a.py --one {' '.join(['word'] * 10)} --two {' '.join(['word'] * 10)}"
    assert command_block(long).splitlines()[1].startswith("        --two word")


def test_a_page_may_show_the_command_of_a_result_without_where_it_writes(checkout):
    command = "chunkweave bench ttft --chunk-tokens 512 --out docs/results/a.json --samples s.jsonl --docs notes"
    checkout.write("a.json", command=command)
    page = checkout.root / "docs" / "results" / "tables-some.md"
    page.write_text("<!-- command: a.json -->\n<!-- /command -->\n", encoding="utf-8")
    assert any("the table 'command' is not what a.json makes" in line for line in checkout.said())
    rewrite_page(page)
    assert "\n    chunkweave bench ttft --chunk-tokens 512 --docs notes\n" in page.read_text(encoding="utf-8")
    assert checkout.said()[-1] == "1 files, 3 pages: 0 problems, 0 files allowed"
    assert without_places("python a.py --docs b.md --top 3 --update-docs b.md table") == "python a.py --top 3"


def test_a_programs_file_is_found_in_its_command():
    assert program_of("OMP_NUM_THREADS=1 python benchmarks/gpu/weave.py") == ("benchmarks/gpu/weave.py", "")
    assert program_of("make prove-soak")[0] == "Makefile"
    assert "quality" in program_of("chunkweave bench quality --model reader")[1]
    assert "calibrate" in program_of("chunkweave calibrate reader")[1]


def test_a_table_goes_between_its_markers_and_nowhere_else(checkout):
    before = checkout.page.read_text(encoding="utf-8")
    checkout.write("a.json", rows=[{**ROW, "method": r"\1"}])
    rewrite_page(checkout.page)
    after = checkout.page.read_text(encoding="utf-8")
    assert after == before.replace("`epic` |", r"`\1` |")
    assert markdown_table(["x", "y"], [["a", "1"]]) == "| x | y |\n| --- | ---: |\n| a | 1 |"
    with pytest.raises(DocumentError, match="cannot read"):
        rewrite_page(checkout.root / "none.md")


def test_a_page_selects_tables_columns_and_rows(checkout):
    text = "*one*\n\n| a | b |\n| --- | ---: |\n| `x` | 1 |\n| y | 2 |\n\n| a | c |\n| --- | ---: |\n| z | 3 |\n"
    assert selected(text, "") == text
    assert selected(text, "table 2") == "| a | c |\n| --- | ---: |\n| z | 3 |"
    assert selected(text, "table 1; columns 2; rows x | y") == "| b |\n| ---: |\n| 1 |\n| 2 |"
    assert selected(text, "table 1; rows x").endswith("| `x` | 1 |")
    for wrong in ("table 3", "columns 3", "rows x", "table 1; rows x | w", "words 1"):
        with pytest.raises(DocumentError, match="there is no"):
            selected(text, wrong)
    checkout.replace("<!-- ttft: results/a.json -->", "<!-- ttft: results/a.json; columns 1 3; rows epic -->")
    assert any("the table 'ttft' is not what" in line for line in checkout.said())
    rewrite_page(checkout.page)
    assert "| method | speed-up |\n| --- | ---: |\n| `epic` | 2.04x |\n" in checkout.page.read_text(encoding="utf-8")
    assert checkout.said()[-1] == "1 files, 2 pages: 0 problems, 0 files allowed"


def test_the_tables_of_a_result_are_printed_below_its_command(checkout, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["docs_tables.py", str(checkout.results / "a.json")])
    main()
    printed = capsys.readouterr().out
    assert "    chunkweave bench ttft --chunk-tokens 512\n" in printed
    assert "\nttft\n\n| method | TTFT |" in printed


def fidelity_row(method: str, share: float) -> dict[str, object]:
    return {"method": method, "speedup": 2.0, "kl_of_full_reuse": share, "agreement": share, "identical": None}


def test_a_figure_that_is_missing_does_not_move_others():
    rows = [fidelity_row(name, 0.5) for name in ("full", "full-reuse", "cacheblend@15%", "full-reuse neutral")]
    rows += [fidelity_row("query:whole:late:stored@0.05", 0.25), fidelity_row("cacheblend neutral@15%", 0.75)]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in contexts(rows).splitlines()]
    assert cells[2:] == [
        ["alone", "50%, 50%", "25%, 25%", "50%, 50%"],
        ["behind bundled neutral passages", "50%, 50%", "-, -", "75%, 75%"],
    ]
    one, other = rows, [row for row in rows if row["method"] != "full-reuse neutral"]
    assert "full-reuse" in side_by_side(one)
    assert side_by_side([*one, *one]).count("2.0x, 2.0x") == 3
    assert "full-reuse" not in side_by_side([*one, *other]), "a figure would seem to be of the first file"
