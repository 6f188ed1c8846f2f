"""Lossless decoding: the autoregressive yardstick and the draft-and-verify loop, each one dispatch per generation."""
