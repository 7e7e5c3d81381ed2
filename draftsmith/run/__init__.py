"""What a run is: its recipe, its files, its stamps."""
