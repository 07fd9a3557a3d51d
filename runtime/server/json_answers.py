"""JSON as an answer's body."""

import json
from typing import Any

from starlette.responses import Response


class JSONResponse(Response):
    """As Starlette's, for values that repeat what strangers sent: a lone surrogate, which JSON can spell and UTF-8
    can't, becomes a question mark instead of an error of the server's."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
