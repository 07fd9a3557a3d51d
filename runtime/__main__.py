"""`python -m serai.runtime` is the `serai` command."""

from serai.runtime.cli.main import main

main()
