"""`python -m draftsmith` is the command line."""

from draftsmith.cli import main

main()
