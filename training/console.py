"""How things are printed: the live line, aligned rows (banner.py's), numbers, text for a terminal or a shell."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterable
from typing import TypeVar

from data.progress import bar, is_live

Batch = TypeVar("Batch")


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Aligned `name value` lines below a title; a row with an empty name continues the one above."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def count(number: float) -> str:
    """12_345_678 -> 12.3 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def plural(number: int, noun: str) -> str:
    """1 layer, 2 layers."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def changes(settings: dict[str, list]) -> str:
    """{"trainer.steps": [20000, 40]} -> trainer.steps 20000 -> 40."""
    return ", ".join(f"{name} {was} -> {now}" for name, (was, now) in settings.items())


# A larger spread of speeds is due to other programs: on two idle cores, 30-step rows varied by a factor of 1.4.
SPREAD = 2.0


def speed_range(speeds: Iterable[float]) -> tuple[float, float] | None:
    """The slowest and the fastest of a run's rows, a tenth of the rows left out at either end."""
    ordered = sorted(speeds)
    odd = len(ordered) // 10
    return (ordered[odd], ordered[-1 - odd]) if ordered else None


def printable(text: str) -> str:
    """A model's text, made safe for a terminal: a byte-level model may produce control characters."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)", "\ufffd", text)


def for_shell(setting: str) -> str:
    """key=value as one types it: the value in Hydra's quotes where it needs them, and all in the shell's."""
    plain = re.fullmatch(r"[^=]+=[\w./ +-]*", setting, re.ASCII)
    return shlex.quote(setting) if plain else quoted_for_shell(setting)


def quoted_for_shell(setting: str) -> str:
    """key=value as one types it, for a value that Hydra is to take as one string, whatever is in it."""
    key, _, value = setting.partition("=")
    # Within quotes Hydra reads a backslash as itself, unless a quote follows, the closing one included.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    quoted = f"{key}='{escaped}'"
    return shlex.quote(quoted) if re.search(r'["$`]|\\{2}', quoted) else f'"{quoted}"'


class Progress:
    """One line that is rewritten: step, loss, tokens/s, time left for the steps alone. Into a file, a line every ten
    seconds."""

    def __init__(self, start: int, steps: int, shown: bool) -> None:
        self._shown = shown
        self._begin = f"step {{n:,}}/{{total:,}}{' {bar:10}' * is_live()}"
        self._stepped = time.time()
        self._bar = bar(self._begin, total=steps, initial=start, disable=not (shown and steps))

    def step(self) -> None:
        self._bar.update()
        self._stepped = time.time()

    def go_on(self) -> None:
        """Leave what was done since the last step, such as an evaluation, out of the time that a step takes."""
        if not self._bar.disable:
            other = time.time() - self._stepped
            self._bar.start_t += other
            self._bar.last_print_t += other

    def report(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Show this loss and speed on the line from now on. It names its step: the counter beside it goes on."""
        rate = f"{tokens_per_second:,.0f} tokens/s · " if tokens_per_second else ""
        # The time left is not known before the first step.
        self._bar.bar_format = f"{self._begin} · {{desc}}{{remaining}} left"
        self._bar.set_description_str(f"loss {loss:.4f} at step {step:,} · {rate}", refresh=False)

    def evaluating(self, batches: Iterable[Batch], number: int) -> Iterable[Batch]:
        """The batches of an evaluation, `number` of them; if they take long, the line shows how far it is."""
        self._bar.clear()  # it comes back with the next line that stays
        form = f"evaluating {self._begin.removeprefix('step ')} · {{remaining}} left"
        # The delay: nothing is shown of an evaluation that ends before the first line is due.
        how = {"disable": not self._shown, "leave": False, "position": 0, "delay": 1e-9}
        return bar(form, iterable=batches, total=number, **how)

    def say(self, text: str) -> None:
        """Print a line that stays, above the live one."""
        if self._shown:
            self._bar.write(text)
            sys.stdout.flush()  # to a file it would come at the end

    def close(self) -> None:
        self._bar.close()
