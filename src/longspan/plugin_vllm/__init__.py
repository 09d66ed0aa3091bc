"""Longspan's model inside vLLM: the second host.

vLLM owns scheduling, paging, prefix cache, process groups, transfers and HTTP; this room owns the model's
entry, the bytes of its caches and the metadata of a step. Both functions here are entry points that vLLM
calls in every process, so they import nothing heavy and may be called again.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of `vllm.general_plugins`: all that vLLM must know. Refuses untested releases."""
    from longspan.plugin_vllm import policy

    policy.require_tested_release()
    policy.register_everything()


def platform() -> str | None:
    """Entry point of `vllm.platform_plugins`: our CPU platform, or None where vLLM is no CPU build."""
    from longspan.plugin_vllm import policy

    return policy.platform_class()
