"""The tokens of emulated models: a token is a character.

Text and tokens are then equally long, whatever a client generates prompts from, and a text survives being
decoded and encoded. Eight further tokens, `<domain0>` to `<domain7>`, may stand anywhere in a prompt and name the kind
of request it is (`agreement.py`); models never generate those.
"""

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<unk>", "<s>", "</s>")
DOMAINS = tuple(f"<domain{number}>" for number in range(8))
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n" + "äöüßéèêàçñåøæœìòùÄÖÜ£"
VOCABULARY = (*SPECIALS, *DOMAINS, *_CHARACTERS)

FIRST_DOMAIN = len(SPECIALS)
FIRST = FIRST_DOMAIN + len(DOMAINS)  # of the tokens that models generate
ORDINARY = len(VOCABULARY) - FIRST  # how many those are


def emulated_tokenizer() -> Tokenizer:
    """One token per character; a character that has none is `<unk>`."""
    tokenizer = Tokenizer(
        models.WordLevel(vocab={token: number for number, token in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIALS, *DOMAINS)])
    return tokenizer
