"""Which methods look at attention: at the question's while they weave, or at a chunk's when it was computed."""

from chunkweave.config import DeviationFactor, ReuseConfig


def reads_question(method: str, reuse: ReuseConfig) -> bool:
    """Whether what is recomputed depends on the question.

    >>> reads_question("query", ReuseConfig()), reads_question("cacheblend", ReuseConfig())
    (True, False)
    """
    return method == "query" or (method == "cachecraft" and reuse.focus)


def needs_profiles(method: str, reuse: ReuseConfig) -> bool:
    """Whether segments are scored by what their tokens attended to when they were computed (`AttentionProfile`).

    >>> needs_profiles("h2o", ReuseConfig()), needs_profiles("query", ReuseConfig())
    (True, False)
    """
    if method == "query":
        return reuse.query.factor is DeviationFactor.STORED or reuse.query.mixed_share > 0.0
    return method in ("cachecraft", "h2o")
