"""Checkpoints in and out, each of these also on the command line (`python -m memzoo.conversion.convert`, ...).

`convert.py`: those of other libraries to ours and back. `tables.py` and `options.py` say how a table of weights and a
table of options are read in both directions; `formats.py` joins them to what is known of an architecture; `llama.py`
and `fla.py` are those tables; `checkpoint.py` reads and writes folders.
`upcycle.py`: a pretrained transformer with something of ours added to it. `hub.py`: ours as repositories of the Hub.
"""
