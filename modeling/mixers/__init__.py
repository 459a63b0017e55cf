"""The layers that mix tokens."""
