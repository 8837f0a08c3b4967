from pretrain.utils.format import align_columns


def test_columns_are_aligned_and_lines_have_no_spaces_at_the_end():
    rows = [("name", "value", "note"), ("a", "1,000", ""), ("longer", "2", "x")]
    assert align_columns(rows, left=(0, 2)) == ["name    value  note", "a       1,000", "longer      2  x"]
    assert align_columns([("a", "bb"), ("ccc", "d")], left=()) == ["  a  bb", "ccc   d"]
    assert align_columns([]) == []
