"""Ask a running server with the OpenAI client: over documents, as a stream, and from a corpus.

Run: chunkweave serve --model smollm2, then python examples/openai_client.py [URL [API_KEY]]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = OpenAI(base_url=url, api_key=key)
model = client.models.list().data[0].id
documents = [
    {"text": "The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", "id": "choir"},
    {"text": "The Gerfern Tower has 230 steps. It is led by Paul Tirwright.", "id": "tower"},
]
question = [{"role": "user", "content": "Who leads the Selmond Choir?"}]

for turn in (documents, documents[::-1]):
    stream = client.chat.completions.create(
        model=model,
        messages=question,
        temperature=0,
        max_tokens=16,
        stream=True,
        extra_body={"documents": turn, "chunkweave": {"method": "cacheblend"}},
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    report = chunk.model_extra["chunkweave"]  # the last one has it
    cached = report["prefix_exact_tokens"] + report["reused_tokens"]
    print(f"\n  {cached} of {report['prompt_tokens']} tokens cached, first token after {report['ttft_s']:.3f} s")
