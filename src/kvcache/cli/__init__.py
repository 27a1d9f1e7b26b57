"""The `kvcache` command."""
