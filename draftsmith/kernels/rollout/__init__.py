"""The steps of sequential draft heads: corrections of low rank, gates and states, candidates and their paths."""
