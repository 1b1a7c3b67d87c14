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
_BLOCK = re.compile(r"(<!-- results:(\S+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
_UNSEEN = Path("no runs here")  # a document shows records alone, not what lies in somebody's run folders


def filled(text: str, places: Places, records: Mapping[str, Record]) -> str:
    """The text with every block between markers made anew.

    >>> from asfp.reproduce.plan import find_recipes
    >>> marked = "<!-- results:fig-rate -->" + chr(10) + "old" + chr(10) + "<!-- /results -->"
    >>> print(filled(marked, Places(find_recipes()), {}).splitlines()[2])
    | epoch | ASFP | SFP |
    """
    if text.count("<!-- results:") != len(_BLOCK.findall(text)) or text.count("<!-- /results") != len(
        _BLOCK.findall(text)
    ):
        raise AsfpError("a marker has no partner: each <!-- results:NAME --> needs a <!-- /results --> behind it")
    return _BLOCK.sub(lambda found: f"{found[1]}\n{_block(check_name(found[2]), places, records)}\n\n{found[4]}", text)


def _block(name: str, places: Places, records: Mapping[str, Record]) -> str:
    if name in SHEETS:
        sheet = SHEETS[name](places.results)
    else:
        plan = make_plan(DEFINITIONS[name], Places(places.recipes, places.results, _UNSEEN), records)
        sheet = sheet_of(plan, recorded=True)
        missing = sum(run.record is None for row, runs in plan.rows for run in runs if not row.optional)
        if not sheet.rows:
            return f"Nothing recorded yet; {_planned(missing)}: `asfp reproduce {name}`."
        if name != "summary" and missing:
            more = f"{_planned(missing, 'more ')}: `asfp reproduce {name}`."
            sheet = Sheet(sheet.title, sheet.heads, sheet.rows, (*sheet.notes, more))
    return as_markdown(sheet)


def write_documents(root: Path, places: Places, documents: tuple[str, ...] = DOCUMENTS) -> list[Path]:
    """Make the blocks of the documents under `root` anew; returns those that changed."""
    records, changed = load_records(places.results), []
    for name in documents:
        path = root / name
        if not path.exists():
            raise AsfpError(f"there is no {path}: run this in the folder of the repository")
        old = path.read_text(encoding="utf-8")
        new = filled(old, places, records)
        if new != old:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed


def _planned(count: int, more: str = "") -> str:
    """What is still to be run, as a sentence.

    >>> _planned(1, "more "), _planned(3)
    ('1 more run is planned', '3 runs are planned')
    """
    return f"{count} {more}run{' is' if count == 1 else 's are'} planned"
