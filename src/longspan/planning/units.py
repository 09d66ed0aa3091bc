"""Bytes as people read them."""

from __future__ import annotations

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def show_bytes(size: float) -> str:
    """In decimal units: 1.56 TB."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
