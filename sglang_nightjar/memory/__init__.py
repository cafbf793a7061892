"""Elastic device memory: who holds how many bytes, and KV buffers that grow and shrink where they are."""
