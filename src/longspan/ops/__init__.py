"""The operators of the model: one file each with its contract, its maths and its torch reference."""
