"""LangChain's stuff chain, unmodified: documents that come again are reused, in any order.

Server: chunkweave serve --model smollm2 --find-chunks --method cacheblend
Client: pip install langchain-classic langchain-openai
"""

import os

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    model=os.environ.get("MODEL", "smollm2"),
    temperature=0,
    max_tokens=24,
)
prompt = ChatPromptTemplate.from_messages([("system", "Answer from this context:\n\n{context}"), ("human", "{input}")])
chain = create_stuff_documents_chain(llm, prompt)

documents = [
    Document(
        "The Selmond Choir was founded by two sisters who taught at the harbour school. It is led by Otto Gunmark, who "
        "came to the town as an organist. On the longest day of the year the choir sings on the quay until the last "
        "ferry has left, and everybody on board sings along."
    ),
    Document(
        "The Gerfern Tower was built to guide ships past the sandbank. A keeper lived below the lamp with his family "
        "until the light was made electric. Today the tower is open in summer, and from its gallery visitors can see "
        "the islands, the mill and, on clear days, the mountains of the mainland."
    ),
    Document(
        "The Ostby Mill lies by the river Lune, where the water falls over a wall of old stones. Karin Halvorsen "
        "bought it as a ruin and grinds rye and barley again. Bakers from the whole valley fetch their flour there on "
        "Fridays, when the mill's own oven is lit and the bread is sold warm."
    ),
]

for order in (documents, documents[::-1]):
    with get_usage_metadata_callback() as used:
        print(chain.invoke({"context": order, "input": "Who leads the Selmond Choir?"}))
    ((_, tokens),) = used.usage_metadata.items()
    print(f"  {tokens['input_token_details']['cache_read']} of {tokens['input_tokens']} tokens reused")
