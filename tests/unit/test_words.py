"""benchmarks/words.py: which words it finds in texts and names, which citations, and what is exempt."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import words
from words import ROOT

FILES = {
    "docs/papers.md": "# Papers\n\nRAGCache\n",
    "docs/some.md": "# Some\n",
    "src/one/a.py": '"""One reads docs/some.md and RAGCache §5.1."""\n',
    "src/chunkweave/assets/model.txt": "Nobody was told.\n",
    "training/worlds/wording.py": 'TEXT = "Whoever stands there"\n',
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def checked(root: Path) -> tuple[int, str]:
    command = [sys.executable, words.__file__, "--no-help", "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("docs/some.md", "It stands there.", 'docs/some.md:1: "stands" is not used'),
        ("README.md", "x\nThe rest goes on.", 'README.md:2: "goes on" is not used'),
        ("src/one/page.html", "<p>Nobody</p>", 'src/one/page.html:1: "nobody" is not used'),
        ("src/one/b.py", "told = 1\n", 'src/one/b.py:1: "told" is not used'),
        ("src/one/b.py", "# see docs/plan.md\n", "src/one/b.py:1: cites docs/plan.md, which is not in the repository"),
        ("src/one/b.py", '"""A.\n\nDESIGN §3.\n"""\n', "src/one/b.py:3: cites a section of DESIGN"),
    ],
)
def test_a_finding_fails_with_its_place_and_texts_for_models_are_exempt(tree, name, text, finding):
    (tree / name).write_text(text, encoding="utf-8")
    code, output = checked(tree)
    assert code == 1
    assert finding in output
    assert "1 words or citations" in output


@pytest.mark.parametrize(
    ("pages", "most"), [("README.md", 900), ("docs/*.md", 18_100), ("docs/results/*.md", 10_000)], ids=str
)
def test_pages_stay_short(pages, most):
    """Words without comments, as CONTRIBUTING.md says."""
    texts = [re.sub("<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in ROOT.glob(pages)]
    assert texts
    assert sum(len(text.split()) for text in texts) < most
