"""`python -m draftsmith` is the command line."""

from draftsmith.cli.app import main

main()
