"""`python -m kvcache` is the `kvcache` command."""

from kvcache.cli.main import main

main()
