"""Lossless decoding: plain, with draft chains and with draft trees, and the Python API."""
