"""The files of the page as the server sends them; no browser is needed."""

from __future__ import annotations

import re

import pytest
from support.scripted import Reciter, Running, ScriptedModel, running_server

from longspan.chat import Tokenizer
from longspan.serve.page import PAGE_PATHS


def test_every_file_is_sent_without_a_key_and_under_a_policy_that_forbids_all_else(
    tokenizer: Tokenizer,
) -> None:
    with running_server(ScriptedModel(tokenizer, Reciter(tokenizer)), tokenizer, api_key="s3cret") as server:
        assert {"/", "/favicon.ico", "/page/style.css", "/page/main.js"} <= PAGE_PATHS
        for path in PAGE_PATHS:
            answer = server.get(path)
            assert answer.status_code == 200 and answer.content
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
        assert server.get("/v1/models").status_code == 401
        assert server.get("/page/../app.py").status_code == 401


@pytest.mark.parametrize("path", ["/", "/page/main.js"])
def test_a_file_that_the_browser_has_is_not_sent_again(server: Running, path: str) -> None:
    tag = server.get(path).headers["ETag"]
    again = server.get(path, headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert server.get(path, headers={"If-None-Match": '"older"'}).status_code == 200


def test_what_files_refer_to_exists_and_is_the_servers_own(server: Running) -> None:
    for path in PAGE_PATHS:
        text = server.get(path).text
        named = re.findall(r'(?:src|href)="([^"]+)"', text) if path == "/" else []
        named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        assert {f"/{name}" for name in named} <= PAGE_PATHS, path


def test_no_file_makes_markup_of_text_or_styles_of_markup(server: Running) -> None:
    for path in PAGE_PATHS:
        text = server.get(path).text
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|<script>| style=", text
        )
