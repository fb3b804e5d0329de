"""Each recipe as it is written, and what is shown of it: what is reused, and the forms of answers."""

import json
import re

import httpx
from langchain_core.messages import ToolMessage

from tests.clients.chains import passages, reused_shares


def reused(line: str) -> float:
    """The share in a line such as `  12 of 34 tokens reused`."""
    found = re.fullmatch(r"  (\d+) of (\d+) tokens reused", line)
    assert found is not None, line
    return int(found[1]) / int(found[2])


def test_the_stuff_chain_reuses_documents_in_another_order(server, run):
    chain = run("langchain_chain.py", server("langchain_chain.py"))
    _, first, _, second = chain.lines
    assert reused(first) < 0.1
    assert reused(second) > 0.7, "three short documents"
    others = passages(8, ("2-tides-and-pilotage", "6-bylaws"))  # no other client has sent them
    first, second = reused_shares(chain.variables["chain"], others)
    assert first < 0.1
    assert second >= 0.8


def test_an_agents_steps_continue_each_other(server, run):
    lines = run("langchain_agent.py", server("langchain_agent.py")).lines
    assert [line.partition(": ")[0] for line in (*lines[:3], *lines[4:7])] == ["ai", "tool", "ai"] * 2
    assert ["'topic': 'choir'" in lines[0], "'topic': 'mill'" in lines[4]] == [True, True]
    assert reused(lines[3]) > 0.4
    assert reused(lines[7]) > 0.6
    assert lines[8].startswith("Leader(group=")
    assert "Otto Gunmark" in lines[8]


def test_tools_are_bound_and_their_results_are_read(server, run):
    agent = run("langchain_agent.py", server("langchain_agent.py")).variables
    tools, asked = [agent["read_notes"]], [("user", "Who leads the choir?")]
    called = agent["llm"].bind_tools(tools, tool_choice="any", parallel_tool_calls=False).invoke(asked)
    (call,) = called.tool_calls
    assert (call["name"], called.response_metadata["finish_reason"]) == ("read_notes", "tool_calls")
    result = ToolMessage("It is led by Otto Gunmark.", tool_call_id=call["id"])
    answer = agent["llm"].bind_tools(tools).invoke([*asked, called, result])
    assert "Otto Gunmark" in answer.content
    pieces = list(agent["llm"].bind_tools(tools, tool_choice="read_notes", parallel_tool_calls=False).stream(asked))
    arguments = "".join(one["args"] or "" for piece in pieces for one in piece.tool_call_chunks)
    assert json.loads(arguments)["topic"] in ("choir", "mill")


def test_the_query_engine_reuses_nodes(server, run):
    url = server("llama_index_query_engine.py")
    ran = run("llama_index_query_engine.py", url)
    assert len(ran.lines) >= 2
    assert ran.variables["engine"].query("When is the tower open?").source_nodes
    latest = httpx.get(f"{url}/requests", params={"limit": 1}).json()["data"][0]
    assert latest["tokens_not_computed"] > 0.6 * latest["prompt_tokens"]


def test_openais_client_parses_and_takes_several_answers(server, run):
    ran = run("openai_parse.py", server("openai_parse.py"))
    assert ran.lines[0].startswith("Leader(group=")
    choices = ran.variables["several"].choices
    assert [choice.index for choice in choices] == [0, 1]
    for choice in choices:
        assert len(choice.logprobs.content) == 12
        assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)


def test_litellm(server, run):
    first, _, second, line = run("litellm_completion.py", server("litellm_completion.py")).lines
    assert "Otto Gunmark" in first
    assert "Otto Gunmark" in second
    assert reused(line) > 0.7
