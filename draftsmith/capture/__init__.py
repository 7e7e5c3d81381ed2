"""Running a target over samples to fill a feature store."""
