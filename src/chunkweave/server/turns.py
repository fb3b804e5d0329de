"""What the messages of a chat ask."""

from chunkweave.server.answering import Question
from chunkweave.server.refusals import RefusalError
from chunkweave.server.requests import ChatBody


def question_of(body: ChatBody) -> Question:
    """The system message, if there is one, is the instruction; the user's last message is the question.

    Earlier turns may stand between them in a conversation that this server keeps. Without its id they are refused:
    folded into the question they would make another prompt than the one that was meant.

    Raises:
        RefusalError: there is no question, or messages that mean nothing here.
    """
    messages = list(body.messages)
    system = messages.pop(0).text if messages[0].role in ("system", "developer") else None
    if not messages or messages[-1].role != "user":
        raise RefusalError(400, "the last message must be the user's: it is the question", param="messages")
    if any(message.role in ("system", "developer") for message in messages):
        raise RefusalError(400, "only the first message can be the system's", param="messages")
    if not messages[-1].text.strip():
        raise RefusalError(400, "the question is empty", param=f"messages[{len(body.messages) - 1}].content")
    earlier = messages[:-1]
    if earlier and body.chunkweave.conversation_id is None:
        told = "earlier turns need chunkweave.conversation_id: the server keeps them; or send the last message alone"
        raise RefusalError(400, told, param="messages[0]", code="unsupported_conversation")
    return Question(messages[-1].text, system, sum(message.role == "user" for message in earlier))
