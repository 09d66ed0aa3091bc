"""`longspan top`: a live view of a running server, of ours or vLLM's, from nothing but its /metrics.

| file | owns |
|---|---|
| `scrape.py` | one answer of /metrics as a `Snapshot`; what may go wrong on the way |
| `figures.py` | rates, shares and percentiles between two snapshots; the JSON form |
| `view.py` | figures as a frame for the terminal |
| `command.py` | flags, the loop, keys |
"""
