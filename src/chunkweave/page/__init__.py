"""The server's page: `static/page.html` and the script beside it, which calls the HTTP API. No build step.

`views` turns reports into bars.
"""

from chunkweave.page.files import STATIC, asset
from chunkweave.page.views import AnswerView, Bar

__all__ = ["STATIC", "AnswerView", "Bar", "asset"]
