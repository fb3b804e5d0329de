"""Documents between tags inside a message, for clients that cannot send `documents`."""

import html
import re
from collections.abc import Iterable
from itertools import islice

from chunkweave_server.errors import HttpError
from chunkweave_server.requests import ChatBody, CompletionBody, Document, check_documents
from chunkweave_server.settings import LimitSettings

_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_NAMES = {"title": "title", "id": "id", "source": "id"}
"""Attributes of a tag, and the document's field that each sets."""


def marks_documents(texts: Iterable[str], tag: str) -> bool:
    """Whether one of `texts` contains the tag, opening or closing."""
    return any(_tags(tag).search(text) for text in texts)


def cut_out(text: str, tag: str) -> tuple[str, list[Document]]:
    r"""Split a message into its text without documents, and the documents in order. Empty lines replace the documents.

    >>> cut_out('Look: <doc title="Ferry">It leaves at nine.</doc> When does it leave?', "doc")
    ('Look:\n\nWhen does it leave?', [Document(text='It leaves at nine.', title='Ferry', id='')])

    Raises:
        ValueError: the tags do not open and close alternately.
    """
    left, documents, done = [], [], 0
    opened: re.Match[str] | None = None
    for found in _tags(tag).finditer(text):
        closes = found.group(1) == "/"
        if closes == (opened is None):
            raise ValueError(f"</{tag}> without <{tag}>" if closes else f"<{tag}> inside <{tag}>")
        if opened is None:
            left.append(text[done : found.start()])
            opened = found
        else:
            documents.append(Document(text=text[done : found.start()].strip(), **_attributes(opened.group(2))))
            opened = None
        done = found.end()
    if opened is not None:
        raise ValueError(f"<{tag}> is not closed")
    rest = [piece.strip() for piece in (*left, text[done:])] if documents else [text]
    return "\n\n".join(piece for piece in rest if piece), documents


def with_marked_documents(body: CompletionBody, tag: str, limits: LimitSettings) -> CompletionBody:
    """The same request with the texts between tags as its `documents`; `body` itself if it has no tag.

    Only the system message and the last user message are read (of a plain completion, the prompt). Earlier turns are
    not changed.

    Raises:
        HttpError: 400, tags do not match, the request also has `documents` or a corpus, or has too many documents.
    """
    if not marks_documents(body.texts_with_documents, tag):
        return body
    if body.documents or body.chunkweave.corpus is not None:
        message = f"documents are marked by <{tag}>: do not also give documents or chunkweave.corpus"
        raise HttpError(400, message, param="documents")
    tags = (one for text in body.texts_with_documents for one in _tags(tag).finditer(text))
    check_documents(sum(1 for _ in islice(tags, 2 * limits.max_documents + 2)) // 2, limits)
    try:
        cut = [cut_out(text, tag) for text in body.texts_with_documents]
    except ValueError as error:
        where = "messages" if isinstance(body, ChatBody) else "prompt"
        raise HttpError(400, f"{error}: put documents between <{tag}> and </{tag}>", param=where) from error
    documents = [document for _, found in cut for document in found]
    return body.with_texts([text for text, _ in cut]).model_copy(update={"documents": documents})


def _tags(tag: str) -> re.Pattern[str]:
    return re.compile(rf"<(/?){re.escape(tag)}(?![\w-])([^<>]*)>")


def _attributes(text: str) -> dict[str, str]:
    found = {name.lower(): html.unescape(quoted or single) for name, quoted, single in _ATTRIBUTE.findall(text)}
    return {field: found[name] for name, field in reversed(_NAMES.items()) if name in found}
