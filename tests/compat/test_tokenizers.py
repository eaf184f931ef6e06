"""``tokenize`` with a fast tokenizer of transformers gives the tokens of a call."""

import pickle
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from aioloader import DataLoader
from aioloader.datasets import from_iterable

NAMES = ["[PAD]", "[BOS]", "[UNK]", "[", "]", "BOS", "red", "fox"]
WORDS = {name: number for number, name in enumerate(NAMES)}
TEXTS = ["red fox", "", "fox [BOS] red", "fox " * 30, "none of these"]


def tokenizer(**options: Any) -> Any:
    """Return a tokenizer that pads and truncates, as many saved ones."""
    made: Any = Tokenizer(models.WordLevel(WORDS, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=9)
    special = {"bos_token": "[BOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special, **options)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("is_function", [False, True])
def test_a_stream_has_the_tokens_of_a_call(split: bool, is_function: bool) -> None:
    """Whatever its padding and truncation are, and after calls that change them."""
    made = tokenizer(split_special_tokens=split)
    stream = from_iterable(TEXTS).tokenize(made.__call__ if is_function else made)
    wanted = made(TEXTS)["input_ids"]
    assert [*map(len, wanted)] == [3, 1, 6 if split else 4, 31, 4]
    made(TEXTS, padding=True, truncation=True, max_length=3)
    streams = [stream] if is_function else [stream, pickle.loads(pickle.dumps(stream))]
    for variant in streams:
        loader: Any = DataLoader(variant, None, collate_fn=list)
        assert [*map(list, loader)] == wanted
    if not is_function:
        flipped = tokenizer(split_special_tokens=not split)
        assert from_iterable(TEXTS).tokenize(flipped).describe() != stream.describe()
