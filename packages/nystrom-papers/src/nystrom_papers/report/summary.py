"""The results of a study as one JSON file next to its rows: tables, verdicts, figures and the setting.

The page of all studies is written from these files alone, see `nystrom_papers.report.gallery`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from nystrom.json_files import read_json
from nystrom.whole_files import write_whole
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table

SUMMARY = "summary.json"
# The source of a study that is in no paper.
OURS = "this library"


class Verdict(NamedTuple):
    """Whether what was measured agrees with a claim, decided by a rule on the rows.

    Attributes:
        claim: The claim, in a sentence.
        agrees: True, False, or None where the rows cannot tell.
        numbers: The numbers that decide, in a sentence.
        ours: Whether the claim is of this library and not of a paper.
    """

    claim: str
    agrees: bool | None
    numbers: str
    ours: bool = False

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return {True: "agrees", False: "does not agree", None: "cannot tell"}[self.agrees]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a study.

    Attributes:
        name: Name of the study.
        shows: The content of the study, in a sentence.
        source: Place in the papers.
        size: "small" or "paper".
        setting: The setting, by name: the model, the texts, the sizes.
        differs: How this differs from the paper's setting; "" if it does not.
        tables: The tables.
        verdicts: The verdicts.
        figures: Names of the figures' files, those that end in .png.
        rows: How many rows were measured.
        provenance: Device, dtype, version of torch, commits and dates of the rows.
        command: The command that measured the rows.
        minutes: Total duration of the measurements.
    """

    name: str
    shows: str
    source: str
    size: str
    setting: Mapping[str, str]
    differs: str
    tables: Sequence[Table]
    verdicts: Sequence[Verdict]
    figures: Sequence[str]
    rows: int
    provenance: str
    command: str
    minutes: float

    def claims(self, *, ours: bool) -> list[Verdict]:
        """The verdicts on claims of the papers or, if wanted, of this library."""
        return [verdict for verdict in self.verdicts if (verdict.ours or self.source == OURS) is ours]


def claim_counts(summaries: Sequence[Summary]) -> Iterator[tuple[str, str, str, str]]:
    """Whose claims, and how many agree with what was measured, do not, and are undecided."""
    for whose, ours in (("the papers", False), ("this library's pages", True)):
        if answers := [verdict.agrees for summary in summaries for verdict in summary.claims(ours=ours)]:
            yes, no, unknown = (str(answers.count(answer)) for answer in (True, False, None))
            yield whose, yes, no, unknown


def count_claims(summaries: Sequence[Summary]) -> str:
    """How many claims of the papers, and of this library, agree with what was measured, in a sentence each."""
    return " ".join(
        f"{whose.capitalize()} make {int(yes) + int(no) + int(unknown)} claims: {yes} agree with the rows, {no} do "
        f"not, and the rows cannot tell {unknown}."
        for whose, yes, no, unknown in claim_counts(summaries)
    )


def provenance_of(rows: Sequence[Row]) -> str:
    """Dtypes, devices, versions of torch, commits and dates of rows, each once and in order."""
    shared = [
        (row.dtype, row.device, f"torch {row.torch}", f"commit {row.commit or 'unknown'}", row.date) for row in rows
    ]
    return ", ".join(" and ".join(sorted(set(values))) for values in zip(*shared, strict=True))


def write_summary(summary: Summary, folder: Path, name: str = SUMMARY) -> None:
    """Write the summary of a study into a folder."""
    values = asdict(summary) | {
        "tables": [table._asdict() for table in summary.tables],
        "verdicts": [verdict._asdict() for verdict in summary.verdicts],
    }
    text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    write_whole(folder / name, text)


def read_summary(folder: Path, name: str = SUMMARY) -> Summary | None:
    """The summary of a study in a folder; None if there is none, ValueError if it is damaged or of another version."""
    path = folder / name
    if not path.is_file():
        return None
    remedy = "run the study again, which rewrites it from its rows"
    values = read_json(path, remedy=remedy)
    try:
        values["tables"] = [Table(**table) for table in values["tables"]]
        values["verdicts"] = [Verdict(**verdict) for verdict in values["verdicts"]]
        return Summary(**values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a summary of a study ({error}): {remedy}.") from error
