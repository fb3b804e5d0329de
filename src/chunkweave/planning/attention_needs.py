"""Which methods look at attention: at the question's while they weave, or at a chunk's when it was computed."""

from chunkweave.config import DeviationFactor, ReuseConfig


def reads_question(method: str, reuse: ReuseConfig) -> bool:
    """Whether what is recomputed depends on the question.

    >>> reads_question("query", ReuseConfig()), reads_question("cacheblend", ReuseConfig())
    (True, False)
    """
    return method == "query" or (method == "cachecraft" and reuse.focus)


def asks_again(method: str, reuse: ReuseConfig) -> bool:
    """Whether the question is asked again over what was recomputed, which is then recomputed no more.

    What was recomputed first saw the KV of that time: beside KV that is finished it would come out otherwise.

    >>> asks_again("query", ReuseConfig())
    False
    """
    return method == "query" and reuse.query.rounds > 1


def needs_profiles(method: str, reuse: ReuseConfig) -> bool:
    """Whether segments are scored by what their tokens attended to when they were computed (`AttentionProfile`).

    >>> needs_profiles("h2o", ReuseConfig()), needs_profiles("query", ReuseConfig())
    (True, False)
    """
    if method == "query":
        return reuse.query.factor is DeviationFactor.STORED or reuse.query.mixed_share > 0.0
    return method in ("cachecraft", "h2o")
