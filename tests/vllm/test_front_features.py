"""What vLLM can do beside answering, asked for together with documents through `chunkweave vllm-serve`."""

import json
from math import ceil

import openai
import pytest
from transformers import AutoModelForCausalLM

from chunkweave.models.gguf import checkpoint_folder
from chunkweave.models.loading import bundled_tokenizer
from tests.chat_tools import CALL, TEMPLATE, TOOL, said
from tests.integration.adapter_files import write_adapter
from tests.vllm.fronts import PASSAGES, WEAVE, ask, front_process, save_costs, streamed, told

LEADER = {
    "type": "object",
    "properties": {"leader": {"enum": ["Otto", "Karin"]}, "singers": {"type": "integer", "maximum": 9}},
    "required": ["leader", "singers"],
    "additionalProperties": False,
}


TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Halvik", "Lune"]}},
    "required": ["town"],
    "additionalProperties": False,
}

ENDLESS = {"1": -100}
"""No end of the answer: the reader has little to say."""


def blanks() -> list[str]:
    """Tokens of nothing but space, with which the reader would fill whatever form allows some."""
    tokenizer = bundled_tokenizer()._tokenizer
    special = set(tokenizer.all_special_ids)
    return [str(one) for one in range(len(tokenizer)) if one not in special and not tokenizer.decode([one]).strip()]


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    template = folder / "tools.jinja"
    template.write_text(TEMPLATE)
    reader = AutoModelForCausalLM.from_pretrained(checkpoint_folder("reader"))
    adapters = []
    for seed, name in enumerate(("ada", "bob")):  # whose answers differ from the reader's own by far
        made = write_adapter(folder / name, reader, seed=seed, size=0.3, targets=["q_proj", "v_proj"])
        adapters.append(f"{name}={made}")
    save_costs(folder / "kv", host=5e5)  # a token comes in from memory in a fifth of the time that computing it takes
    options = ("--host-budget", "1GiB", "--method", "cacheblend", "--chat-template", str(template))
    options += ("--cache-dir", str(folder / "kv"))
    dense = (
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )  # a small model would write nothing else
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *adapters)
    with front_process(folder, *options, *dense, *parsers, *lora, spawns=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(front):
    for passage in PASSAGES:
        ask(front.client, [passage])
    return front.client


def woven(answer) -> dict:
    report = answer.model_extra["chunkweave"]
    assert report["reused_tokens"] > 0, report
    assert report["method"] == "cacheblend"
    return report


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: text.lstrip().startswith("{")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "leader", "schema": LEADER}}},
            lambda text: set(json.loads(text)) == {"leader", "singers"},
        ),
        ({"structured_outputs": {"regex": "[A-C]{3}-[0-9]"}}, lambda text: text[3] == "-" and len(text) == 5),
    ],
)
def test_answers_keep_to_a_form(client, constraint, check):
    answer = ask(client, PASSAGES[::-1], max_tokens=64, **constraint)
    assert check(answer.choices[0].message.content), answer.choices[0].message.content
    woven(answer)


@pytest.mark.parametrize(("alpha", "focus"), [(0.5, False), (2.0, True)])
def test_the_report_has_the_reasons_chunk_by_chunk(client, alpha, focus):
    """What the weave says of itself: Cache-Craft's scores, and where focus stopped."""
    fresh = [*told(f"in the 4th year of {alpha}"), *told(f"in the 5th year of {alpha}")]
    reuse = {"method": f"cachecraft:alpha={alpha}{'' if focus else ':no-focus'}", "order": "fixed"}
    ask(client, fresh, reuse=reuse)
    report = ask(client, fresh[::-1], reuse=reuse).model_extra["chunkweave"]
    assert (report["method"], report["parameters"]) == ("cachecraft", {"alpha": alpha, "focus": focus})
    chunks = [chunk for chunk in report["chunks"] if chunk["kv_source"] == "reused"]
    assert len(chunks) == len(fresh)
    for chunk in chunks:
        why = chunk["reasons"]
        assert why["cfo"] == pytest.approx(min(1.0, alpha * why["cci"] * (1 - why["overlap"])), abs=0.003)
        chosen = {ceil((why["cfo"] + less) * chunk["tokens"]) for less in (-0.001, 0, 0.001)}
        stopped = report["stopped_at_layer"] is not None
        assert chunk["recomputed_tokens"] in chosen | ({0} if stopped else set())
    assert focus or report["stopped_at_layer"] is None


def test_the_report_has_the_layers_at_which_tokens_were_chosen(client):
    fresh = told("in May")
    for order in (fresh, fresh[::-1]):
        answer = ask(client, order, reuse={**WEAVE, "method": "cacheblend:ratio=0.2:layers=1+2"})
    assert woven(answer)["check_layers"] == [1, 2]


def test_more_is_recomputed_where_that_hides_loading(client):
    fresh = told("in March")
    for passage in fresh:
        ask(client, [passage])
    report = woven(ask(client, fresh[::-1], reuse={"method": "cacheblend", "order": "fixed"}))
    ratio = report["parameters"]["recompute_ratio"]
    reused = report["reused_tokens"] + report["recomputed_tokens"]
    exact = report["prefix_exact_tokens"] - (report["engine_cached_tokens"] > 0)  # BOS is in vLLM's own blocks
    assert ratio == pytest.approx(0.2 * (reused + exact) / reused)
    assert report["recomputed_tokens"] == pytest.approx(ratio * reused, abs=len(fresh))
    assert woven(ask(client, fresh[::-1]))["parameters"]["recompute_ratio"] == 0.2, "it is named"


def test_sampling_is_vllms(client):
    def text(**more) -> list[str]:
        answer = ask(client, PASSAGES[::-1], **{"temperature": 1.0, "max_tokens": 24, "logit_bias": ENDLESS, **more})
        return [choice.message.content for choice in answer.choices]

    several = text(n=3, seed=7)
    assert len(set(several)) > 1
    assert text(n=3, seed=7) == several
    assert text(seed=8) != text(seed=9)
    (greedy,) = text(temperature=0)
    assert text(temperature=0, frequency_penalty=2.0, presence_penalty=2.0) != [greedy]
    assert text(temperature=0, repetition_penalty=1.9) != [greedy]
    stop = greedy[5:9]
    assert text(temperature=0, stop=[stop]) == [greedy.partition(stop)[0]]


def test_log_probabilities_name_the_likeliest(client):
    options = {"temperature": 2.0, "seed": 3, "ignore_eos": True, "max_tokens": 24, "n": 2}
    answer = ask(client, PASSAGES[::-1], logprobs=True, top_logprobs=3, **options)
    assert [(choice.index, choice.finish_reason) for choice in answer.choices] == [(0, "length"), (1, "length")]
    content = answer.choices[0].logprobs.content
    assert answer.usage.completion_tokens == 2 * len(content) == 48
    for token in content:
        found = [one.logprob for one in token.top_logprobs]
        assert found == sorted(found, reverse=True)
        assert token.logprob <= found[0]
    assert any(token.logprob < token.top_logprobs[-1].logprob for token in content), "none of the likeliest is chosen"


def test_adapters_are_asked_by_name_and_their_chunks_are_their_own(client):
    assert [model.id for model in client.models.list()] == ["reader", "ada", "bob"]
    fresh = told("in June")
    ask(client, fresh)
    answers = {}
    for name in ("ada", "bob"):
        first = ask(client, fresh, model=name)
        assert first.model == name
        report = first.model_extra["chunkweave"]
        assert (report["reused_tokens"], report["prefix_exact_tokens"]) == (0, 0), "nobody's chunks are its own"
        answers[name] = ask(client, fresh[::-1], model=name)
        assert woven(answers[name])["recomputed_tokens"] > 0
    texts = {one.choices[0].message.content for one in (*answers.values(), ask(client, fresh[::-1]))}
    assert len(texts) == 3
    with pytest.raises(openai.NotFoundError):
        ask(client, fresh, model="nobody")


def called(events) -> tuple[str, list, list[str]]:
    """The text of a stream, the pieces of its calls, and how it ended."""
    choices = [event.choices[0] for event in events if event.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    pieces = [piece.function for choice in choices for piece in choice.delta.tool_calls or []]
    return text, pieces, [choice.finish_reason for choice in choices if choice.finish_reason]


def test_tools_are_called_over_documents(client):
    """The reader calls none by itself: its answer is held to one."""
    question = "What time is it in Halvik?"
    forced = {"structured_outputs": {"choice": [f"I look. {CALL}"]}, "tools": [TOOL], "max_tokens": 128}
    ask(client, PASSAGES, question, **forced)
    answer = ask(client, PASSAGES[::-1], question, **forced)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"town": "Halvik"})
    assert (choice.message.content.strip(), choice.finish_reason) == ("I look.", "tool_calls")
    woven(answer)

    said_again, pieces, ends = called(ask(client, PASSAGES[::-1], question, stream=True, **forced))
    assert (said_again.strip(), ends) == ("I look.", ["tool_calls"])
    assert "".join(piece.name or "" for piece in pieces) == "get_time"
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"town": "Halvik"}
    assert len(pieces) > 2, "arguments come as they are written"

    messages = [{"role": "user", "content": question}, choice.message.model_dump(exclude_none=True), said("Noon.")]
    messages[1].pop("refusal", None)
    behind = client.chat.completions.create(
        model="reader", messages=messages, tools=[TOOL], max_tokens=4, extra_body={"documents": PASSAGES[::-1]}
    )
    assert behind.usage.prompt_tokens > answer.usage.prompt_tokens
    woven(behind)


@pytest.mark.parametrize(
    ("choice", "ends"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_time"}}, "stop")],
    ids=["required", "named"],
)
def test_a_call_can_be_forced(client, choice, ends):
    """The reader calls none by itself; of two tools it writes a call of one, or of the one that is named."""
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": TOWN}}
        for name in ("get_tide", "get_time")
    ]
    asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 96}
    asked["logit_bias"] = dict.fromkeys(blanks(), -100)
    ask(client, PASSAGES, **asked)
    answer = ask(client, PASSAGES[::-1], **asked)
    (found,) = answer.choices
    (call,) = found.message.tool_calls
    assert (found.finish_reason, found.message.content or "") == (ends, "")
    assert call.function.name in ("get_time", "get_tide")
    if ends == "stop":
        assert call.function.name == "get_time"
    assert json.loads(call.function.arguments)["town"] in ("Halvik", "Lune")
    woven(answer)

    _, pieces, finished = called(ask(client, PASSAGES[::-1], stream=True, **asked))
    assert "".join(piece.name or "" for piece in pieces) == call.function.name
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == json.loads(call.function.arguments)
    assert finished == [ends]
    nobody = {"type": "function", "function": {"name": "nobody"}}
    with pytest.raises(openai.BadRequestError, match="does not match any"):
        ask(client, PASSAGES, **{**asked, "tool_choice": nobody})


def test_with_tools_a_text_is_streamed_as_without(client):
    more = {"stream": True, "max_tokens": 24, "logit_bias": ENDLESS, "tools": [TOOL]}
    text, _ = streamed(ask(client, PASSAGES, tool_choice="none", **more))
    parsed, report = streamed(ask(client, PASSAGES, **more))
    assert parsed == text != "", "the same prompt, once with a parser behind it"
    assert report["reused_tokens"] + report["prefix_exact_tokens"] > 0


def test_metrics_are_one_text_that_prometheus_reads(client, front):
    from prometheus_client.parser import text_string_to_metric_families

    ask(client, PASSAGES, model="ada")
    families = list(text_string_to_metric_families(front.get("/metrics")))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [(one.name, tuple(sorted(one.labels.items()))) for family in families for one in family.samples]
    assert len(samples) == len(set(samples))
    assert {"vllm:lora_requests_info", "vllm:prompt_tokens", "chunkweave:replica_up"} <= set(names)
    assert all("replica" in dict(labels) for name, labels in samples if name.startswith("vllm:"))


NEW = ["The Vessby ferry has 12 cabins. It leaves at seven.", "The Skerrow bees are counted by Nils Oster in May."]


def test_a_request_may_store_nothing_or_not_look_either(client):
    def found(cache, **more):
        return ask(client, NEW, reuse={**(WEAVE if cache != "off" else {}), "cache": cache}, **more)

    def sources(answer):
        return {one["kv_source"] for one in answer.model_extra["chunkweave"]["chunks"] if one["rank"] is not None}

    for cache in ("read", "off", "read", "off", "use", "off"):
        assert sources(found(cache)) == {"computed"}, cache
    read = found("read")
    assert "computed" not in sources(read)
    assert read.model_extra["chunkweave"]["cache"] == "read"
    turned = ask(client, NEW[::-1], reuse={**WEAVE, "cache": "read"})
    assert turned.model_extra["chunkweave"]["reused_tokens"] > 0
