"""Decoding rules of block diffusion: pure functions on arrays, no networks, no caches."""
