"""Documents whose tables come from the records: what stands between the markers is made, never typed.

<!-- results:table1 -->
... made by `asfp reproduce --write` ...
<!-- /results -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from asfp.errors import AsfpError
from asfp.reproduce import DEFINITIONS, check_name
from asfp.reproduce.plan import Places, make_plan
from asfp.reproduce.records import Record, load_records
from asfp.reproduce.sheets import SHEETS
from asfp.reproduce.show import Sheet, as_markdown, sheet_of

DOCUMENTS = ("README.md", "docs/results.md")
END = "<!-- /results -->"
_BLOCK = re.compile(r"(<!-- results:(\S+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
_BEGIN = re.compile(r"<!-- results:\S+ -->\n")
_MARKER = re.compile(r"<!-- /results -->|<!-- /?results[^\n]*\n?")
_UNSEEN = Path("no runs here")  # a document shows records alone, not what lies in somebody's run folders


def filled(text: str, places: Places, records: Mapping[str, Record]) -> str:
    """The text with every block between markers made anew.

    >>> from asfp.reproduce.plan import find_recipes
    >>> marked = "<!-- results:fig-rate -->" + chr(10) + "old" + chr(10) + "<!-- /results -->"
    >>> print(filled(marked, Places(find_recipes()), {}).splitlines()[2])
    | epoch | ASFP | SFP |
    """
    _check_markers(text)
    return _BLOCK.sub(lambda found: f"{found[1]}\n{_block(check_name(found[2]), places, records)}\n\n{found[4]}", text)


def _check_markers(text: str) -> None:
    """Each beginning is alone in its line and has an end before the next."""
    begun = ""
    for found in _MARKER.finditer(text):
        marker, where = found[0].strip(), f"in line {text.count(chr(10), 0, found.start()) + 1}"
        if marker == END and not begun:
            raise AsfpError(f"a marker has no partner: {marker} {where} has no <!-- results:NAME --> before it")
        if marker != END and begun:
            break
        if marker != END and not _BEGIN.fullmatch(found[0]):
            raise AsfpError(
                f"{marker} {where} is no marker: write <!-- results:NAME --> at the end of its line, or {END}"
            )
        begun = "" if marker == END else f"{marker} {where}"
    if begun:
        raise AsfpError(f"a marker has no partner: {begun} has no {END} behind it")


def _block(name: str, places: Places, records: Mapping[str, Record]) -> str:
    if name in SHEETS:
        sheet = SHEETS[name](places.results)
    else:
        plan = make_plan(DEFINITIONS[name], Places(places.recipes, places.results, _UNSEEN), records)
        sheet = sheet_of(plan, recorded=True)
        missing = [run for row, runs in plan.rows for run in runs if run.record is None and not row.optional]
        said = _planned(len(missing), sum(run.state == "blocked" for run in missing), "more " if sheet.rows else "")
        if not sheet.rows:
            return f"Nothing recorded yet; {said}: `asfp reproduce {name}`."
        if name != "summary" and missing:
            more = f"{said}: `asfp reproduce {name}`."
            sheet = Sheet(sheet.title, sheet.heads, sheet.rows, (*sheet.notes, more))
    return as_markdown(sheet)


def write_documents(root: Path, places: Places, documents: tuple[str, ...] = DOCUMENTS) -> list[Path]:
    """Make the blocks of the documents under `root` anew; returns those that changed.

    Nothing is written unless all of it can be, nor without any record: that would empty the tables.
    """
    paths = [root / name for name in documents]
    for path in paths:
        if not path.exists():
            raise AsfpError(f"there is no {path}: run this in the folder of the repository")
    records = load_records(places.results)
    if not records:
        raise AsfpError(
            f"there are no records in {places.results / 'cifar10'}, and the tables of the documents would be empty: "
            "name the folder that holds cifar10/*.json with --results"
        )
    changed = {}
    for path in paths:
        old = path.read_text(encoding="utf-8")
        try:
            new = filled(old, places, records)
        except AsfpError as error:
            raise AsfpError(f"{path}: {error}") from error
        if new != old:
            changed[path] = new
    for path, new in changed.items():
        path.write_text(new, encoding="utf-8")
    return list(changed)


def _planned(count: int, blocked: int = 0, more: str = "") -> str:
    """What is still to be run, as a sentence.

    >>> _planned(1, more="more "), _planned(3, 2)
    ('1 more run is planned', '3 runs are planned, 2 of them from weights that were not kept and are to be made again')
    """
    lost = f", {blocked} of them from weights that were not kept and are to be made again" if blocked else ""
    return f"{count} {more}run{' is' if count == 1 else 's are'} planned{lost}"
