"""What a request may ask for, whether our engine answers it or vLLM: refused before anything is computed."""

from chunkweave.conversation.registry import Conversations
from chunkweave.server.refusals import RefusalError
from chunkweave.server.requests import ReuseField
from chunkweave.server.settings import LimitSettings


def check_reuse(reuse: ReuseField, limits: LimitSettings, *, calibrated: bool) -> None:
    """Hold a request's method_requests against what there is.

    Raises:
        RefusalError: 400, more chunks than a request may have, or a quality that this model was not `calibrated` for.
    """
    if reuse.top_k is not None and reuse.top_k > limits.max_documents:
        told = f"chunkweave.top_k must be at most {limits.max_documents}"
        raise RefusalError(400, told, param="chunkweave.top_k")
    # The engine's own words name the model's folder.
    if reuse.quality not in (None, "exact") and reuse.method is None and not calibrated:
        told = "this model was not calibrated: quality can only be 'exact'; or name a method"
        raise RefusalError(400, told, param="chunkweave.quality", code="not_calibrated")


def check_documents(count: int, limits: LimitSettings) -> None:
    """Refuse more documents than a request may have.

    Raises:
        RefusalError: 400.
    """
    if count > limits.max_documents:
        told = f"a request may have {limits.max_documents} documents, not {count}"
        raise RefusalError(400, told, param="documents", code="too_many_documents")


def check_earlier(conversations: Conversations, conversation_id: str | None, salt: str, *, earlier: int) -> None:
    """Earlier turns are kept here: what a client sends of them can only be held against that.

    Raises:
        RefusalError: 409, the conversation here has had more or fewer than `earlier` questions.
    """
    if conversation_id is None or not earlier:
        return
    standing = conversations.state((salt, conversation_id))
    here = 0 if standing is None else standing.turn_count
    if earlier != here:
        told = (
            f"the messages hold {earlier} earlier questions, but this conversation has had {here} here: "
            f"send the last message alone to go on from those, or take a new conversation_id"
        )
        raise RefusalError(409, told, param="messages", code="conversation_mismatch")


def answer_tokens(asked: int | None, limits: LimitSettings) -> int:
    """Most tokens of an answer.

    Raises:
        RefusalError: 400, more are asked for than an answer may have.
    """
    most = limits.max_answer_tokens
    if asked is not None and asked > most:
        raise RefusalError(400, f"max_tokens must be at most {most}, not {asked}", param="max_tokens")
    return min(limits.default_answer_tokens, most) if asked is None else asked
