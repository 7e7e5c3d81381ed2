"""One stage a command: what each reads and writes."""
