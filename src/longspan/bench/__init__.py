"""`longspan bench`: prefill and decode speed of a model by depth, held against the limits of the machine.

`workload` says what a step must read and compute, from the config alone; `measure` runs steps of the model;
`report` puts the two together as a table, JSON and a plot; `command` reads the flags.
"""
