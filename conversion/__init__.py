"""Checkpoints of other libraries in and out: `convert`, on the command line `python -m memzoo.conversion.convert`.

`tables.py` and `options.py` say how a table of weights and a table of options are read in both directions;
`formats.py` joins them to what is known of an architecture; `llama.py` and `fla.py` are those tables; `checkpoint.py`
reads and writes folders.
"""
