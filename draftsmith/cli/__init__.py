"""The command line: commands, console, error reporting."""
