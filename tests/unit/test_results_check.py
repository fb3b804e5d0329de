"""`make results-check`: what it finds in result files and pages that are wrong, and that it finds nothing else."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from computations import note_change
from docs_tables import rewrite_page
from results_check import check

from chunkweave.errors import DocumentError

ROW = {"ttft_s": 1.5, "speedup": 2.04, "flops_limit": 2.5}
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
        ({"machine": None}, "a.json: says no machine"),
        ({"commit": "0" * 40}, "not in the history"),
        ({"command": "python benchmarks/later.py"}, "has no benchmarks/later.py"),
        ({"commit": "HEAD+"}, "changed files"),
        ({"command": "python benchmarks/gone.py"}, "benchmarks/gone.py is not there any more"),
        ({"command": "chunkweave bench gone"}, "has no such command"),
        ({"command": "sh run"}, "no known program"),
        ({"rows": [{**ROW, "speedup": 2.14}]}, "2.0: a: rows/epic/speedup is 2.14"),
        ({"rows": [{**ROW, "limit_share": 0.7}]}, "the table 'ttft' is not what results/a.json makes"),
        ({"rows": [{**ROW, "method": "query"}]}, "rows/epic/speedup: no number there"),
    ],
)
def test_a_result_that_is_wrong_is_found(checkout, changes, said):
    (checkout.root / "benchmarks" / "later.py").write_text("", encoding="utf-8")
    changes = {name: checkout.result["commit"] + "+" if value == "HEAD+" else value for name, value in changes.items()}
    checkout.write("a.json", **changes)
    assert any(said in line for line in checkout.said()[:-1])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("2.0 times", "2.1 times", "2.1: no claim says where it is from"),
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
