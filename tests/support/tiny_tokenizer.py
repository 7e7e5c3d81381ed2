"""A real fast tokenizer, built in memory: byte-level BPE over ASCII with a chat template."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
MERGED_WORDS = ("user", "assistant", "system", "the", "one", "two", "Ġthe", "Ġone", "Ġtwo", "ĊĊ")

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(with_generation_tag: bool = False, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """A ChatML tokenizer with fewer than 200 tokens; ASCII text survives encoding and decoding unchanged.

    `with_generation_tag` marks the assistant's tokens with {% generation %} in the template; `chat_template` False
    leaves the template out. End of turn (and eos) is <|im_end|>, padding <|endoftext|>.
    """
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in ["Ċ", "Ġ", *(chr(code) for code in range(33, 127))]:
        vocab[symbol] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in MERGED_WORDS:
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((left, right))
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<|unknown|>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unknown|>",
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        tokenizer.chat_template = GENERATION_TEMPLATE if with_generation_tag else PLAIN_TEMPLATE
    return tokenizer
