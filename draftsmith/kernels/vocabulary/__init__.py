"""Operations over the vocabulary: argmax, softmax statistics, keys that order tokens, noise by counter."""
