"""What a decoding step does to the numbers that it keeps of each row."""
