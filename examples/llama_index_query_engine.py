"""LlamaIndex's query engine, unmodified: nodes that are retrieved again are reused, in any order.

Server: chunkweave serve --model smollm2 --find-chunks --method cacheblend
Client: pip install llama-index-core llama-index-llms-openai-like llama-index-embeddings-openai-like
"""

import os

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")
model = os.environ.get("MODEL", "smollm2")
llm = OpenAILike(model=model, api_base=url, api_key=key, is_chat_model=True, temperature=0, max_tokens=24)
embedder = OpenAILikeEmbedding(model_name=os.environ.get("EMBEDDER", "hashed-ngrams"), api_base=url, api_key=key)

documents = [
    Document(
        text="The Selmond Choir was founded by two sisters who taught at the harbour school. It is led by Otto "
        "Gunmark, who came to the town as an organist. On the longest day of the year the choir sings on the quay "
        "until the last ferry has left, and everybody on board sings along."
    ),
    Document(
        text="The Gerfern Tower was built to guide ships past the sandbank. A keeper lived below the lamp with his "
        "family until the light was made electric. Today the tower is open in summer, and from its gallery visitors "
        "can see the islands, the mill and, on clear days, the mountains of the mainland."
    ),
    Document(
        text="The Ostby Mill lies by the river Lune, where the water falls over a wall of old stones. Karin Halvorsen "
        "bought it as a ruin and grinds rye and barley again. Bakers from the whole valley fetch their flour there on "
        "Fridays, when the mill's own oven is lit and the bread is sold warm."
    ),
]
index = VectorStoreIndex.from_documents(documents, embed_model=embedder)
engine = index.as_query_engine(llm=llm, similarity_top_k=3)

for question in ("Who leads the Selmond Choir?", "Who bought the Ostby Mill?"):
    print(engine.query(question))
