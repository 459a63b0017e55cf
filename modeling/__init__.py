"""How a model computes: decoder, cache, sequences, mixers and architectures."""
