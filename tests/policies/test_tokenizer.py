"""Prompts and tokens: templates worked out by hand, and a real tokenizer file that the test writes."""

from __future__ import annotations

import pytest
import torch

from vla_async.policies.tokenizer import (
    ACTION_QUESTION,
    STATE_PROMPT,
    HashingTokenizer,
    PretrainedTokenizer,
    PromptTokenizer,
    action_question,
    decode_text,
    encode_text,
)

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
WORDS = [*SPECIAL, "pick", "up", "the", "cup", "\n", ",", ":", ";", "task", "state", "action", "7", "128"]


@pytest.fixture
def tokenizer_file(tmp_path):
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import Split

    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Split(Regex(r"\w+|[^\w ]| "), "isolated")
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def words(tokens: torch.Tensor) -> list[str]:
    return [WORDS[token] for token in tokens.tolist() if WORDS[token] != "<unk>"]


def test_a_pretrained_tokenizer_writes_the_template_with_its_beginning_and_padding(tokenizer_file):
    prompt = PromptTokenizer(PretrainedTokenizer(tokenizer_file), 12)
    tokens = prompt.tokenize("pick_up the cup\n")
    assert words(tokens) == ["<bos>", "pick", "up", "the", "cup", "\n", "<pad>", "<pad>", "<pad>"]
    assert len(tokens) == 12
    assert int(prompt.mask(tokens).sum()) == 9  # <bos>, four words, three spaces, the line break


def test_the_state_stands_in_the_prompt_as_its_bins(tokenizer_file):
    prompt = PromptTokenizer(PretrainedTokenizer(tokenizer_file), 40, STATE_PROMPT, eos=True)
    tokens = prompt.tokenize("pick up", [7, 128])
    expected = ["<bos>", "task", ":", "pick", "up", ",", "state", ":", "7", "128", ";", "\n", "action", ":", "<eos>"]
    assert [word for word in words(tokens) if word != "<pad>"] == expected
    codes = torch.stack([encode_text("pick up", 20), encode_text("the cup", 20)])
    batch = prompt.with_state(codes, torch.tensor([[7, 128], [128, 7]]))
    assert torch.equal(batch[0], tokens)
    assert torch.equal(batch[1], prompt.tokenize("the cup", [128, 7]))
    with pytest.raises(ValueError, match="needs a state"):
        prompt.tokenize("pick up")


def test_a_tokenizer_that_is_not_there_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"tokenizer=.*empty"):
        PretrainedTokenizer(tmp_path / "empty")


def test_a_tokenizer_file_gets_no_token_that_it_has_not(tmp_path):
    """A token appended to the vocabulary would begin every prompt with an embedding that was never trained."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    def write(*special: str) -> str:
        words = {word: index for index, word in enumerate([*special, "lift", "<unk>"])}
        Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path / "tokenizer.json")

    llama = PretrainedTokenizer(write("<s>", "</s>", "<PAD>"))
    assert (llama.bos_id, llama.eos_id, llama.pad_id, llama.vocab_size) == (0, 1, 2, 5)
    with pytest.raises(ValueError, match="bos=True, but the tokenizer has no such token"):
        PromptTokenizer(PretrainedTokenizer(write("<|endoftext|>")), 10)
    with pytest.raises(ValueError, match=r"names no padding token; give its folder, where tokenizer_config\.json does"):
        PretrainedTokenizer(write("<s>"))


def test_hashed_tokens_are_the_same_everywhere_and_tell_words_apart():
    hashing = HashingTokenizer(1000)
    assert hashing("Pick the cup") == hashing("pick the  cup")
    assert hashing("a, 12") == hashing("a") + hashing(",") + hashing("1") + hashing("2")
    assert len(set(hashing("pick up the red cup and put it down"))) == 9
    assert all(3 <= token < 1000 for token in hashing("a b c d e f g h"))


def test_prompts_that_are_too_long_are_refused():
    prompt = PromptTokenizer(HashingTokenizer(100), 5, ACTION_QUESTION)
    with pytest.raises(ValueError, match=r"more than 5; raise model\.max_tokens"):
        prompt.tokenize("lift")


def test_lower_case_and_suffix():
    hashing = HashingTokenizer(100)
    prompt = PromptTokenizer(hashing, 30, ACTION_QUESTION, suffix=[99], lower=True)
    expected = [1, *hashing("In: What action should the robot take to lift?\nOut:"), 99]
    assert prompt.tokenize("LIFT").tolist() == expected + [0] * (30 - len(expected))


@pytest.mark.parametrize(
    ("options", "said"), [({"template": "go"}, "no {instruction}"), ({"eos": True}, "eos=True, but the tokenizer has no")]
)
def test_templates_that_cannot_work_are_refused(options, said, tokenizer_file):
    tokenizer = PretrainedTokenizer(tokenizer_file)
    tokenizer.eos_id = None
    with pytest.raises(ValueError, match=said):
        PromptTokenizer(tokenizer, 10, **options)


def test_texts_survive_as_bytes():
    for text in ("", "pick up the cup", "prends la tasse étoilée ☕"):
        assert decode_text(encode_text(text, 40).tolist()) == text
    with pytest.raises(ValueError, match="has 4 bytes, but only 3"):
        encode_text("four", 3)


def test_the_lone_space_ends_the_prompt_of_a_llama():
    class Llama:
        vocab_size, pad_id, bos_id, eos_id = 32001, 32000, 1, 2

        def __call__(self, text: str) -> list[int]:
            return [7] if text == "In: What action should the robot take to lift?\nOut:" else []

    prompt = action_question(Llama(), 6)
    assert prompt.tokenize("LIFT").tolist() == [1, 7, 29871, 32000, 32000, 32000]
