"""GPT-2's byte-level tokenizer with the merges of a few texts alone: published ids without the published
files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import tokenizers

VOCABULARY = 50257
# Ranks of merges and their two halves. Its id is 256 + rank, since the bytes come first.
MERGE_LINES = """
0 Ġ t, 4 r e, 8 Ġ s, 10 Ġ w, 15 i s, 17 o r, 21 Ġ f, 38 Ġt h, 41 l l, 43 Ġ n, 46 Ġ re, 47 v e
62 Ġ is, 77 u r, 79 l d, 82 ' s, 96 Ġ 1, 100 Ġw e, 128 Ġs e, 146 Ġ G, 172 Ġth is, 220 Ġw or
439 e ll, 444 ur n, 510 Ġse e, 635 e f, 739 Ġwor ld, 749 Ġre t, 770 I t, 849 Ġ1 2, 927 ' ll
1087 Ġ +, 1185 Ġret urn, 1868 Ġ x, 1975 4 5, 2343 ) :, 4043 d ef, 8326 ð Ł, 10853 ell o, 11315 P T
12129 Ġn a, 12264 Ġ ðŁ, 15240 H ello, 16775 Ġ12 3, 26628 Ã ¯, 30069 ĠðŁ ĺ, 38520 Ã¯ ve
41236 Ġna Ã¯ve
"""
MERGE_PARTS = (part.partition(" ") for part in re.split(r", |\n", MERGE_LINES.strip()))
MERGES = {int(rank): halves for rank, _, halves in MERGE_PARTS}
IDS_OF_CODE = [4299, 277, 7, 87, 2599, 198, 220, 220, 220, 1441, 2124, 1343, 17031, 2231]
PUBLISHED = {
    "Hello world, this is GPT-2.": [15496, 995, 11, 428, 318, 402, 11571, 12, 17, 13],
    "def f(x):\n    return x + 12345": IDS_OF_CODE,
    "It's naïve; we'll see 😀": [1026, 338, 41492, 26, 356, 1183, 766, 30325, 222],
}


def write_gpt2(folder: Path) -> Path:
    """vocab.json and merges.txt with GPT-2's ids of PUBLISHED; the other entries are unused."""
    names = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names += [MERGES.get(rank, f"unused{rank}").replace(" ", "") for rank in range(VOCABULARY - 257)]
    ids = {name: number for number, name in enumerate([*names, "<|endoftext|>"])}
    assert len(ids) == VOCABULARY
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *MERGES.values()])
    (folder / "merges.txt").write_text(f"{merges}\n", encoding="utf-8")
    return folder
