"""What the style of a built page holds, for the tests of the report and of a comparison."""

import re
from collections.abc import Iterable


def media(page: str, query: str) -> str:
    """The rules for screens of this query, such as "max-width: 700px"; none: ""."""
    rest = page.partition(f"@media ({query}) {{")[2]
    depth = 1
    for end, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return rest[:end]
    return ""


def colours_of(style: str) -> set[str]:
    """The names that its first :root gives values."""
    root = re.search(r":root \{(.*?)\}", style, re.DOTALL)
    return set(re.findall(r"--([\w-]+):", root[1])) if root else set()


def assert_fits(page: str, width: int, columns: Iterable[str]) -> None:
    """Of a phone up to this width, a row of a table is a block whose cells name their column; a dark screen has each
    colour in its own value."""
    assert 'content="width=device-width, initial-scale=1"' in page
    phone = media(page, f"max-width: {width}px")
    assert "table, tbody, tr, td { display: block; }" in phone
    assert "content: attr(data-label)" in phone
    assert set(columns) <= set(re.findall(r'<td data-label="([^"]*)"', page))
    assert colours_of(page) == colours_of(media(page, "prefers-color-scheme: dark")) != set()
