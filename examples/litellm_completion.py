"""LiteLLM: a server is `openai/` and its model's name, with its address as `api_base`.

Server: chunkweave serve --model smollm2 --find-chunks --method cacheblend
Client: pip install litellm
"""

import os

from litellm import completion

passages = [
    "The Selmond Choir was founded by two sisters who taught at the harbour school. It is led by Otto Gunmark, who "
    "came to the town as an organist. On the longest day of the year the choir sings on the quay until the last "
    "ferry has left, and everybody on board sings along.",
    "The Ostby Mill lies by the river Lune, where the water falls over a wall of old stones. Karin Halvorsen bought "
    "it as a ruin and grinds rye and barley again. Bakers from the whole valley fetch their flour there on Fridays, "
    "when the mill's own oven is lit and the bread is sold warm.",
]

for order in (passages, passages[::-1]):
    question = "\n\n".join(("Answer from the notes.", *order, "Who leads the Selmond Choir?"))
    answer = completion(
        model=f"openai/{os.environ.get('MODEL', 'smollm2')}",
        api_base=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
    )
    print(answer.choices[0].message.content)
    print(f"  {answer.usage.prompt_tokens_details.cached_tokens} of {answer.usage.prompt_tokens} tokens reused")
