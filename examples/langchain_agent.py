"""An agent of LangChain's with a tool, and an answer as an object. Results of tools that come again are reused.

Server: chunkweave serve --model smollm2 --find-chunks --method cacheblend
Client: pip install langchain langchain-openai
"""

import os
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

NOTES = {
    "choir": "The Selmond Choir was founded by two sisters who taught at the harbour school. It is led by Otto "
    "Gunmark, who came to the town as an organist. On the longest day of the year the choir sings on the quay until "
    "the last ferry has left, and everybody on board sings along.",
    "mill": "The Ostby Mill lies by the river Lune, where the water falls over a wall of old stones. Karin Halvorsen "
    "bought it as a ruin and grinds rye and barley again. Bakers from the whole valley fetch their flour there on "
    "Fridays, when the mill's own oven is lit and the bread is sold warm.",
}


@tool
def read_notes(topic: Literal["choir", "mill"]) -> str:
    """Read the town's notes about a topic."""
    return NOTES[topic]


@wrap_model_call
def read_first(request, handler):
    """A small model calls no tools by itself. Leave this out with a larger one."""
    choice = "required" if request.messages[-1].type == "human" else "none"
    return handler(request.override(tool_choice=choice, model_settings={"parallel_tool_calls": False}))


class Leader(BaseModel):
    group: str
    leader: str


llm = ChatOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    model=os.environ.get("MODEL", "smollm2"),
    temperature=0,
    max_tokens=48,
)
agent = create_agent(llm, [read_notes], system_prompt="Answer from the notes.", middleware=[read_first])

messages = []
for question in ("Who leads the choir?", "Who bought the mill?"):
    messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]
    for message in messages[-3:]:
        print(f"{message.type}: {message.content or message.tool_calls[0]['args']}")
    tokens = messages[-1].usage_metadata
    print(f"  {tokens['input_token_details']['cache_read']} of {tokens['input_tokens']} tokens reused")
print(repr(llm.with_structured_output(Leader).invoke(f"{NOTES['choir']}\n\nWho leads what?")))
