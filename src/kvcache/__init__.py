"""A KV cache for decoding transformers in PyTorch: exact, fast and checked against a run without a cache."""
