"""Mixed load on a real server for a long time; every finished answer is compared with the lone run.

Run from the repository's root: `make soak`, or `cd tools && ../.venv/bin/python -m soak --help`.

| file | owns |
|---|---|
| `server.py` | the server as a process, and what the system says of it |
| `answers.py` | answers in one form, without what differs from run to run |
| `protocols.py` | the answers of each route in that form, whole and as streams |
| `workload.py` | the pool of requests whose answers are known |
| `misuse.py` | requests that must be refused, and how |
| `client.py` | ways to ask: whole, streamed, slowly read, left in the middle |
| `load.py` | who asks what when, and what each answer must be |
| `monitor.py` | memory, files, threads, metrics and health while it runs |
| `report.py` | the verdict, as Markdown and a plot |
"""
