"""What people look at in a browser: the server's page, and answers and benchmarks as files. No network, no build step.

`views` turns reports into what is drawn, `render` fills the templates. htmx (static/htmx.min.js, 2.0.11, Zero-Clause
BSD) fetches and swaps pieces of the server's page.
"""

from chunkweave.page.render import asset, render
from chunkweave.page.views import AnswerView, Bar, FullEstimate, share_of_kinds

__all__ = ["AnswerView", "Bar", "FullEstimate", "asset", "render", "share_of_kinds"]
