"""Clients that leave: nothing of theirs stays behind, and nothing is left to fail unheard."""

from __future__ import annotations

import gc

import httpx
import pytest
from support.scripted import Running

TEXT = "/v1/completions"


def test_leaving_several_prompts_leaves_no_failure_unheard(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    server.say("word ", repeat=3000)
    body = {"prompt": ["a", "b"], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + TEXT, json=body, timeout=60) as response:
        next(response.iter_lines())
    server.wait_until_idle()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_idle_connection_is_kept_longer_than_clients_keep_it(server: Running) -> None:
    """Those of httpx, aiohttp and nginx live 5, 15 and 60 seconds: the one to close must be the client."""
    assert server.server.config.timeout_keep_alive > 60
