"""Accept length and speed of a draft against plain decoding of the same target."""
