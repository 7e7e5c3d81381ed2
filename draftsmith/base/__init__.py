"""What every room needs: dtypes, devices, rounding, switches, progress, and files that are whole or absent."""
