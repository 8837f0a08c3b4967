"""Converts a SentencePiece BPE model to a BPE of the tokenizers library, with the same ids."""

from __future__ import annotations

from typing import Any

from model.errors import UserError
from pretrain.data.tokenizer import SPACE_MARK, SentencePieceTokenizer, Tokenizer


def find_export_obstacle(tokenizer: Tokenizer) -> str | None:
    """Why no tokenizer.json can give *tokenizer*'s ids; None if one can."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    proto = _parse(tokenizer)
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE or not proto.trainer_spec.byte_fallback:
        return f"{tokenizer.name} is not a byte-fallback BPE"
    normalizer = proto.normalizer_spec
    if normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces or normalizer.precompiled_charsmap:
        return f"{tokenizer.name} changes its text (normalization or an added space)"
    return None


def byte_fallback_bpe(tokenizer: SentencePieceTokenizer) -> Any:
    """Make a ``tokenizers`` BPE with the pieces of *tokenizer*, written with real spaces.

    With real spaces no replacement of U+2581 is needed, and a U+2581 in the text is spelled in bytes, as the
    run's tokenizer does it. SentencePiece joins the neighbours whose joined piece has the best score; here
    every way to split a piece is a merge, in the order of the joined pieces' scores. Control pieces are in
    the vocabulary, but are no added tokens: spelled out in a text they are text, as for SentencePiece.

    Raises:
        UserError: the model is not BPE, changes its text before splitting it, or has no byte pieces.
    """
    import tokenizers

    if obstacle := find_export_obstacle(tokenizer):
        raise UserError(
            f"tokenizer: {obstacle}; SentencePiece models are exported if they are byte-fallback BPE without "
            "normalization"
        )
    proto = _parse(tokenizer)
    kinds = type(proto.pieces[0])
    vocabulary: dict[str, int] = {}
    scored_pieces = []
    for token, piece in enumerate(proto.pieces):
        text = piece.piece
        if piece.type in (kinds.NORMAL, kinds.USER_DEFINED, kinds.UNUSED):
            # One that was given with real spaces matches nothing: those of a text are marks by then.
            text = f"<never {token}>" if " " in text else text.replace(SPACE_MARK, " ")
        if piece.type == kinds.NORMAL:
            scored_pieces.append((text, piece.score))
        vocabulary[text] = token
    piece_texts = {text for text, _ in scored_pieces}
    merges = []
    for text, _ in sorted(scored_pieces, key=lambda item: -item[1]):
        splits = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [pair for pair in splits if pair[0] in piece_texts and pair[1] in piece_texts]
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token=unknown, byte_fallback=True, fuse_unk=False)
    )
    # These are looked for before anything is joined.
    whole = (tokenizers.AddedToken(text, normalized=False) for text in user_defined_texts(tokenizer))
    backend.add_tokens([*whole])
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    return backend


def user_defined_texts(tokenizer: Tokenizer) -> list[str]:
    """The texts that are a token wherever they are, such as marks of a chat; of a SentencePiece model."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return []
    pieces = [each for each in _parse(tokenizer).pieces if each.type == each.USER_DEFINED]
    return [each.piece.replace(SPACE_MARK, " ") for each in pieces if " " not in each.piece]


def _parse(tokenizer: SentencePieceTokenizer) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(tokenizer.model_file)
    return proto
