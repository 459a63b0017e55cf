"""Checkpoints of other libraries in and out: `convert`, on the command line `python -m memzoo.conversion.convert`.

`tables.py` and `options.py` say how a table of weights and of options is read in both directions; `llama.py` and
`fla.py` are such tables; `checkpoint.py` reads and writes folders.
"""
