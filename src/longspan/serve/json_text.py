"""JSON that can always be sent: a lone surrogate, which a client may have sent, becomes a question mark."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response


def json_bytes(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
