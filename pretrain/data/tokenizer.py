"""Tokenizers: SentencePiece models trained here, and any Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError, quote
from pretrain.data.tokenizer_files import call_quietly, check_ids, read_file
from pretrain.utils.env_check import check_variables

END_OF_DOCUMENT = "<|endoftext|>"
SENTENCEPIECE_FILE = "tokenizer.model"
# The training options that shape a trained model; part of the cache key of the built-in corpus.
SENTENCEPIECE_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    # Runs of spaces become pieces: the standard library takes 3.4 bytes a token with them at 4,096 pieces.
    "allow_whitespace_only_pieces": True,
    # Characters beyond this share of the text are spelled in bytes, which costs little and saves pieces.
    "character_coverage": 0.9999,
    "unk_id": 0,
    "eos_id": 1,
    "eos_piece": END_OF_DOCUMENT,
    "bos_id": -1,
    "pad_id": -1,
    # Text is handed over in chunks far below this; the default would drop long lines.
    "max_sentence_length": 1 << 20,
    # Written into the model file: fixed, so that the file does not depend on the machine. The pieces never
    # do.
    "num_threads": 2,
}
_CHUNK = 4000  # characters per "sentence" handed to the trainer
SPACE_MARK = "\u2581"  # how SentencePiece writes a space inside a piece
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_END_TOKENS = [END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>"]
_HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", SENTENCEPIECE_FILE]


class Tokenizer(ABC):
    """Text to token ids and back. Instances are read-only and may be shared by threads."""

    name: str
    """Short name for messages and ``meta.json``."""
    vocab_size: int
    """Number of token ids: they are 0 … vocab_size - 1."""
    end_of_document: int
    """Id of the token that is put after every document."""
    threads: int | None = None
    """Threads of :meth:`encode_batch` for SentencePiece models, all cores by default; the ``tokenizers``
    library goes by RAYON_NUM_THREADS."""
    _token_bytes: np.ndarray | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of *text*, any string that UTF-8 can write, without any special token added."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``[encode(text) for text in texts]``, on several threads."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of *ids*; special tokens give no text, incomplete UTF-8 gives U+FFFD. UserError for unknown
        ids."""

    @abstractmethod
    def read_back(self, text: str) -> str:
        """What the ids of *text* spell: *text*, unless the tokenizer changes it. Special tokens that it
        spells out are part of it."""

    @abstractmethod
    def special_texts(self) -> list[str]:
        """Texts of the tokens that stand for no text: control strings. In a document some libraries take them
        for these tokens, others for text."""

    def spelled_bytes(self) -> np.ndarray:
        """token_bytes, but of special tokens that can be spelled out in a text the bytes of that, int64
        [vocab_size]."""
        return self.token_bytes()

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each token stands for, int64 [vocab_size], read-only; special tokens 0.

        Summed over the encoding of a text this is the text's UTF-8 length, so that loss in nats per token
        becomes bits per byte; a tokenizer that puts a space before every text has one byte more of each.
        Raises UserError for tokenizers whose tokens do not spell their text.
        """
        if self._token_bytes is None:
            self._token_bytes = self._count_bytes()
            self._token_bytes.flags.writeable = False
        return self._token_bytes

    @abstractmethod
    def _count_bytes(self) -> np.ndarray:
        """What :meth:`token_bytes` returns; called once."""

    def check_spelling(self) -> None:
        """Raise UserError if a new corpus cannot be made with this tokenizer, since its tokens do not spell
        the text.

        Corpora and runs that are older than this check still work.
        """
        self.token_bytes()

    @abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that :func:`load_tokenizer` reads into *folder*, creating it."""

    @abstractmethod
    def content_hash(self) -> str:
        """Hexadecimal SHA-256 of what determines the ids; unchanged by saving and loading."""

    def _check_ids(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        token_ids = np.asarray(ids, np.int64)
        wrong = token_ids[(token_ids < 0) | (token_ids >= self.vocab_size)]
        if wrong.size:
            raise UserError(
                f"tokens: id {wrong[0]} is beyond the vocabulary of {self.name}; "
                f"valid: 0..{self.vocab_size - 1}"
            )
        return token_ids.tolist()


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hexadecimal SHA-256 of a tokenizer's definition; others may give the same ids (see
    same_tokenizer.py)."""
    return tokenizer.content_hash()


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Those trained by :meth:`train` decode what they encode, for any UTF-8 text.

    SentencePiece writes a space as U+2581 inside pieces, so that a U+2581 in the text would decode to a
    space. Here it is spelled by its three byte tokens, as any character outside the vocabulary is; these
    decode to U+2581.
    """

    def __init__(self, model: bytes, name: str | None = None, file: str | os.PathLike[str] = "") -> None:
        import sentencepiece

        where = f"{os.fspath(file)!r} is " if file else ""

        try:
            if not model:
                raise RuntimeError("an empty file is taken for no model at all")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._processor.id_to_piece(list(range(self._processor.vocab_size())))  # are they UTF-8?
            first_piece = self._processor.encode("a", out_type=str)[0]
        except (RuntimeError, OSError, UnicodeDecodeError, IndexError) as error:
            raise UserError(f"tokenizer: {where}not a SentencePiece model, or a damaged one") from error
        self._model = model
        processor = self._processor
        self.vocab_size = processor.vocab_size()
        self.name = name or f"sentencepiece-{self.vocab_size}"
        self.end_of_document = processor.eos_id()
        if self.end_of_document < 0:
            raise UserError(f"tokenizer: {self.name} has no end-of-sentence token; needed to end documents")
        self._bytes_of_space_mark = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        # Models that add a space before the text, or that lack bytes, are used unchanged: splitting their
        # text at U+2581 would give other ids than the library does.
        self._adds_space = first_piece.startswith(SPACE_MARK)
        has_bytes = all(map(processor.is_byte, self._bytes_of_space_mark))
        self._spells_space_mark = has_bytes and not self._adds_space

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, name: str | None = None) -> SentencePieceTokenizer:
        """Train byte-fallback BPE on *texts*: the same texts in the same order give the same model file.

        Texts are held in memory by the trainer: hand over a sample of a large corpus (pretrain.prepare does).
        Raises UserError if the vocabulary cannot have *vocab_size* entries, and whatever iterating *texts*
        raises.
        """
        import sentencepiece

        model = io.BytesIO()
        # Read before the trainer runs: what is raised inside it, a stop or Ctrl-C too, becomes a
        # RuntimeError.
        sentences = list(_sentences(texts))
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=vocab_size,
                minloglevel=2,
                **SENTENCEPIECE_OPTIONS,
            )
        except (RuntimeError, OSError) as error:
            raise UserError(f"train_tokenizer: {vocab_size} entries {_training_problem(error)}") from error
        return cls(model.getvalue(), name)

    def encode(self, text: str) -> list[int]:
        if self._spells_space_mark and SPACE_MARK in text:
            first, *rest = (self._processor.encode(part) for part in text.split(SPACE_MARK))
            return list(first) + [token for part in rest for token in (*self._bytes_of_space_mark, *part)]
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._processor.encode(list(texts), num_threads=self.threads or os.cpu_count() or 1)
        marked = self._spells_space_mark
        return [
            self.encode(text) if marked and SPACE_MARK in text else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        processor = self._processor
        # The library would write the unknown token as U+2047.
        return processor.decode(
            [i for i in self._check_ids(ids) if not (processor.is_control(i) or processor.is_unknown(i))]
        )

    def read_back(self, text: str) -> str:
        return self.decode(self.encode(text))

    def special_texts(self) -> list[str]:
        processor = self._processor
        kinds = (processor.is_control, processor.is_unknown)
        pieces = range(self.vocab_size)
        return [processor.id_to_piece(piece) for piece in pieces if any(kind(piece) for kind in kinds)]

    def _count_bytes(self) -> np.ndarray:
        processor = self._processor
        sizes = np.zeros(self.vocab_size, np.int64)
        for token in range(self.vocab_size):
            if processor.is_byte(token):
                sizes[token] = 1
            elif not (processor.is_control(token) or processor.is_unknown(token)):
                sizes[token] = len(processor.id_to_piece(token).replace(SPACE_MARK, " ").encode())
        return sizes

    def check_spelling(self) -> None:
        super().check_spelling()
        if self._adds_space:
            raise UserError(
                f"tokenizer: {self.name} adds a space before the text (add_dummy_prefix), so its tokens do "
                "not spell the text and a model trained with it cannot be exported; valid: a folder with the "
                "same tokenizer as tokenizer.json, or a model trained without the prefix (--train_tokenizer "
                "N)"
            )

    @property
    def model_file(self) -> bytes:
        """The SentencePiece model, as it is in the file."""
        return self._model

    def save(self, folder: str | os.PathLike[str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, SENTENCEPIECE_FILE).write_bytes(self._model)

    def content_hash(self) -> str:
        return hashlib.sha256(self._model).hexdigest()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Cut the texts into chunks that the trainer keeps whole, after a line where one ends in time.

    The trainer takes U+2581 for a space and drops sentences with NUL, so these end a chunk and are left out.
    """
    for text in texts:
        for part in re.split("[\0\u2581]", text):
            start = 0
            while start < len(part):
                end = start + _CHUNK
                cut = part.rfind("\n", start, end) if end < len(part) else -1
                # The newline opens the next chunk: the trainer drops trailing ones.
                end = cut if cut > start else end
                yield part[start:end]
                start = end


def _training_problem(error: Exception) -> str:
    """SentencePiece's message, reworded: it names its own source lines and options that are not ours."""
    message = " ".join(str(error).split())
    if match := re.search(r"too high .* <= (\d+)", message):
        return f"are too many for so little text; valid: at most {match[1]}, or more text"
    if match := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return f"are too few for the characters of this text; valid: more than {match[1]}"
    if "sentences_.empty()" in message:
        return "cannot be trained on no text; needed: documents in the training split"
    return f"cannot be trained: {message}"


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face tokenizer, run by the ``tokenizers`` library: the ids are the library's own.

    Special tokens spelled out in the text are taken as such, if the tokenizer has them as added tokens and
    does not say ``split_special_tokens``.
    """

    def __init__(
        self, backend: Any, name: str, end_of_document: str | None = None, split_special_tokens: bool = False
    ) -> None:
        self._backend = backend
        self._hash: str | None = None
        backend.encode_special_tokens = split_special_tokens
        backend.no_padding()
        backend.no_truncation()
        self.name = name
        self._vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values()) + 1
        possible_end_tokens = [end_of_document] if end_of_document else _END_TOKENS
        end_tokens = [token for token in possible_end_tokens if token in self._vocabulary]
        if not end_tokens:
            raise UserError(
                f"tokenizer: {name} has no end-of-document token ({', '.join(possible_end_tokens)}); "
                "valid: eos_token in its tokenizer_config.json"
            )
        self._end_text = end_tokens[0]
        self.end_of_document = self._vocabulary[end_tokens[0]]

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], name: str | None = None) -> HuggingFaceTokenizer:
        """Read ``tokenizer.json``, or byte-level BPE from ``vocab.json`` and ``merges.txt`` as in GPT-2."""
        import tokenizers

        root = Path(folder)
        file = root / ("tokenizer.json" if os.path.lexists(root / "tokenizer.json") else "vocab.json")
        merges = root / "merges.txt"
        if not (os.path.lexists(file) and (file.name == "tokenizer.json" or os.path.lexists(merges))):
            raise UserError(
                f"tokenizer: {str(root)!r} holds no tokenizer; valid: a folder with tokenizer.model, "
                "tokenizer.json, or vocab.json and merges.txt"
            )
        content = read_file(file)
        try:
            if file.name == "tokenizer.json":
                backend = call_quietly(tokenizers.Tokenizer.from_buffer, content)
                check_ids(backend.get_vocab(with_added_tokens=True))
                for token in json.loads(content).get("added_tokens") or []:
                    if (usable := backend.token_to_id(token["content"])) != token["id"]:
                        raise ValueError(f"the added token {quote(token)} would get the id {usable}")
            else:
                check_ids(json.loads(content))
                vocabulary, file = file, merges
                read_file(file)
                model = call_quietly(tokenizers.models.BPE.from_file, str(vocabulary), str(file))
                backend = tokenizers.Tokenizer(model)
                backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
                backend.decoder = tokenizers.decoders.ByteLevel()
            file = root / "tokenizer_config.json"
            config = json.loads(read_file(file)) if os.path.lexists(file) else {}
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"tokenizer: {str(file)!r} cannot be read: {quote(error, 300, plain=True)}"
            ) from error
        end = config.get("eos_token") if isinstance(config, dict) else config
        end = end.get("content") if isinstance(end, dict) else end
        if not (isinstance(config, dict) and isinstance(end, str | None)):
            raise UserError(
                f"tokenizer: eos_token in {str(file)!r} is {quote(end)}; it must be the text of a token, "
                "such as </s>"
            )
        split = config.get("split_special_tokens") or False
        if not isinstance(split, bool):
            raise UserError(
                f"tokenizer: split_special_tokens in {str(file)!r} is {quote(split)}; valid: true or false"
            )
        own_name = config.get("name_or_path")
        known = own_name if own_name and isinstance(own_name, str) else Path(os.path.realpath(root)).name
        return cls(backend, name or known, end, split)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [item.ids for item in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        text_ids = [i for i in self._check_ids(ids) if i != self.end_of_document]
        return self._backend.decode(text_ids, skip_special_tokens=True)

    def read_back(self, text: str) -> str:
        return self._backend.decode(self.encode_batch([text])[0], skip_special_tokens=False)

    def special_texts(self) -> list[str]:
        added_tokens = self._backend.get_added_tokens_decoder().values()
        added = [token.content for token in added_tokens if token.special]
        unknown = getattr(self._backend.model, "unk_token", None)
        return list(dict.fromkeys([*added, self._end_text, *([unknown] if unknown else [])]))

    def spelled_bytes(self) -> np.ndarray:
        sizes = self.token_bytes().copy()
        for number, token in self._backend.get_added_tokens_decoder().items():
            sizes[number] = len(token.content.encode())
        return sizes

    def _count_bytes(self) -> np.ndarray:
        definition = json.loads(self._backend.to_str())
        added = {item["id"]: item for item in definition.get("added_tokens") or []}
        byte_level = '"ByteLevel"' in json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
        if not byte_level and not definition["model"].get("byte_fallback"):
            raise UserError(
                f"tokenizer: the bytes of {self.name}'s tokens are not defined (its model is "
                f"{definition['model'].get('type')}); valid: byte-level or byte-fallback BPE"
            )
        sizes = np.zeros(self.vocab_size, np.int64)
        # With bytes for what is not in the vocabulary, no text becomes the unknown token.
        unknown = definition["model"].get("unk_token") if definition["model"].get("byte_fallback") else None
        for piece, token in self._vocabulary.items():
            special = piece == unknown or (token in added and added[token]["special"])
            if token == self.end_of_document or special:
                continue
            if byte_level and token not in added:
                sizes[token] = len(piece)  # one letter of GPT-2's alphabet stands for one byte
            elif token not in added and _BYTE_PIECE.fullmatch(piece):
                sizes[token] = 1
            else:
                spelled = piece if token in added else piece.replace(SPACE_MARK, " ")
                sizes[token] = len(spelled.encode())
        return sizes

    def save(self, folder: str | os.PathLike[str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "tokenizer.json").write_text(self._backend.to_str(pretty=True), "utf-8")
        # Keys as transformers writes them, so that the folder loads there as well.
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._end_text,
            "name_or_path": self.name,
            **({"split_special_tokens": True} if self._backend.encode_special_tokens else {}),
        }
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def definition(self) -> str:
        """The content of its ``tokenizer.json``."""
        return self._backend.to_str()

    def content_hash(self) -> str:
        if self._hash is None:  # takes a fifth of a second for GPT-2's, and is called often
            definition = json.dumps(json.loads(self.definition()), sort_keys=True)
            split = "\nsplit" if self._backend.encode_special_tokens else ""
            self._hash = hashlib.sha256(f"{definition}\n{self._end_text}{split}".encode()).hexdigest()
        return self._hash


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer in a folder (or ``.model`` file), else the one of that name on the Hugging Face hub.

    In a folder with several files ``tokenizer.json`` comes first, as for ``transformers.AutoTokenizer``, then
    ``tokenizer.model``, then ``vocab.json`` with ``merges.txt``.

    Raises UserError if there is none.
    """
    path = Path(source)
    if path.is_dir():
        return _load_folder(path)
    if os.path.lexists(path):
        if path.suffix != ".model":
            raise UserError(
                f"tokenizer: {str(path)!r} is a file; valid: a folder, or a SentencePiece .model file"
            )
        return SentencePieceTokenizer(read_file(path), file=path)
    return _load_folder(_fetch_from_hub(os.fspath(source)), os.fspath(source))


def _load_folder(path: Path, name: str | None = None) -> Tokenizer:
    model = path / SENTENCEPIECE_FILE
    if os.path.lexists(model) and not os.path.lexists(path / "tokenizer.json"):
        return SentencePieceTokenizer(read_file(model), file=model)
    return HuggingFaceTokenizer.from_folder(path, name)


def _fetch_from_hub(name: str) -> Path:
    """Fetch the tokenizer files of the hub repository *name*, or take them from the local cache."""
    check_variables("hub")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # no network, no such name, not a name: one message for the user
        raise UserError(
            f"tokenizer: {name!r} is not a local folder and cannot be fetched from the Hugging Face hub "
            f"({type(error).__name__}); valid: a folder with tokenizer.model, tokenizer.json, "
            "or vocab.json and merges.txt, or a hub name while online"
        ) from error
