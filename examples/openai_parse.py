"""OpenAI's own client: answers as objects, several answers, and log-probabilities.

Server: chunkweave serve --model smollm2 --find-chunks --method cacheblend
Client: pip install openai
"""

import os

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = os.environ.get("MODEL", "smollm2")
text = "The Selmond Choir is led by Otto Gunmark. The Gerfern Tower is led by Paul Tirwright."


class Leader(BaseModel):
    group: str
    leader: str


def asked(question):
    return [{"role": "user", "content": f"{text}\n\n{question}"}]


parsed = client.chat.completions.parse(
    model=model, messages=asked("Who leads the choir?"), response_format=Leader, temperature=0, max_tokens=64
)
print(repr(parsed.choices[0].message.parsed))

several = client.chat.completions.create(
    model=model,
    messages=asked("Who leads the tower?"),
    n=2,
    temperature=0.8,
    seed=1,
    max_tokens=12,
    logprobs=True,
    top_logprobs=2,
)
for choice in several.choices:
    first = choice.logprobs.content[0]
    print(choice.message.content.strip(), {one.token: round(one.logprob, 2) for one in first.top_logprobs})
