"""`longspan bench serve`: a load on a running server, and what its clients see. Any OpenAI-compatible server.

datasets     conversations to hold: drawn at random, replayed from a trace, read from a file
prompts      token ids of exact lengths, or text sized by what the server counted
arrivals     when each begins
dialogue     one conversation as it grows, and the body of its next request
server       HTTP: what the server says of itself, and one streamed request
events       server-sent events out of bytes
reply        one answer out of events, with the time of each arrival
run          holds all conversations on time, and watches whether the client itself keeps up
metrics      latencies, throughput, goodput out of the records
report       tables and JSON; `plot` draws a sweep
command      flags, and the order of it all
"""
