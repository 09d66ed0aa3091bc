"""The go-live list of a running server: health, its model and the length it takes, metrics."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from longspan.errors import ConfigError
from longspan.planning.finding import Finding, judge

_TIMEOUT = 5.0  # seconds
# One of each: a server that has none of a line's names lacks it.
_METRICS = (
    ("vllm:num_requests_running", "sglang:num_running_reqs"),
    ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    ("vllm:prefix_cache_hits", "sglang:cache_hit_rate"),
)


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Model]


def is_address(target: str) -> bool:
    """Raises ConfigError for one of http whose port or host can't be read."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", target):
        return False
    try:
        parts = urlsplit(target)
        known = parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that is no number, or brackets that do not close
        known = False
    if not known:
        raise ConfigError(
            f"{target} is no address: its host or its port can't be read.",
            remedy="Give one such as http://10.0.0.1:8100.",
        )
    return True


def check_server(url: str, context: int | None = None) -> Iterator[Finding]:
    """`context`: tokens it must take."""
    base = url.rstrip("/").removesuffix("/v1")
    status, text = _get(f"{base}/health")
    found = f"HTTP {status}" if status else text
    yield judge(base, "health", status == 200, found, "Look at its log, and at the address.")
    if not status:
        return
    yield _models(base, context)
    status, text = _get(f"{base}/metrics")
    missing = [" or ".join(names) for names in _METRICS if not any(name in text for name in names)]
    found = f"lacks {', '.join(missing)}" if missing else "present"
    yield judge(
        base,
        "metrics",
        status == 200 and not missing,
        found if status == 200 else f"HTTP {status}" if status else text,
        "SGLang needs --enable-metrics; a router has its own.",
    )


def _models(base: str, context: int | None) -> Finding:
    point, remedy = "model", "Compare --max-model-len (or --context-length) with the plan."
    status, text = _get(f"{base}/v1/models")
    try:
        models = _Models.model_validate_json(text).data
    except ValidationError:
        found = f"HTTP {status}, no list of models" if status else text
        return Finding(base, point, "fail", found, remedy)
    names = ", ".join(model.id for model in models)
    length = max((model.max_model_len or 0 for model in models), default=0)
    if context and length and length < context:
        return Finding(base, point, "fail", f"takes {length:,} of {context:,} tokens", remedy)
    if context and models and not length:
        return Finding(base, point, "unknown", f"{names}; it does not say how long", remedy)
    found = f"{names}, {length:,} tokens" if length else names
    return judge(base, point, bool(models), found or "none", remedy)


def _get(url: str) -> tuple[int, str]:
    """(HTTP status, text); status 0 and what is there instead if no HTTP server answers."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except http.client.HTTPException:
        return 0, "what answers does not speak HTTP"
    except (OSError, ValueError) as error:
        return 0, f"nothing answers: {getattr(error, 'reason', error)}"
