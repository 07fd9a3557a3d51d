"""Text to ids and back, by both file formats, with the two doors kept apart."""

import itertools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Library

from serai.runtime.errors import BadParameter, WeightsInvalid
from serai.runtime.text.byte_bpe import KIMI_PATTERN, from_alphabet, to_alphabet
from serai.runtime.text.tiktoken_ranks import derive_merges, read_ranks
from serai.runtime.text.tokenizer import PIECE_CHARS, RUN_CHARS, Tokenizer, chop
from tests.data import make_small_tokenizer as maker
from tests.shared import shared

SMALL = maker.FOLDER
FIRST_CONTROL = maker.TOKENS
VOCAB = maker.TOKENS + 256
RANKS = read_ranks(SMALL / "tiktoken.model")
TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(
        [*maker.NAMED, "message", " the", "世界", "'LL", "\r\n", "  ", "<|", "|>", "1234", "\u00a0", "\u2028"]
    )
).map("".join)


def copy_small(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes((SMALL / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("ranked")
    return Tokenizer.load(copy_small(folder, "tiktoken.model", "tokenizer_config.json"), VOCAB)


@pytest.fixture(scope="module")
def described() -> Tokenizer:
    return Tokenizer.load(SMALL, VOCAB)


def by_definition(text: str) -> list[int]:
    """Split by the pattern; a piece that is a token stands for itself, others merge by lowest rank, leftmost first."""
    ids: list[int] = []
    for piece, _ in pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated").pre_tokenize_str(text):
        whole = piece.encode()
        parts = [whole] if whole in RANKS else [bytes((byte,)) for byte in whole]
        while len(parts) > 1:
            joined = [RANKS.get(left + right, len(RANKS)) for left, right in itertools.pairwise(parts)]
            at = joined.index(min(joined))
            if joined[at] == len(RANKS):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """`tokenizer.json` changed and written to `folder`."""
    described = json.loads((SMALL / "tokenizer.json").read_bytes())
    change(described)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


def test_the_small_tokenizer_is_what_its_script_makes() -> None:
    assert maker.train(maker.CORPUS, maker.TOKENS) == RANKS
    assert json.loads((SMALL / "tokenizer.json").read_bytes()) == maker.describe(RANKS)


@given(text=TEXTS)
@settings(deadline=None)
def test_both_formats_give_the_ids_of_the_definition(described: Tokenizer, ranked: Tokenizer, text: str) -> None:
    for tokenizer in (described, ranked):
        ids = tokenizer.encode(text)
        assert ids == by_definition(text)
        assert tokenizer.decode(ids) == text


def test_the_merges_recovered_from_ranks_are_those_of_the_definition() -> None:
    merges, underivable = derive_merges(RANKS)
    assert merges == maker.merges_of(RANKS)
    assert underivable == 0


def test_a_token_that_no_merges_reach_is_still_used_as_a_whole_piece(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy_small(tmp_path, "tiktoken.model", "tokenizer_config.json")
    whole = b"qqqzzz"
    lines = (tmp_path / "tiktoken.model").read_bytes() + b"cXFxenp6 %d\n" % len(RANKS)
    (tmp_path / "tiktoken.model").write_bytes(lines)
    config = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    moved = {str(int(slot) + 1): entry for slot, entry in config["added_tokens_decoder"].items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": moved}))
    tokenizer = Tokenizer.load(tmp_path)
    assert f"1 of {len(RANKS) + 1} tokens can't be reached by merges" in caplog.text
    assert tokenizer.encode("qqqzzz") == [len(RANKS)]
    assert tokenizer.encode("qqqzzzy") == [*whole, ord("y")]


@given(text=TEXTS)
@settings(deadline=None)
def test_the_text_door_never_gives_a_control_id(described: Tokenizer, ranked: Tokenizer, text: str) -> None:
    """B76: whatever the text spells."""
    for tokenizer in (described, ranked):
        assert not tokenizer.special_ids.intersection(tokenizer.encode(text))


@pytest.mark.parametrize("name", [*maker.NAMED, f"<|reserved_token_{FIRST_CONTROL + 7}|>"])
def test_a_control_name_in_text_stays_text_and_by_the_markup_door_is_its_id(
    described: Tokenizer, ranked: Tokenizer, name: str
) -> None:
    """B76."""
    expected = FIRST_CONTROL + maker.NAMED.get(name, 7)
    for tokenizer in (described, ranked):
        text = f"a {name}b{name}"
        ids = tokenizer.encode(text)
        assert max(ids) < FIRST_CONTROL
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_id(name) == expected
        assert tokenizer.special_tokens[name] == expected


def test_a_control_name_that_is_also_a_word_in_the_vocabulary_stays_out_of_text(tmp_path: Path) -> None:
    """B76: even where the whole piece, or a merge, would lead to it."""
    word = "Ġthe"
    rank = RANKS[b" the"]
    edit(tmp_path, lambda it: it["added_tokens"].append({"id": rank, "content": word, "special": True}))
    tokenizer = Tokenizer.load(tmp_path, VOCAB)
    ids = tokenizer.encode("in the theatre the\n")
    assert rank not in ids
    assert tokenizer.decode(ids) == "in the theatre the\n"
    assert tokenizer.token_id(word) == rank


def test_an_unknown_control_name_is_refused_by_name(described: Tokenizer) -> None:
    with pytest.raises(BadParameter, match=r"no control token '<\|im_end\|>'"):
        described.token_id("<|im_end|>")
    with pytest.raises(BadParameter, match="no control token 'message'"):
        described.token_id("message")


def test_control_tokens_have_no_text_unless_asked_for(described: Tokenizer) -> None:
    ids = [described.token_id("<|open|>"), *described.encode("message"), described.token_id("<|sep|>")]
    assert described.decode(ids) == "message"
    assert described.decode(ids, control=True) == "<|open|>message<|sep|>"
    assert described.token_bytes(ids[0]) == b""
    assert described.token_bytes(ids[0], control=True) == b"<|open|>"


def test_token_bytes_are_the_raw_bytes(described: Tokenizer, ranked: Tokenizer) -> None:
    for tokenizer in (described, ranked):
        assert {tokenizer.token_bytes(rank): rank for rank in range(FIRST_CONTROL)} == RANKS


def test_part_of_a_character_decodes_to_a_replacement(described: Tokenizer) -> None:
    ids = described.encode("🙏")
    assert len(ids) > 1
    assert described.decode(ids) == "🙏"
    assert "\ufffd" in described.decode(ids[:-1])


def test_ids_the_model_has_and_the_tokenizer_does_not_use_mean_no_text() -> None:
    tokenizer = Tokenizer.load(SMALL, VOCAB + 100)
    assert tokenizer.vocab_size == VOCAB + 100
    assert tokenizer.decode([*tokenizer.encode("one"), VOCAB + 50]) == "one"


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(described: Tokenizer, token: int) -> None:
    with pytest.raises(BadParameter, match=f"run from 0 to {VOCAB - 1}, and {token} is not one"):
        described.decode([1, token])


@pytest.mark.parametrize("text", ["a\ud800b", "\udc00", "x" * 1000 + "\udfff"])
def test_a_lone_surrogate_is_refused_with_its_place(described: Tokenizer, text: str) -> None:
    with pytest.raises(BadParameter, match="lone surrogate"):
        described.encode(text)


def test_bytes_are_not_text(described: Tokenizer) -> None:
    with pytest.raises(BadParameter, match="must be a str, and is bytes"):
        described.encode(b"text")  # type: ignore[arg-type]


def test_the_fingerprint_knows_tokens_merges_names_and_pattern(
    tmp_path: Path, described: Tokenizer, ranked: Tokenizer
) -> None:
    assert described.fingerprint() == Tokenizer.load(SMALL).fingerprint()
    assert len(described.fingerprint()) == 64
    assert described.fingerprint() != ranked.fingerprint()  # one states its pattern otherwise
    (tmp_path / "name").mkdir()
    (tmp_path / "merge").mkdir()
    renamed = edit(tmp_path / "name", lambda it: it["added_tokens"][3].update(content="<|begin|>"))
    shorter = edit(tmp_path / "merge", lambda it: it["model"]["merges"].pop())
    prints = {described.fingerprint(), Tokenizer.load(renamed).fingerprint(), Tokenizer.load(shorter).fingerprint()}
    assert len(prints) == 3


def test_a_foreign_pattern_is_used_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def generic(it: dict[str, Any]) -> None:
        it["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

    edit(tmp_path, generic)
    tokenizer = Tokenizer.load(tmp_path)
    assert "does not split text as Kimi's tokenizers do" in caplog.text
    assert tokenizer.decode(tokenizer.encode("camelCase 12345")) == "camelCase 12345"


def test_kimis_pattern_spelled_otherwise_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def respell(it: dict[str, Any]) -> None:
        split = it["pre_tokenizer"]["pretokenizers"][0]
        split["pattern"]["Regex"] = split["pattern"]["Regex"].replace(r"[\p{Han}]+", r"\p{Han}+", 1)

    edit(tmp_path, respell)
    with caplog.at_level(logging.WARNING):
        Tokenizer.load(tmp_path)
    assert caplog.text == ""


def test_merges_written_as_one_string_are_read_too(tmp_path: Path, described: Tokenizer) -> None:
    edit(tmp_path, lambda it: it["model"].update(merges=[" ".join(pair) for pair in it["model"]["merges"]]))
    assert Tokenizer.load(tmp_path, VOCAB).fingerprint() == described.fingerprint()


def test_a_folder_without_a_tokenizer_is_told_so(tmp_path: Path) -> None:
    assert not Tokenizer.present(tmp_path)
    assert Tokenizer.present(SMALL)
    with pytest.raises(WeightsInvalid, match=r"has no tokenizer \(tokenizer.json or tiktoken.model\)"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused() -> None:
    with pytest.raises(WeightsInvalid, match=f"ids up to {VOCAB - 1}, but the model's vocabulary ends at 511"):
        Tokenizer.load(SMALL, 512)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda it: it.pop("model"), "not a tokenizer with a BPE model"),
        (lambda it: it["model"].update(dropout=0.1), "dropout=0.1"),
        (lambda it: it["model"]["vocab"].pop("a"), "lacks 1 of the 256 byte tokens"),
        (lambda it: it["model"]["vocab"].update({"▁the": 9999}), "not written in the byte alphabet"),
        (lambda it: it["model"]["vocab"].update(zz=5), "gives two tokens one id"),
        (lambda it: it["added_tokens"].append(it["added_tokens"][0]), "two added tokens one id"),
        (lambda it: it["pre_tokenizer"].update(type="Nonsense"), "pre_tokenizer that can't be read"),
    ],
)
def test_a_damaged_tokenizer_json_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    edit(tmp_path, change)
    with pytest.raises(WeightsInvalid, match=sentence) as caught:
        Tokenizer.load(tmp_path)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b"AA== 0\n", b"AA== zero\n", "line 1 is not a base64 token"),
        (b"AA== 0\n", b"A*== 0\n", "line 1 is not a base64 token"),
        (b"AQ== 1\n", b"AQ==\n", "line 2 is not a base64 token"),
        (b"AQ== 1\n", b"AA== 1\n", "line 2 repeats a token"),
        (b"AQ== 1\n", b"", "ranks are not 0 to"),
        (b"AQ== 1\n", b"AQEBAQEBAQ== 1\n", "lacks 1 of the 256 single bytes"),
    ],
)
def test_a_damaged_rank_file_is_refused_by_line(tmp_path: Path, old: bytes, new: bytes, sentence: str) -> None:
    path = copy_small(tmp_path, "tiktoken.model", "tokenizer_config.json") / "tiktoken.model"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(WeightsInvalid, match=sentence):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"5": {"content": "[BOS]"}}, "belong to different models"),
        ({str(FIRST_CONTROL): {"content": "[X]"}, str(FIRST_CONTROL + 1): {"content": "[X]"}}, "one name to two"),
        ({"one": {"content": "[X]"}}, "no readable added_tokens_decoder"),
        ({str(FIRST_CONTROL): {}}, "no readable added_tokens_decoder"),
    ],
)
def test_names_that_do_not_fit_the_ranks_are_refused(tmp_path: Path, names: dict[str, Any], sentence: str) -> None:
    copy_small(tmp_path, "tiktoken.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    with pytest.raises(WeightsInvalid, match=sentence):
        Tokenizer.load(tmp_path)


def test_a_rank_file_without_names_keeps_the_reserved_ones_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(copy_small(tmp_path, "tiktoken.model"), FIRST_CONTROL + 4)
    assert "tokenizer_config.json is missing" in caplog.text
    assert list(tokenizer.special_tokens) == [f"<|reserved_token_{FIRST_CONTROL + n}|>" for n in range(4)]


@given(st.binary(max_size=20))
def test_the_byte_alphabet_writes_every_byte_visibly_and_back(data: bytes) -> None:
    written = to_alphabet(data)
    assert from_alphabet(written) == data
    assert len(written) == len(data)
    assert written == "" or (written.isprintable() and not any(char.isspace() for char in written))


def chop_by_definition(text: str) -> list[str]:
    """One character at a time."""
    pieces = []
    for start in range(0, len(text), PIECE_CHARS):
        current, run = "", 0
        for char in text[start : start + PIECE_CHARS]:
            run = run + 1 if current and char.isspace() == current[-1].isspace() else 1
            if run > RUN_CHARS:
                pieces.append(current)
                current, run = "", 1
            current += char
        pieces.append(current)
    return pieces


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", " ", "\u001c", "ab ", "世"]),
            st.sampled_from([1, 2, 12_499, 12_500, 12_501, RUN_CHARS - 1, RUN_CHARS, RUN_CHARS + 1, 2 * RUN_CHARS + 1]),
        ),
        max_size=6,
    )
)
@settings(deadline=None, max_examples=25)
def test_huge_texts_are_chopped_where_kimis_tokenizer_chops_them(runs: list[tuple[str, int]]) -> None:
    text = "".join(unit * times for unit, times in runs)
    assert list(chop(text)) == chop_by_definition(text)


def test_a_text_of_more_than_a_piece_is_chopped_at_whole_pieces(described: Tokenizer) -> None:
    text = "ab " * 300_000
    pieces = list(chop(text))
    assert [len(piece) for piece in pieces] == [PIECE_CHARS, PIECE_CHARS, 100_000]
    ids = described.encode(text)
    assert ids == [token for piece in pieces for token in described.encode(piece)]
    assert described.decode(ids) == text


def test_the_short_and_the_long_way_to_encode_agree(described: Tokenizer) -> None:
    text = maker.CORPUS
    assert len(text) > 256
    assert described.encode(text) == by_definition(text)


@pytest.mark.parametrize("name", ["kimi_k3_f32", "kimi_linear_f32"])
def test_the_reference_checkpoints_tokenize_as_the_library_does(name: str) -> None:
    folder = shared("oracle", name)
    library = Library.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    for text in ("Hello world, it's 12345 中文字符 test\n\n  x=1 café", maker.CORPUS):
        assert tokenizer.encode(text) == library.encode(text).ids


KIMI_VECTORS = {
    "The capital of France is": [1008, 10484, 318, 15383, 387],
    "Hello, world!": [19180, 11, 2695, 0],
    "Hello\n\nworld  ": [19180, 382, 23617, 256],
    "I'M we're they'LL 1234567": [40, 103645, 13810, 1129, 6, 5847, 220, 6694, 12972, 22],
    "你好，世界！漢字": [33845, 378, 2243, 856, 1435, 95, 1855],
    "Привет — café naïve": [159025, 63694, 4275, 70591, 7915, 44187, 367],
    "Tabs\tand\r\nlines\u00a0end": [46154, 58443, 462, 11541, 5406, 517],
    "a\u001cb": [64, 216, 65],
    " \u001c a": [220, 216, 261],
    "a\u2028b": [64, 390, 101, 65],
    "def getUserName(self):\n    return 12345": [1166, 922, 3479, 1263, 2929, 2360, 274, 745, 220, 6694, 2899],
    "a <|open|> b [BOS] c": [64, 22652, 4454, 91, 29, 291, 793, 33, 4110, 60, 275],
}
KIMI_LENGTHS = {"a": 3126, " ": 100, "🙂": 50_002}


def test_a_real_checkpoint_gives_the_known_ids() -> None:
    """Opt-in: set SERAI_KIMI_TOKENIZER to a folder with the tokenizer files of Kimi K3, K2 or Kimi-Linear."""
    folder = os.environ.get("SERAI_KIMI_TOKENIZER")
    if not folder:
        pytest.skip("needs SERAI_KIMI_TOKENIZER, a folder with a real Kimi tokenizer")
    tokenizer = Tokenizer.load(Path(folder))
    for text, ids in KIMI_VECTORS.items():
        assert tokenizer.encode(text) == ids, text
    for char, count in KIMI_LENGTHS.items():
        assert len(tokenizer.encode(char * 25_001)) == count
