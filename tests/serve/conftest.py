"""The server for all HTTP tests."""

from support.reciting import server, shared_server, tokenizer

__all__ = ["server", "shared_server", "tokenizer"]
