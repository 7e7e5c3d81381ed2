"""Features of a target: what a store holds, how it is written, read, checked and packed into rows."""
