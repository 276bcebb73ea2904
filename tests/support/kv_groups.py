"""Groups of KV layers, generated: as vLLM has them, with block sizes that it can put beside each other."""

from __future__ import annotations

from hypothesis import strategies as st

from kvprefetch.kv.groups import Group, Groups, Kind

HASH_TOKENS = 4


@st.composite
def layouts(draw: st.DrawFn) -> Groups:
    """Groups with rules: of full attention and perhaps others, with equal blocks or not, hashes of a block or less."""
    hash_tokens = draw(st.sampled_from([HASH_TOKENS, HASH_TOKENS * 2]))
    sizes = st.sampled_from(draw(st.sampled_from([[1], [2], [1, 2], [1, 3], [2, 3], [1, 2, 4]])))
    blocks = [hash_tokens * each for each in draw(st.lists(sizes, min_size=1, max_size=4))]
    unit = Groups(tuple(Group(Kind.FULL, block) for block in blocks), hash_tokens).unit_tokens
    groups, full = [], draw(st.integers(0, len(blocks) - 1))
    drafted = draw(st.sampled_from([(), (Kind.FULL,), (Kind.WINDOW,), (Kind.FULL, Kind.WINDOW)]))
    for number, block in enumerate(blocks):
        kinds = [Kind.FULL, Kind.FULL, Kind.WINDOW, Kind.WINDOW] + [Kind.CHUNK] * (block == unit)
        kinds += [Kind.STATE] * (block == hash_tokens)  # of larger ones prefixes may end inside a block
        kind, window = draw(st.sampled_from(kinds)) if number != full else Kind.FULL, 0
        if kind is Kind.WINDOW:
            window = draw(st.integers(2, 6 * block))
        elif kind is Kind.CHUNK:
            window = unit * draw(st.integers(1, 4))
        groups.append(Group(kind, block, window, kind in drafted))
    return Groups(tuple(groups), hash_tokens)
