"""HTML: the server's page, and answers and benchmarks as files. No network, no build step.

The server's page is static: `static/page.html` and the script beside it, which calls the HTTP API. `views` turns
reports into bars; `render` fills the templates of files.
"""

from chunkweave.page.render import asset, render
from chunkweave.page.views import AnswerView, Bar

__all__ = ["AnswerView", "Bar", "asset", "render"]
