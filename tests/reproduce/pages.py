"""What the style of a built page holds, for the tests of the report and of a comparison."""

import re


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
