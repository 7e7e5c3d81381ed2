"""A run's checkpoint as a draft directory that other software loads: options, model card, the check after writing."""
